"""Constants of devices: where they are looked for, what keeps them, and that the tuner finds some."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from mlxcel_ext import tune, tuning
from mlxcel_ext.ops import CascadeCosts, cascade


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLXCEL_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", ["cpu", "nvidia-h200"])
def test_packaged_constants_are_costs(name):
    packaged = json.loads((tuning._PACKAGED / f"{name}.json").read_text())
    assert CascadeCosts(**packaged["cascade"]).reread > 0


def test_the_users_own_constants_come_first_and_keep_each_other_company():
    packaged = tuning.load("cascade", True)
    kept = tuning.save("other", True, {"a": 1.0})
    assert tuning.load("cascade", True) == packaged  # the user's file says nothing about it
    tuning.save("cascade", True, dict.fromkeys(packaged, 2.0))
    assert tuning.load("cascade", True) == dict.fromkeys(packaged, 2.0)
    assert json.loads(kept.read_text())["other"] == {"a": 1.0}
    assert kept.name.startswith("cpu-")


@pytest.mark.parametrize(
    ("constants", "text"),
    [
        ({"reread": 1.0}, "has other constants than this version's"),
        ([1, 2], "must map names to numbers"),
        ({"reread": "a"}, "must map names to numbers"),
    ],
)
def test_a_file_of_another_version_is_named(constants, text):
    tuning.save("cascade", True, constants)
    cascade._costs.cache_clear()
    with pytest.raises(ValueError, match=text):
        cascade._costs(True)
    cascade._costs.cache_clear()


def test_a_gpu_that_nobody_measured_gets_the_nearest(monkeypatch):
    monkeypatch.setattr(tuning.mx, "device_info", lambda device: {"device_name": "NVIDIA H900 (new)"})
    assert tuning.device_name(False) == "nvidia-h900-new"
    assert (
        tuning.load("cascade", False)
        == json.loads((tuning._PACKAGED / "nvidia-h200.json").read_text())["cascade"]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"is not JSON .*: delete it, or tune again"), ("[1]", r"must hold an object, got list")],
)
def test_a_broken_file_is_an_error_that_names_it(text, message):
    file = tuning.save("other", True, {})
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"^\[tuning\] {file} {message}"):
        tuning.load("cascade", True)


def test_an_unknown_section_is_an_error():
    with pytest.raises(ValueError, match=r"^\[tuning\] no file has a section 'nothing' for cpu-"):
        tuning.load("nothing", True)


def test_tuning_finds_constants_and_keeps_them(monkeypatch):
    monkeypatch.setattr(tune, "CPU_SIZES", tune.Sizes(batch=4, tokens=128, repeats=1, rounds=2))
    said = tune.tune_cascade(mx.cpu)
    constants = tuning.load("cascade", True)
    assert str(tuning.path(tuning.device_name(True))) in said
    assert 0 < constants["reread"] <= 1
    assert constants["row"] > 0
    assert min(constants.values()) >= 0
    CascadeCosts(**constants)
