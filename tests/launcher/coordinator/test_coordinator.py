"""The coordinator of a job without a process or a socket: messages in, commands out."""

from __future__ import annotations

import json
import signal
import time

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.decide import EndedBy
from echelon.launcher.coordinator.observers import AttemptEnded
from echelon.launcher.coordinator.policy import policy
from echelon.launcher.coordinator.restart import restarting
from echelon.launcher.election.mandate import Mandate, Member
from echelon.launcher.election.takeover import Inheritance
from echelon.launcher.incident import verdicts
from echelon.launcher.incident.explain import Explanation
from echelon.recorder.continuation import BOARD
from tests.launcher.coordinator.jobs import Job, JobStore
from tests.support.ranks import read_json


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path, "--nnodes", "2")


def test_a_report_claims_nothing_before_the_end(job):
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.AGENT, 1)
    job.end_all(0, 1)
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.WORKER, 0)
    assert job.report.error == ""


def test_a_rank_that_cannot_be_killed_is_left_behind_and_named(job):
    job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    why = "uninterruptible sleep in nfs_wait"
    job.take(job.other, m.Unkillable(attempt=0, rank=1, why=why))
    job.end_all(0)
    assert job.coordinator.is_over
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.AGENT, 1)
    assert f"rank 1: {why}" in job.report.error
    assert "rank 1 cannot be killed" in job.terminal.text


def test_all_nodes_are_asked_to_stop_and_workers_are_signaled_once_with_their_grace(job):
    for node in (job.other, job.host, job.other):
        job.take(node, m.StopAsked(number=signal.SIGTERM))
    stops = job.commands(m.Stop, job.other)
    assert {(stop.number, stop.grace_ms) for stop in stops} == {(signal.SIGTERM, 10_000)}
    assert job.commands(m.Kill) == []
    job.end_all(0, 1)
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.SIGNAL, 143)


def test_a_node_of_an_elastic_job_leaves_and_the_world_starts_without_it(tmp_path):
    job = Job(tmp_path, "--nnodes", "1:2")
    job.take(job.other, m.StopAsked(number=signal.SIGTERM))
    assert [stop.number for stop in job.commands(m.Stop, job.host)] == [signal.SIGTERM]
    job.end_all(0, 1)
    assert [over.exit_code for over in job.commands(m.Over, job.other)] == [143]
    job.step()
    starts = job.commands(m.Start, job.host)
    assert [(start.world_size, start.restart) for start in starts] == [(2, 0), (1, 1)]
    assert not job.coordinator.is_over


def test_ranks_that_are_stopped_learn_of_those_that_were_lost_with_their_node(
    tmp_path, monkeypatch
):
    """A rank that waits for a lost one would not react to SIGTERM until its grace is over."""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(verdicts, "Analysis", _Endless)
    posted: list[object] = []

    class Store(JobStore):
        def post(self, folder: str, value: str) -> None:
            posted.append((folder, json.loads(value)["ranks"]))

    job = Job(tmp_path, "--nnodes", "2", store=Store())
    job.take(job.other, m.Left(reason="no heartbeat"))
    now_s += 1.0
    job.step()
    assert [one.number for one in job.commands(m.Stop, job.host)] == [signal.SIGTERM]
    assert posted == [], "the ranks' black boxes are collected before they learn of it"
    job.take(job.host, m.Harvested(incident=0, exit_codes=[]))
    assert posted == [(BOARD, [1])]
    job.coordinator.close()


def test_a_stop_between_two_attempts_is_not_lost(tmp_path):
    job = Job(tmp_path, "--nnodes", "2", "--max-restarts", "3")
    for node, rank in ((job.host, 0), (job.other, 1)):
        job.take(node, m.WorkerEnded(attempt=0, rank=rank, code=1))
    for node in (job.host, job.other):
        job.take(node, m.Harvested(incident=0, exit_codes=[]))
    assert len(job.commands(m.ClearUp)) == 2, "the attempt has not ended"
    job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    for node in (job.host, job.other):
        job.take(node, m.Idle(attempt=0, exit_codes=[], stopped=[]))
    job.step()
    job.coordinator.close()
    assert [start.restart for start in job.commands(m.Start, job.host)] == [0]
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.SIGNAL, 143)


