"""Restart after restart, each with a random fault: each report is correct, and nothing is left."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.launcher.jobs import soak_rank
from tests.support.machine import needs_machine, run_there
from tests.support.ranks import read_json

pytestmark = [pytest.mark.netns, needs_machine]

_ROOT = Path(__file__).parents[3]
_SECONDS_A_FAULT = 20.0  # far above what one takes, so that a hang is an end and not for ever


def _soak(folder: Path, seed: int, num_faults: int, faults: list[str]) -> None:
    done, left = run_there(
        [
            sys.executable, "-m", "tests.launcher.jobs.soak", str(folder), str(seed),
            str(num_faults), str(60 + num_faults * _SECONDS_A_FAULT), ",".join(faults),
        ],
        timeout_s=180 + num_faults * _SECONDS_A_FAULT,
        environ={"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-20_000:]
    assert left == []
    truth = _lines(folder / "truth")
    assert [(fact["fault"], fact["rank"]) for fact in truth] == [
        soak_rank.plan(seed, attempt, faults) for attempt in range(num_faults)
    ]
    report = read_json(folder / "node_0/report.json")
    assert (report["attempts"], report["exit_code"]) == (num_faults + 1, 0)
    seen_all = [(one["kind"], *_seen(one)) for one in report["incidents"]]
    assert len(seen_all) == num_faults, f"{folder}: {seen_all}"
    wrong = [
        f"{expected} was reported as {seen}: {folder / 'node_0' / incident['folder']}"
        for fact, incident in zip(truth, report["incidents"], strict=True)
        if (expected := _expected(fact)) != (seen := _seen(incident))
    ]
    assert not wrong, "\n".join(wrong)
    for counts in zip(*(line["counts"] for line in _lines(folder / "health")), strict=True):
        early, late = counts[: num_faults // 2], counts[num_faults // 2 :]
        assert max(late) <= max(early) + 2, f"threads or descriptors grow: {counts}"


def _expected(fact: dict[str, object]) -> tuple[str, list[int], bool]:
    fault = soak_rank.FAULTS[str(fact["fault"])]
    ranks = [2, 3] if fault in soak_rank.OF_A_NODE else [int(str(fact["rank"]))]
    return soak_rank.CAUSES[fault], ranks, True


def _seen(incident: dict[str, object]) -> tuple[object, object, object]:
    verdict = incident["verdict"]
    if not isinstance(verdict, dict):
        return None, None, incident["recovered"]
    return verdict["cause"], verdict["culprit_ranks"], incident["recovered"]


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_five_restarts(tmp_path):
    faults = ["passes_another_shape", "leaves_an_orphan", "its_whole_node_is_killed", "raises"]
    _soak(tmp_path, 1, 5, faults)


@pytest.mark.slow
def test_a_hundred_restarts(tmp_path):
    _soak(tmp_path, int(os.environ.get("SOAK_SEED", "7")), 100, list(soak_rank.FAULTS))
