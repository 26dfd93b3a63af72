"""What a job has left behind no longer counts: a recovered stall, an earlier attempt's incident."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from imagined_job import Job

from echelon.analysis import analyze
from echelon.analysis import watch as watching
from echelon.analysis.evidence.model import Incident
from echelon.analysis.sources import load as loading
from echelon.analysis.sources.load import Place
from echelon.analysis.watch import Watch, current


def _stalled(run: Path) -> None:
    job = Job(3).train(2)
    for rank in job.others(1):
        rank.all_reduce(inside=True)
    job[1].stands()
    job.write(run / "dump" / "incident_0")


def _rings(monkeypatch: pytest.MonkeyPatch, folder: Path, job: Job, *, attempt: int = 0) -> None:
    """Let a job's records stand in for the rings of a run directory."""
    job.write(folder, kind="")
    files = tuple((rank.rank, folder / f"rank_{rank.rank}") for rank in job.ranks)
    place = Place(files, f"the final rings of attempt {attempt}", Incident(attempt=attempt))
    for module in (loading, watching):
        monkeypatch.setattr(module, "find_rings", lambda _: place)


def _report(run: Path, **changes: object) -> None:
    told: dict[str, object] = {
        "ended_by": "worker",
        "exit_code": 0,
        "incidents": [{"kind": "stall", "recovered": True}],
    }
    (run / "report.json").write_text(json.dumps({**told, **changes}))


def test_a_stall_that_recovered_before_a_good_end_is_not_unhealthy(tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    _stalled(run)
    _rings(monkeypatch, tmp_path / "rings", Job(3).train(4))
    assert not analyze(run).healthy
    _report(run)
    report = analyze(run)
    assert report.healthy
    assert "an earlier stall recovered" in report.origin


@pytest.mark.parametrize(
    "changes",
    [
        {"exit_code": 1},
        {"ended_by": "agent"},
        {"incidents": [{"kind": "stall", "recovered": False}]},
        {"incidents": [{"kind": "failure", "recovered": True}]},
        {"incidents": "none"},
    ],
)
def test_any_other_end_leaves_the_incident_what_it_is(tmp_path, monkeypatch, changes) -> None:
    run = tmp_path / "run"
    _stalled(run)
    _rings(monkeypatch, tmp_path / "rings", Job(3).train(4))
    _report(run, **changes)
    assert not analyze(run).healthy


@pytest.mark.parametrize(
    ("steps", "attempt", "origin"), [(2, 0, "incident"), (9, 0, "the final"), (2, 1, "the final")]
)
def test_watch_follows_the_rings_that_have_progressed_since_an_incident(
    tmp_path, monkeypatch, steps: int, attempt: int, origin: str
) -> None:
    run = tmp_path / "run"
    _stalled(run)
    job = Job(3).train(steps)
    job.snapshot_s = 0.1
    _rings(monkeypatch, tmp_path / "rings", job, attempt=attempt)
    assert current(run).origin.startswith(origin)


def test_each_look_tells_only_what_is_new_from_the_start_to_a_second_attempt(
    tmp_path, monkeypatch
) -> None:
    run, told = tmp_path / "run", []
    seen = Watch(run, lambda report: told.append(report.verdict), told.append)

    def look() -> list[object]:
        told.clear()
        seen.look()
        seen.look()
        return list(told)

    def train(steps: int, attempt: int = 0) -> Job:
        job = Job(3).train(steps)
        job.snapshot_s = 0.1
        _rings(monkeypatch, tmp_path / f"rings {attempt}.{steps}", job, attempt=attempt)
        return job

    assert [str(line)[:8] for line in look()] == ["waiting:"]
    run.mkdir()
    train(1)
    assert look() == ["3 ranks, nothing is wrong (the final rings of attempt 0)"]
    _stalled(run)
    train(2)
    [verdict] = look()
    assert (verdict.cause.value, verdict.culprit_ranks, seen.exit_code) == ("host_hang", (1,), 1)
    train(9)
    assert look() == ["3 ranks, nothing is wrong (the final rings of attempt 0)"]
    assert seen.exit_code == 0
    train(10)
    assert not look()
    train(3, attempt=1)
    assert look() == ["3 ranks, nothing is wrong (the final rings of attempt 1)"]