def test_a_launcher_that_stood_still_does_not_take_that_for_its_ranks_stall(tmp_path, monkeypatch):
    job = Job(tmp_path, "--nnodes", "2", "--stall-timeout", "20")
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    for node, first in ((job.host, 0), (job.other, 1)):
        moves = [first, 1, 0, 1000, first, 7, 0]  # an operation is pending for 1 s
        job.take(node, m.Sights(attempt=0, folded=moves, ranks=[]))
    job.look()
    now_s += 100.0  # the launcher was stopped, or its machine
    job.look()
    assert job.commands(m.Collect) == []
    for _ in range(60):  # from here on it runs, and hears nothing
        if job.commands(m.Collect):
            break  # no further: an incident that is complete would be analyzed by a process
        now_s += 0.5
        job.look()
    (collect, _) = job.commands(m.Collect)
    job.coordinator.close()
    assert "has an operation pending for 20 s" in collect.reason


def test_an_early_look_stops_nothing_and_the_stall_after_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "Analysis", _Endless)
    job = Job(tmp_path, "--nnodes", "2", "--stall-timeout", "30", "--on-stall", "stop")
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    nodes = ((job.host, 0), (job.other, 1))

    def see(age_ms: int) -> None:
        for node, first in nodes:
            late = {"late_rank": first, "late_ms": age_ms, "limit_ms": 10_000, "what": "train.py:9"}
            row = [first, 1, age_ms, age_ms, first, 7, 0]
            seen = m.Sights(attempt=0, folded=row, ranks=[], worked_ms=age_ms, is_excused=False,
                            **late)  # fmt: skip
            job.take(node, seen)
        job.look()

    see(11_000)
    assert "longer than its history allows: train.py:9" in job.commands(m.Collect)[0].reason
    for node, _ in nodes:
        job.take(node, m.Harvested(incident=0, exit_codes=[]))
    assert len(job.report.incidents) == 1
    assert job.commands(m.Stop) == []
    now_s += 20.0
    see(31_000)
    assert "pending for 30 s" in job.commands(m.Collect)[-1].reason
    for node, _ in nodes:
        job.take(node, m.Harvested(incident=1, exit_codes=[]))
    assert len(job.commands(m.Stop)) == 2
    # One incident per stall: the look's, with what the ranks show now.
    (incident,) = job.report.incidents
    assert (incident.folder.name, incident.is_early) == ("incident_0", False)
    assert "pending for 30 s" in incident.reason
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["incident_0", "latest"]
    written = read_json(incident.folder / "incident.json")
    assert (written["number"], written["early"]) == (0, False)
    assert job.coordinator._verdicts.num_open == 1  # the look's is not waited for
    job.coordinator.close()


class _Endless:
    """An analysis that never answers, so that no verdict decides what follows."""

    def __init__(self, *, gives_way: bool) -> None: ...

    def begin(self, *_: object) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def no_verdicts(monkeypatch):
    monkeypatch.setattr(verdicts, "Analysis", _Endless)
    monkeypatch.setattr(restarting, "VERDICT_S", 0.0)


def _kill(job: Job, attempt: int, node: str, rank: int, ranks: dict[str, int]) -> None:
    """Let a rank be killed by a signal, and all nodes send what they have and end."""
    job.take(node, m.WorkerEnded(attempt=attempt, rank=rank, code=-signal.SIGKILL))
    for name, other in ranks.items():
        if other != rank:
            job.take(name, m.WorkerEnded(attempt=attempt, rank=other, code=-signal.SIGTERM))
    for name in ranks:
        job.take(name, m.Harvested(incident=attempt, exit_codes=[]))
    for name in ranks:
        job.take(name, m.Idle(attempt=attempt, exit_codes=[], stopped=[]))
    job.step()


