"""`echelon run --torch-backend echelon`: our groups where an unmodified program asks for gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import echelon_torch_autoload
from tests.support.ranks import run_echelon

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

_GROUPS = """\
import sys, torch, torch.distributed as dist
dist.init_process_group()
groups = [None, dist.new_group(backend="gloo", pg_options=dist.ProcessGroupGloo._Options())]
groups.append(dist.new_group(backend="cpu:gloo"))
for group in groups:
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]
sys.stdout.write(f"names: {[dist.get_backend(group) for group in groups]}\\n")
dist.destroy_process_group()
"""

_HANG = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(4):
    while dist.get_rank() == 1 and step == 2:
        time.sleep(0.1)  # here it hangs
    dist.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("gloo", "echelon"),
        ("undefined", "echelon"),
        ("cpu:gloo,cuda:nccl", "cpu:echelon,cuda:nccl"),
        ("nccl", "nccl"),
        ("mpi", "mpi"),
        ("echelon", "echelon"),
        ("cuda:nccl", "cuda:nccl"),
    ],
)
def test_only_gloos_place_is_taken(asked, given, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert echelon_torch_autoload._name(asked) == given


def test_a_gpu_machine_keeps_nccl_for_programs_that_name_no_backend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert echelon_torch_autoload._name("undefined") == "cpu:echelon,cuda:nccl"


def _run(tmp_path, text: str, *options: str):
    program = tmp_path / "train.py"
    program.write_text(text)
    argv = ("--nproc-per-node=2", f"--run-dir={tmp_path / 'run'}", *options, str(program))
    return run_echelon("run", *argv)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--torch-backend=echelon",), "['echelon', 'echelon', 'cpu:echelon']"),
        ((), "['undefined', 'gloo', 'cpu:gloo']"),
    ],
)
def test_a_program_gets_our_groups_only_where_the_launcher_is_told(tmp_path, options, names):
    done = _run(tmp_path, _GROUPS, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"names: {names}") == 2, done.stdout


def test_an_unmodified_program_that_hangs_is_explained_with_its_line(tmp_path):
    options = ("--torch-backend=echelon", "--stall-timeout=5", "--on-stall=stop")
    done = _run(tmp_path, _HANG, *options)
    assert done.returncode == 3, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    folder = tmp_path / "run" / report["incidents"][0]["folder"]
    verdict = json.loads((folder / "verdict.json").read_text())["verdict"]
    line = 1 + next(n for n, text in enumerate(_HANG.splitlines()) if "here it hangs" in text)
    assert verdict["culprit_ranks"] == [1], done.stdout
    assert verdict["cause"] == "host_hang", done.stdout
    assert f"train.py:{line}" in json.dumps(verdict)


def test_a_variable_that_means_nothing_is_said_once_and_changes_nothing():
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(1).item())"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "ECHELON_TORCH_BACKEND": "nope"},
    )
    assert done.stdout == "1.0\n"
    assert done.stderr == (
        "echelon: ECHELON_TORCH_BACKEND has no effect, torch's own backends are used: "
        "'nope' is not 'echelon'\n"
    )
