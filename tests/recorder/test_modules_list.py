"""The list of modules and variables that the launcher's standbys are made from."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from itertools import count
from types import ModuleType

from echelon.recorder.write.setup.modules import installed_modules

_PROGRAM = """
import os, sys
sys.path.insert(0, os.getcwd())
import own
import fractions
import numpy
from echelon import recorder
os.environ["OMP_NUM_THREADS"] = "3"
os.environ.pop("GONE")
recorder.step(0)
"""


def test_a_rank_lists_installed_modules_and_the_variables_it_has_set(tmp_path):
    (tmp_path / "own.py").touch()
    listed = tmp_path / "modules.json"
    environ = {
        "PATH": os.environ["PATH"], "HOME": "/root", "OMP_NUM_THREADS": "1", "GONE": "1",
        "ECHELON_RANK_DIR": str(tmp_path / "rank"), "ECHELON_MODULES_FILE": str(listed),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], cwd=tmp_path, env=environ, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(listed.read_text())
    assert {"fractions", "numpy", "echelon.recorder"} <= set(told["modules"])
    assert not {"own", "__main__", "sitecustomize"} & set(told["modules"])
    assert {"OMP_NUM_THREADS", "GONE"} <= set(told["changed"])
    assert not {"HOME", "ECHELON_RANK_DIR"} & set(told["changed"])


_STEPS = """
import json, os
from echelon import recorder

def listed():
    with open(os.environ["ECHELON_MODULES_FILE"]) as file:
        return "colorsys" in json.load(file)["modules"]

recorder.step(7)
import colorsys
recorder.step()
assert not listed()
recorder.step()
assert listed()
"""


def test_what_the_first_two_steps_load_is_listed_when_their_end_shows(tmp_path):
    """The launcher starts standbys as soon as it sees two finished steps."""
    environ = {
        "PATH": os.environ["PATH"], "ECHELON_RANK_DIR": str(tmp_path / "rank"),
        "ECHELON_MODULES_FILE": str(tmp_path / "modules.json"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _STEPS], cwd=tmp_path, env=environ, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_modules_loaded_by_another_thread_do_not_disturb_the_list(monkeypatch):
    names = (f"loaded_meanwhile_{number}" for number in count())

    def load_one(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":  # stands for another thread, which runs while the list is made
            monkeypatch.setitem(sys.modules, next(names), ModuleType("loaded"))

    thresholds = gc.get_threshold()
    gc.callbacks.append(load_one)
    try:
        gc.set_threshold(1)
        found = installed_modules()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(load_one)
    assert "json" in found
