"""A torch program that hangs or loses a rank under our launcher: cause, culprit and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_echelon

pytestmark = pytest.mark.ranks

_HEAD = """\
import os, signal, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("echelon")
rank = dist.get_rank()
dist.barrier()
"""

_SKIPPED = """\
x = torch.ones(4)
dist.all_reduce(x)
if rank != 2:
    dist.all_reduce(x)  # the line that rank 2 skips
while rank == 2:
    time.sleep(0.1)  # where rank 2 is instead
"""

_KILLED = """\
model = DistributedDataParallel(torch.nn.Linear(40, 40))
for step in range(4):
    if (rank, step) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 40)).sum().backward()  # the step
"""

_ORDER = """\
pair = dist.new_group(group_desc="rows")
x, y = torch.ones(2), torch.ones(2)
first, second = (pair, None) if rank == 1 else (None, pair)
dist.all_reduce(x, group=first)  # one order here, another there
dist.all_reduce(y, group=second)
"""


def _run(tmp_path: Path, body: str, *options: str) -> tuple[Any, str, int]:
    program = tmp_path / "train.py"
    program.write_text(_HEAD + body)
    folder = tmp_path / "run"
    argv = ("--nproc-per-node=3", f"--run-dir={folder}", *options, str(program))
    done = run_echelon("run", *argv)
    report = json.loads((folder / "report.json").read_text())
    incident = report["incidents"][0]
    verdict = folder / incident["folder"] / "verdict.json"
    assert verdict.exists(), (done.stdout, done.stderr, list((folder / "dump").rglob("*")))
    return json.loads(verdict.read_text()), done.stdout + done.stderr, done.returncode


def _line_of(body: str, text: str) -> int:
    return 1 + next(n for n, line in enumerate((_HEAD + body).splitlines()) if text in line)


def test_a_skipped_collective_names_the_rank_and_the_line_of_the_others(tmp_path):
    options = ("--stall-timeout=5", "--on-stall=stop")
    report, text, code = _run(tmp_path, _SKIPPED, *options)
    verdict = report["verdict"]
    assert (verdict["culprit_ranks"], code) == ([2], 3), text
    assert verdict["cause"] in ("host_hang", "skipped_collective")
    assert (verdict["group"], verdict["operation"], verdict["sequence"]) == (
        "world",
        "all_reduce",
        2,
    )
    assert f"train.py:{_line_of(_SKIPPED, 'where rank 2 is')}" in json.dumps(verdict)


def test_a_killed_rank_under_ddp_is_the_root_and_its_victims_are_fallout(tmp_path):
    report, text, code = _run(tmp_path, _KILLED)
    verdict = report["verdict"]
    assert (verdict["cause"], verdict["culprit_ranks"], code) == ("dead_process", [1], 137), text
    assert verdict["fallout_ranks"] == [0, 2]
    assert not [one for one in report["findings"] if one["cause"] == "exception"], text


def test_groups_used_in_different_orders_are_named(tmp_path):
    report, text, code = _run(tmp_path, _ORDER, "--stall-timeout=5", "--on-stall=stop")
    verdict = report["verdict"]
    assert (verdict["cause"], code) == ("order_desync", 3), text
    assert "'rows', 'world'" in verdict["next_action"]