@pytest.mark.usefixtures("no_verdicts")
def test_a_spare_takes_the_place_of_a_node_that_failed_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.0)
    job = Job(tmp_path, "--nnodes", "2", "--spares", "1", "--max-restarts", "9")
    job.take("spare", m.Hello(node="spare", host="spare", num_workers=1))
    try:
        for attempt in (0, 1):
            _kill(job, attempt, job.other, 1, {job.host: 0, job.other: 1})
        job.step()
    finally:
        job.coordinator.close()
    started = {node: len(job.commands(m.Start, node)) for node in (job.host, job.other, "spare")}
    assert started == {job.host: 3, job.other: 2, "spare": 1}
    assert [one["excluded"] for one in job.report.decisions] == [[], ["other"]]
    assert "2 failures of other: excluded" in job.terminal.text
    late = m.Hello(node="late", host="late", num_workers=1)
    assert job.coordinator._members.join(late), "an excluded node takes no place of a spare"


@pytest.mark.usefixtures("no_verdicts")
def test_a_pause_before_a_restart_is_kept_and_ends_at_a_stop(tmp_path, monkeypatch):
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    job = Job(tmp_path, "--nnodes", "2", "--max-restarts", "9")
    try:
        for attempt in (0, 1):
            _kill(job, attempt, job.other, 1, {job.host: 0, job.other: 1})
        assert "restart 2 of 9 in 1 s: rank 1 was killed by SIGKILL" in job.terminal.text
        assert len(job.commands(m.Start, job.host)) == 2
        assert job.coordinator._own_deadline_s() == now_s + 1.0
        announced = tmp_path / "rank_0" / "attempt_1" / "checkpoint.json"
        announced.parent.mkdir(parents=True)
        announced.write_text('{"path": "/data/step_57", "step": 57}')
        job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    finally:
        job.coordinator.close()
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.SIGNAL, 143)
    assert "saved at step 57 in /data/step_57: a requeued job continues there" in job.terminal.text
    assert job.report.stopped["saved_at_step"] == 57


def test_a_stop_before_the_first_attempt_reports_no_step_of_an_earlier_job(tmp_path):
    announced = tmp_path / "rank_0" / "attempt_0" / "checkpoint.json"
    announced.parent.mkdir(parents=True)
    announced.write_text('{"path": "/data/step_57", "step": 57}')
    job = Job(tmp_path, "--nnodes", "3")
    job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    assert job.coordinator.is_over
    assert "step" not in job.terminal.text


def test_an_attempt_has_ended_before_the_verdict_on_it_is_awaited(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "Analysis", _Endless)
    job = Job(tmp_path, "--nnodes", "2", "--max-restarts", "9")
    try:
        _kill(job, 0, job.other, 1, {job.host: 0, job.other: 1})
        job.step()
        assert job.coordinator._why_waiting().startswith("the verdict")
        ends = [one for one in job.happened if isinstance(one, AttemptEnded)]
        assert [(one.attempt, one.failed) for one in ends] == [(0, True)]
    finally:
        job.coordinator.close()


class _Succession:
    """Nothing but what another host left."""

    waits_for = ""

    def __init__(self, inherited: Inheritance | None) -> None:
        self.inherited = inherited
        self.memory = ""

    def admit(self, hello: m.Hello) -> None: ...

    def step(self) -> None: ...

    def why_lapsed(self, *, has_world: bool) -> str:
        return ""

    def begin(self, nodes: object) -> None: ...

    def remember(self, *, memory: str, **_: int) -> None:
        self.memory = memory

    def may_begin(self, nodes: object, *, memory: str, **_: int) -> bool:
        self.memory = memory
        return True


def _inherited(memory: str, attempt: int = 4) -> Inheritance:
    own = Member(name="a", host="a", endpoint="a:1", num_workers=1, node_rank=-1)
    mandate = Mandate(
        term=1, index=1, electorates=(("a",),), members=(own,), job_id="x", attempt=attempt,
        restarts=2,
        num_attempts=4, memory=memory,
    )  # fmt: skip
    return Inheritance(mandate=mandate, former="a", hellos=(), events=(), fenced_until_s=0.0)


