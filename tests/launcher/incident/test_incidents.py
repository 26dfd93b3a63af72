"""Incidents of a job without a process or a socket: what is collected, explained and kept."""

from __future__ import annotations

import signal
import time
from typing import ClassVar

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import incidents as incidents_module
from echelon.launcher.coordinator.gathering.waiting import why_roster_waits
from echelon.launcher.coordinator.restart.restarting import VERDICT_S
from echelon.launcher.incident import verdicts as verdicts_module
from echelon.recorder.stall.watchdog import Sight, Stall, StallRule
from tests.launcher.coordinator.jobs import Job, JobStore


class _Endless:
    """An analysis that never answers; `gave_way`: of each one so far."""

    gave_way: ClassVar[list[bool]] = []

    def __init__(self, *, gives_way: bool) -> None:
        self.gave_way.append(gives_way)

    def begin(self, *_: object) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _no_analysis(monkeypatch):
    monkeypatch.setattr(verdicts_module, "Analysis", _Endless)
    monkeypatch.setattr(_Endless, "gave_way", [])


@pytest.fixture
def stalls(monkeypatch):
    """Stalls that the rule sees at its next looks; None: none."""
    seen: list[Stall | None] = []

    def look(rule: StallRule, sights: object, now: int) -> Stall | None:
        stall = seen.pop(0) if seen else None
        rule._reported = {0: 1} if stall else rule._reported
        return stall

    monkeypatch.setattr(StallRule, "look", look)
    return seen


def _fail(job: Job) -> None:
    """Let rank 0 fail, and both nodes send what they have and end."""
    job.take(job.host, m.WorkerEnded(attempt=0, rank=0, code=1))
    job.take(job.other, m.WorkerEnded(attempt=0, rank=1, code=-15))
    _harvest(job)


def test_only_an_analysis_that_no_restart_waits_for_gives_way(tmp_path, stalls):
    _fail(Job(tmp_path / "a", "--nnodes", "2"))
    assert _Endless.gave_way == [False]
    for on_stall, expected in (("report", True), ("restart", False), ("stop", False)):
        job = Job(tmp_path / on_stall, "--nnodes", "2", "--on-stall", on_stall)
        stalls.append(Stall("rank 0 waits", 0))
        job.look()
        assert _Endless.gave_way[-1] is expected, on_stall
    assert len(_Endless.gave_way) == 4


def _harvest(job: Job) -> None:
    number = job.commands(m.Collect)[-1].incident
    for node in (job.host, job.other):
        job.take(node, m.Harvested(incident=number, exit_codes=[]))


@pytest.mark.parametrize("policy", ["always", "smart"])
def test_a_restart_does_not_wait_for_the_analysis_or_only_briefly(tmp_path, monkeypatch, policy):
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    job = Job(tmp_path, "--nnodes", "2", "--max-restarts", "1", "--restart-policy", policy)
    _fail(job)
    for node in (job.host, job.other):
        job.take(node, m.Idle(attempt=0, exit_codes=[], stopped=[]))
    job.coordinator.step()
    if policy == "smart":
        assert [start.restart for start in job.commands(m.Start, job.host)] == [0]
        assert now_s < job.coordinator._own_deadline_s() <= now_s + VERDICT_S
        now_s += VERDICT_S
        job.coordinator.step()
        job.coordinator.step()
    assert [start.restart for start in job.commands(m.Start, job.host)] == [0, 1]
    assert job.report.incidents[0].verdict is None, "it is still being explained"
    assert [one["action"] for one in job.report.decisions] == ["restart"]


def test_a_user_who_stops_the_job_does_not_wait_for_the_analysis(tmp_path, stalls):
    job = Job(tmp_path, "--nnodes", "2")
    stalls.append(Stall("rank 0 waits", 0))
    job.look()
    _harvest(job)
    assert job.coordinator._verdicts.num_open == 1
    job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    job.end_all(0, 1)
    assert job.coordinator.is_over
    assert job.report.exit_code == 143


def test_no_more_than_a_few_stalls_are_kept(tmp_path, monkeypatch, stalls):
    monkeypatch.setattr(incidents_module, "_MAX_STALLS", 2)
    job = Job(tmp_path, "--nnodes", "2", "--on-stall", "stop")
    for incident in (0, 1):
        stalls.append(Stall("rank 0 waits", 0))
        job.look()
        assert len(job.commands(m.Collect, job.other)) == incident + 1
        job.coordinator._world.rule._reported = None
        job.take(job.host, m.Sights(attempt=0, folded=[0, 1, 1, -1, 0, 9, 0], ranks=[]))
        job.coordinator._incidents._collection.has_progressed = True
        _harvest(job)
    stalls.append(Stall("rank 0 waits", 0))
    job.look()
    assert len(job.commands(m.Collect, job.other)) == 2
    assert "not collected because 2 are already kept" in job.terminal.text
    assert [stop.number for stop in job.commands(m.Stop, job.other)] == [signal.SIGTERM]


def test_progress_during_an_incident_is_that_incidents_and_not_the_last_ones(tmp_path, stalls):
    job = Job(tmp_path, "--nnodes", "2")
    stalls.append(Stall("rank 0 waits", 0))
    job.look()
    _harvest(job)
    assert [one.recovered for one in job.report.incidents] == [False]
    stalls.append(Stall("rank 1 waits", 0))
    job.look()
    job.coordinator._incidents.note_progress(job.coordinator._world)
    assert [one.recovered for one in job.report.incidents] == [False]
    _harvest(job)
    assert [one.recovered for one in job.report.incidents] == [False, True]


def test_a_stall_that_clears_node_by_node_is_one_incident(tmp_path, stalls):
    job = Job(tmp_path, "--nnodes", "2")
    for _ in range(5):
        stalls.append(Stall("rank 0 waits", 0))
        job.look()
    _harvest(job)
    assert len(job.commands(m.Collect, job.other)) == 1
    assert [one.recovered for one in job.report.incidents] == [False], "it still waits"


def test_the_rule_looks_once_per_tick_at_one_row_per_node(tmp_path, monkeypatch):
    looks: list[int] = []

    def look(_: StallRule, sights: list[Sight], __: int) -> None:
        looks.append(len(sights))

    monkeypatch.setattr(StallRule, "look", look)
    job = Job(tmp_path, "--nnodes", "2", nproc=64)
    for moves in range(200):
        for first, node in enumerate((job.host, job.other)):
            row = [64 * first, 1, 1, -1, 0, moves, 0]
            job.take(node, m.Sights(attempt=0, folded=row, ranks=[]))
    job.look()
    assert 1 <= len(looks) < 40
    assert max(looks) == 2


def test_a_store_that_died_is_reported_once(tmp_path):
    store = JobStore()
    job = Job(tmp_path, "--nnodes", "2", store=store)
    job.look()
    store.death = "was killed by SIGKILL"
    for _ in range(3):
        job.look()
    assert job.terminal.text.count("the job's store was killed by SIGKILL") == 1


def test_a_host_on_loopback_is_told_why_no_node_comes(tmp_path):
    job = Job(tmp_path, "--nnodes", "3", endpoint="localhost:1")
    waits = why_roster_waits(job.coordinator._roster, job.options)
    assert "2 of 3 required nodes connected" in waits
    assert "only launchers on this machine can reach localhost:1" in waits