@pytest.mark.usefixtures("no_verdicts")
def test_a_node_that_takes_over_continues_the_history_of_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.0)
    first = _Succession(None)
    job = Job(tmp_path / "a", "--nnodes", "2", "--max-restarts", "9", succession=first)
    for attempt in (0, 1):
        _kill(job, attempt, job.other, 1, {job.host: 0, job.other: 1})
    job.step()
    job.coordinator.close()
    failures = job.coordinator._restarts.failures
    assert len(failures) == 2
    heir = Job(tmp_path / "b", "--nnodes", "2", succession=_Succession(_inherited(first.memory)))
    assert heir.coordinator._restarts.failures == failures
    assert heir.report.decisions == job.report.decisions
    (start, _) = heir.commands(m.Start)
    assert [one["attempt"] for one in json.loads(start.history)["attempts"]] == [0, 1]


@pytest.mark.usefixtures("no_verdicts")
def test_a_node_that_takes_over_between_attempts_probes_what_is_not_probed_yet(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(policy, "FIRST_PAUSE_S", 0.0)
    first = _Succession(None)
    job = Job(tmp_path / "a", "--nnodes", "2", "--max-restarts", "9", succession=first)
    monkeypatch.setattr(Job, "answer_probes", lambda _: None)
    _kill(job, 0, job.other, 1, {job.host: 0, job.other: 1})
    job.step()
    job.coordinator.close()
    (asked,) = job.commands(m.Probe)
    assert len(job.commands(m.Start)) == 2, "no attempt follows before the answer"

    heir = Job(tmp_path / "b", "--nnodes", "2", succession=_Succession(_inherited(first.memory, 0)))
    heir.step()
    (again,) = heir.commands(m.Probe, heir.other)
    assert again.tasks == asked.tasks
    assert not heir.commands(m.Start)
    monkeypatch.undo()
    heir.answer_probes()
    assert len(heir.commands(m.Start)) == 2
    assert heir.report.decisions[-1]["probes"], "what it measured is kept"
    heir.coordinator.close()

    known = heir.coordinator._succession.memory
    third = Job(tmp_path / "c", "--nnodes", "2", succession=_Succession(_inherited(known, 0)))
    third.step()
    assert not third.commands(m.Probe), "what was probed is not probed again"
    assert len(third.commands(m.Start)) == 2
    assert third.report.decisions[-1]["probes"] == heir.report.decisions[-1]["probes"]
    third.coordinator.close()


def test_a_history_that_cannot_be_read_costs_a_line_and_not_the_job(tmp_path):
    job = Job(tmp_path, "--nnodes", "2", succession=_Succession(_inherited("damaged")))
    assert "the history of the job's failures is lost" in job.terminal.text
    assert len(job.commands(m.Start)) == 2


class _Told(_Endless):
    """An analysis that names one cause at once."""

    cause = ""

    def poll(self) -> Explanation:
        found = {"cause": self.cause, "culprit_ranks": [1], "confidence": "certain"}
        return Explanation({"verdict": found}, None, "")


@pytest.mark.parametrize(("cause", "num_stops"), [("host_hang", 1), ("straggler", 0)])
def test_a_stall_is_ended_by_its_verdict_and_slow_ranks_are_left_alone(
    tmp_path, monkeypatch, cause, num_stops
):
    monkeypatch.setattr(verdicts, "Analysis", type("_", (_Told,), {"cause": cause}))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(now_s * 1e9))
    options = ("--stall-timeout", "20", "--on-stall", "restart", "--max-restarts", "3")
    job = Job(tmp_path, "--nnodes", "2", *options)

    def look(num_ended: int, pending_ms: int) -> None:
        for node, first in ((job.host, 0), (job.other, 1)):
            moves = [first, 1, pending_ms, pending_ms, first, num_ended, 0]
            job.take(node, m.Sights(attempt=0, folded=moves, ranks=[]))
        job.look()

    look(7, 1000)
    for _ in range(60):
        now_s += 0.5
        look(7, 21_000)
        if job.commands(m.Collect):
            break
    for node in (job.host, job.other):
        job.take(node, m.Harvested(incident=0, exit_codes=[]))
    job.look()
    assert len(job.commands(m.Stop, job.host)) == num_stops
    look(8, 100)  # the slow rank is done with it
    for _ in range(200):
        now_s += 0.5
        look(9, 100)
    assert len(job.commands(m.Stop, job.host)) == num_stops
    job.coordinator.close()
