"""Which losses an attempt survives, without a process: standings in files, epochs in a list."""

from __future__ import annotations

import signal
import time

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.conclusion import conclude
from echelon.launcher.coordinator.decide import StallExamined
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.loss.hung import DIES_S
from echelon.launcher.coordinator.loss.losses import Losses
from echelon.launcher.coordinator.policy.judging import failure_of, incident_of
from echelon.launcher.coordinator.world import LostEarlier, World
from echelon.launcher.incident import verdicts
from echelon.launcher.job.report import Incident, Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.options.options import parse
from echelon.recorder.continuation import Epoch, Standing, State, begun_key, note_standing
from tests.launcher.coordinator import jobs
from tests.launcher.coordinator.jobs import JobStore
from tests.support.ranks import read_json

_SIZE = 4


class _Store(JobStore):
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def publish(self, key: str, value: str) -> None:
        self.values[key] = value

    def post(self, folder: str, value: str) -> None:
        self.values[f"{folder}/{len(self.values)}"] = value

    def has(self, keys):
        return [key in self.values for key in keys]


class _Job:
    """Losses of four ranks on one node."""

    def __init__(self, folder, monkeypatch, *argv: str) -> None:
        self.store, self.said = _Store(), []
        self.report = Report(job_id="x", world_size=_SIZE)
        self._directory, self._monkeypatch = RunDirectory(folder, ""), monkeypatch
        options = parse([*argv, "--nproc-per-node", f"{_SIZE}", "--no-python", "true"], {})
        self._node = options.node_name
        self.losses = Losses(options, self._directory, self.store, self.report, self.said.append)
        self.begin(0)

    def begin(self, attempt: int) -> None:
        node = Node(name=self._node, host="here", num_workers=_SIZE)
        self.world = World.of(
            [node], number=attempt, grace_s=1.0, stop_on_stall=False, stall_timeout_s=60.0
        )
        for rank in range(_SIZE):
            self._directory.make_rank_dir(rank, attempt)

    def stands(self, rank: int, **standing) -> None:
        folder = self._directory.rank_dir(rank, self.world.number)
        self._monkeypatch.setenv("ECHELON_RANK_DIR", str(folder))
        note_standing(Standing(**{"state": State.PROTECTED, **standing}))

    def end(self, rank: int, code: int) -> bool:
        self.world.note_ended(rank, code)
        return self.losses.takes(self.world, {rank: code})

    def epoch(self, number: int) -> Epoch:
        return Epoch.unpack(self.store.values[f"continuation/{number}/epoch"])


@pytest.fixture
def job(tmp_path, monkeypatch):
    job = _Job(tmp_path, monkeypatch, "--on-loss", "shrink", "--min-ranks", "2")
    for rank in range(_SIZE):
        job.stands(rank)
    return job


def test_each_loss_is_an_epoch_and_opens_the_gate_of_the_one_before(job):
    assert job.end(2, -signal.SIGKILL)
    assert job.epoch(1) == Epoch(number=1, roster=(0, 1, 3), lost=(2,))
    assert "continuation/1/meeting/gate" not in job.store.values
    assert job.end(0, -signal.SIGSEGV)
    assert job.epoch(2) == Epoch(number=2, roster=(1, 3), lost=(0, 2))
    assert "continuation/1/meeting/gate" in job.store.values
    job.stands(1, epoch=2, step=7, repeats=True)
    job.losses.look(job.world)
    assert job.report.continuations == []
    job.stands(3, epoch=2, step=7)
    job.losses.look(job.world)
    (continued,) = job.report.continuations
    assert (continued["lost_ranks"], continued["num_ranks"]) == ([0, 2], 2)
    assert (continued["step"], continued["repeated"], continued["steps_lost"]) == (7, True, 0)


def test_a_rank_that_finished_unaware_of_a_loss_ends_the_wait_of_the_others(job):
    job.end(2, -signal.SIGKILL)
    job.stands(0, state=State.DONE)
    assert job.losses.look(job.world) == 2
    assert job.epoch(2) == Epoch(number=2, roster=(1, 3), lost=(2,), done=(0,))
    assert "continuation/1/meeting/gate" in job.store.values
    assert "cannot continue: a rank finished its last step" in job.said[-1]
    assert job.losses.look(job.world) is None
    assert job.report.continuations == []


def test_a_job_whose_last_step_lost_a_rank_fails_even_if_all_others_exit_with_0(
    tmp_path, monkeypatch
):
    """They passed the last barrier, did not notice the loss, and the rest was done without it."""
    job = jobs.Job(
        tmp_path, "--nproc-per-node", "3", "--on-loss", "shrink",
        nproc=3, store=_Store(), endpoint="",
    )  # fmt: skip
    directory = RunDirectory(tmp_path, "")

    def stands(rank: int, state: State) -> None:
        monkeypatch.setenv("ECHELON_RANK_DIR", str(directory.rank_dir(rank, 0)))
        note_standing(Standing(state=state))

    for rank in range(3):
        directory.make_rank_dir(rank, 0)
        stands(rank, State.PROTECTED)
    job.take(job.host, m.WorkerEnded(attempt=0, rank=0, code=-signal.SIGKILL))
    assert "rank 0 is lost; continuing with ranks 1 and 2" in job.terminal.text
    for rank in (1, 2):
        stands(rank, State.DONE)
        job.take(job.host, m.WorkerEnded(attempt=0, rank=rank, code=0))
    (collect,) = job.commands(m.Collect)
    assert (collect.kind, collect.reason) == ("failure", "rank 0 was killed by SIGKILL")
    job.take(job.host, m.Harvested(incident=collect.incident, exit_codes=[]))
    job.take(job.host, m.Idle(attempt=0, exit_codes=[], stopped=[]))
    assert "finished successfully" not in job.terminal.text
    monkeypatch.setattr(job.coordinator, "_ending_deadline_s", 0.0)  # no verdict is awaited
    job.step()
    job.coordinator.close()
    assert (job.coordinator.is_over, job.report.exit_code) == (True, 137)


@pytest.mark.parametrize("others", [(0,), (0, 1, 3)])
def test_once_a_rank_has_finished_its_steps_a_loss_is_a_failure(job, others):
    """What follows the steps, such as a save by the first rank, would be done by no rank."""
    for rank in others:
        job.stands(rank, state=State.DONE)
    assert not job.end(2, -signal.SIGKILL)
    assert job.said == ["cannot continue without rank 2: rank 0 has finished its steps already"]


@pytest.mark.parametrize("code", [1, -signal.SIGTERM, -signal.SIGINT])
def test_an_exit_and_a_stop_are_no_losses(job, code):
    assert not job.end(2, code)
    assert job.store.values == {}
    assert job.said == []


def test_below_the_least_number_of_ranks_a_loss_is_a_failure(job):
    assert job.end(0, -signal.SIGKILL)
    assert job.end(1, -signal.SIGKILL)
    assert not job.end(2, -signal.SIGKILL)
    why = "1 rank is left, below --min-ranks 2"
    assert job.said[-1] == f"cannot continue without rank 2: {why}"


@pytest.mark.parametrize("death", ["is stopped by a signal", "was killed by SIGKILL"])
def test_without_a_store_a_loss_is_a_failure(job, death):
    job.store.death = death
    assert not job.end(2, -signal.SIGKILL)
    assert job.said == [f"cannot continue without rank 2: the job's store {death}"]


def test_a_rank_outside_of_protected_training_makes_a_loss_a_failure(tmp_path, monkeypatch):
    job = _Job(tmp_path, monkeypatch, "--on-loss", "shrink")
    for rank in (0, 1, 3):
        job.stands(rank)
    assert not job.end(1, -signal.SIGKILL)
    assert "rank 2 is not in resilient.run" in job.said[0]


def test_while_an_attempt_is_being_stopped_nothing_continues(job):
    job.world.attempt.on(decide.StopRequested(signal.SIGTERM), 0.0)
    assert not job.end(2, -signal.SIGKILL)


def test_without_the_option_nothing_is_read_or_published(tmp_path, monkeypatch):
    job = _Job(tmp_path, monkeypatch)
    assert not job.end(2, -signal.SIGKILL)
    assert (job.said, job.store.values) == ([], {})


def test_the_next_attempt_begins_with_the_first_epoch(job):
    job.end(2, -signal.SIGKILL)
    job.begin(1)
    job.store.values.clear()
    for rank in range(_SIZE):
        job.stands(rank)
    assert job.end(0, -signal.SIGKILL)
    assert job.epoch(1) == Epoch(number=1, roster=(1, 2, 3), lost=(0,))


def test_the_exit_code_is_that_of_ranks_that_failed_and_not_of_one_that_was_survived(job):
    for rank, code in ((2, -signal.SIGKILL), (0, 1), (1, 1), (3, 1)):
        job.world.note_ended(rank, code)
    job.world.ended[2].epoch = 1
    end = decide.EndAttempt(decide.EndedBy.WORKER, failed=True)
    assert conclude(job.world, end, job.report, 0) == (decide.EndedBy.WORKER, 1)


def test_losses_that_are_over_explain_nothing_that_follows(job):
    """Until the others continue, the loss may be the cause of what follows."""
    job.end(2, -signal.SIGKILL)
    assert job.world.lost_earlier(()) == LostEarlier()
    for rank in (0, 1, 3):
        job.stands(rank, epoch=1, ready_mono_ns=700 + rank)
    job.losses.look(job.world)
    assert job.world.lost_earlier(()) == LostEarlier(ranks={2: 1}, since_mono_ns=700)
    assert job.world.lost_earlier((2,)) == LostEarlier()


def test_a_second_loss_leaves_the_epoch_before_it(job):
    job.end(2, -signal.SIGKILL)
    for rank in (0, 1, 3):
        job.stands(rank, epoch=1, ready_mono_ns=700)
    job.losses.look(job.world)
    job.end(0, -signal.SIGKILL)
    for rank in (1, 3):
        job.stands(rank, epoch=2, ready_mono_ns=900)
    job.losses.look(job.world)
    assert job.world.lost_earlier((0,)) == LostEarlier(ranks={2: 1}, since_mono_ns=700)
    assert job.world.lost_earlier(()) == LostEarlier(ranks={0: 2, 2: 1}, since_mono_ns=900)


def test_without_a_verdict_a_restart_is_decided_by_a_rank_that_the_job_still_had(job):
    job.end(2, -signal.SIGKILL)
    for rank in (0, 1, 3):
        job.stands(rank, epoch=1)
    job.losses.look(job.world)
    assert not job.end(0, 5)
    failure = failure_of(job.world, None)
    assert (failure.culprit_ranks, failure.is_killed) == ((0,), False)


def test_a_rank_that_exits_with_0_too_early_leaves_the_others_nothing_to_wait_for(job):
    """Those that miss it learn that at once; the others are not told: all may be stopping."""
    assert not job.end(2, 0)
    assert job.epoch(1) == Epoch(number=1, roster=(0, 1, 3), lost=(), left=(2,))
    assert not job.end(1, 0)
    assert "continuation/2/epoch" not in job.store.values
    assert not job.end(0, -signal.SIGKILL)
    assert job.said == ["cannot continue without rank 0: rank 2 has left before its last step"]


def test_a_rank_that_exits_with_0_at_the_end_is_not_missed(job):
    job.stands(2, state=State.DONE)
    assert not job.end(2, 0)
    assert job.store.values == {}


def _on_two_nodes(folder, monkeypatch, *argv: str) -> jobs.Job:
    """Two ranks on the host, and two on the other node, all of them protected."""
    job = jobs.Job(
        folder, "--nnodes", "2", "--nproc-per-node", "2", "--on-loss", "shrink", *argv,
        nproc=2, store=_Store(),
    )  # fmt: skip
    directory = RunDirectory(folder, "")
    for rank in range(2):
        directory.make_rank_dir(rank, 0)
        monkeypatch.setenv("ECHELON_RANK_DIR", str(directory.rank_dir(rank, 0)))
        note_standing(Standing(state=State.PROTECTED))
    return job


def _stands(job: jobs.Job, epoch: int, there_ns: int = 0) -> None:
    rows = [[rank, 0, epoch, 5, 1, 0, there_ns, 0] for rank in (2, 3)]
    job.take(job.other, m.Standings(attempt=0, ranks=rows))


def test_all_ranks_of_a_lost_node_are_lost_in_one_epoch(tmp_path, monkeypatch):
    job = _on_two_nodes(tmp_path, monkeypatch)
    _stands(job, 0)
    job.take(job.other, m.Left(reason="no heartbeat"))
    store = job.coordinator._meeting
    told = Epoch.unpack(store.values["continuation/1/epoch"])
    assert told == Epoch(number=1, roster=(0, 1), lost=(2, 3))
    assert "continuation/2/epoch" not in store.values
    assert "ranks 2 and 3 are lost; continuing with ranks 0 and 1" in job.terminal.text
    assert job.commands(m.Stop) == []
    job.coordinator.close()


def test_a_rank_on_another_node_is_lost_and_its_node_stays(tmp_path, monkeypatch):
    """What ranks report comes by messages; times are those of their own node's clock."""
    job = _on_two_nodes(tmp_path, monkeypatch)
    job.take(job.other, m.WorkerEnded(attempt=0, rank=3, code=-signal.SIGKILL))
    assert "cannot continue without rank 3: rank 3 is not in resilient.run" in job.terminal.text
    job.coordinator.close()
    job = _on_two_nodes(tmp_path / "second", monkeypatch)
    _stands(job, 0)
    job.take(job.other, m.WorkerEnded(attempt=0, rank=3, code=-signal.SIGKILL))
    assert "rank 3 is lost; continuing with ranks 0, 1 and 2" in job.terminal.text
    for rank in range(2):
        folder = RunDirectory(tmp_path / "second", "").rank_dir(rank, 0)
        monkeypatch.setenv("ECHELON_RANK_DIR", str(folder))
        note_standing(Standing(state=State.PROTECTED, epoch=1, step=5, ready_mono_ns=900))
    _stands(job, 1, there_ns=123)
    job.look()
    (continued,) = job.report.continuations
    assert (continued["num_ranks"], continued["repeated"]) == (3, True)
    earlier = job.coordinator._world.lost_earlier(())
    assert (earlier.since_mono_ns, dict(earlier.since_there_ns)) == (900, {2: 123, 3: 123})
    job.coordinator.close()


def test_a_node_that_is_lost_before_it_reported_its_ranks_is_a_loss(tmp_path, monkeypatch):
    """In their first step, the launcher may not know of it yet; the store has it from the ranks."""
    job = _on_two_nodes(tmp_path, monkeypatch)
    store = job.coordinator._meeting
    for rank in (2, 3):
        store.publish(begun_key(rank), "1")
    job.take(job.other, m.Left(reason="no heartbeat"))
    told = Epoch.unpack(store.values["continuation/1/epoch"])
    assert told == Epoch(number=1, roster=(0, 1), lost=(2, 3))
    job.coordinator.close()


def test_an_epoch_awaits_a_rank_that_only_the_store_knows(tmp_path, monkeypatch):
    job = _on_two_nodes(tmp_path, monkeypatch)
    for rank in (2, 3):
        job.coordinator._meeting.publish(begun_key(rank), "1")
    job.take(job.other, m.WorkerEnded(attempt=0, rank=3, code=-signal.SIGKILL))
    assert "rank 3 is lost; continuing with ranks 0, 1 and 2" in job.terminal.text
    for rank in range(2):
        monkeypatch.setenv("ECHELON_RANK_DIR", str(RunDirectory(tmp_path, "").rank_dir(rank, 0)))
        note_standing(Standing(state=State.PROTECTED, epoch=1, step=5, ready_mono_ns=900))
    job.look()
    assert job.report.continuations == []
    _stands(job, 1)
    job.look()
    assert [one["num_ranks"] for one in job.report.continuations] == [3]
    job.coordinator.close()


@pytest.mark.parametrize("begun", [(), (2,)])
def test_a_rank_that_has_not_begun_makes_the_loss_of_its_node_a_failure(
    tmp_path, monkeypatch, begun
):
    job = _on_two_nodes(tmp_path, monkeypatch)
    for rank in begun:
        job.coordinator._meeting.publish(begun_key(rank), "1")
    job.take(job.other, m.Left(reason="no heartbeat"))
    first = 2 + len(begun)
    assert f"cannot continue without ranks 2 and 3: rank {first} is not in res" in job.terminal.text
    job.coordinator.close()


def test_where_another_node_may_host_the_job_the_loss_of_a_node_is_a_failure(tmp_path, monkeypatch):
    job = _on_two_nodes(tmp_path, monkeypatch, "--rdzv-conf", "failover=true")
    _stands(job, 0)
    job.take(job.other, m.Left(reason="no heartbeat"))
    why = "with failover=true, the loss of a node ends the attempt"
    assert f"cannot continue without ranks 2 and 3: {why}" in job.terminal.text
    assert job.coordinator._meeting.values == {}
    job.coordinator.close()


def test_a_hung_rank_is_killed_by_its_own_node_and_its_stall_is_the_only_incident(
    tmp_path, monkeypatch
):
    job = _on_two_nodes(tmp_path, monkeypatch, "--on-stall", "replace", "--stall-timeout", "30")
    coordinator, world = job.coordinator, job.coordinator._world
    _stands(job, 0)
    incident = Incident(tmp_path / "dump" / "incident_0", "stall", 0, "rank 3 is late")
    incident.verdict = {"cause": "frozen_process", "culprit_ranks": [3], "confidence": "certain"}
    job.report.incidents.append(incident)
    coordinator._stalls.on_examined(world, StallExamined(lasts=True), incident, 0.0)
    assert job.commands(m.KillRanks) == [m.KillRanks(attempt=0, ranks=[3])]
    assert job.commands(m.KillRanks, job.other) == job.commands(m.KillRanks)
    job.take(job.other, m.WorkerEnded(attempt=0, rank=3, code=-signal.SIGKILL))
    assert "rank 3 is lost; continuing with ranks 0, 1 and 2" in job.terminal.text
    assert incident.recovered
    assert world.attempt.deadline_s is None, "another incident would be collected"
    assert job.commands(m.Stop) == []
    for rank in range(2):
        folder = RunDirectory(tmp_path, "").rank_dir(rank, 0)
        monkeypatch.setenv("ECHELON_RANK_DIR", str(folder))
        note_standing(Standing(state=State.PROTECTED, epoch=1, step=5, ready_mono_ns=900))
    _stands(job, 1)
    job.look()
    (continued,) = job.report.continuations
    assert continued["ended_for"] == {"3": "frozen_process"}
    assert "continued without rank 3 (frozen_process), with 3 of 4 ranks in" in job.terminal.text
    coordinator.close()


class _NoAnalysis:
    """An analysis that never answers."""

    def __init__(self, *, gives_way: bool) -> None: ...

    def begin(self, *_: object) -> None: ...

    def poll(self) -> None: ...

    def close(self) -> None: ...


def test_a_node_that_dies_while_a_loss_is_collected_is_another_incident(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "Analysis", _NoAnalysis)
    monkeypatch.setattr(decide, "SETTLE_S", 0.0)
    job = _on_two_nodes(tmp_path, monkeypatch)
    _stands(job, 0)
    job.take(job.host, m.WorkerEnded(attempt=0, rank=1, code=-signal.SIGKILL))
    job.step()
    assert [one.reason for one in job.commands(m.Collect, job.host)] == [
        "rank 1 was killed by SIGKILL"
    ]
    job.take(job.other, m.Left(reason="no heartbeat"))
    job.take(job.host, m.Harvested(incident=0, exit_codes=[]))
    job.step()
    told = read_json(tmp_path / "dump" / "incident_0" / "incident.json")
    assert (told["ended"], told["ranks_lost"]) == ([[1, -9, 0]], [])
    assert list(job.report.incidents[0].ended) == [1]
    assert [one.reason for one in job.commands(m.Collect, job.host)][1:] == [
        f"rank 2 was lost with node {job.other}, rank 3 was lost with node {job.other}"
    ]
    job.coordinator.close()


def test_a_lost_node_is_not_blamed_for_a_failure_after_the_job_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "Analysis", _NoAnalysis)
    monkeypatch.setattr(decide, "SETTLE_S", 0.0)
    job = _on_two_nodes(tmp_path, monkeypatch)
    _stands(job, 0)
    job.take(job.other, m.Left(reason="no heartbeat"))
    job.step()
    job.take(job.host, m.Harvested(incident=0, exit_codes=[]))
    job.step()
    for rank in range(2):
        folder = RunDirectory(tmp_path, "").rank_dir(rank, 0)
        monkeypatch.setenv("ECHELON_RANK_DIR", str(folder))
        note_standing(Standing(state=State.PROTECTED, epoch=1, step=5, ready_mono_ns=900))
    job.look()
    assert len(job.report.continuations) == 1
    job.take(job.host, m.WorkerEnded(attempt=0, rank=0, code=1))
    job.step()
    job.take(job.host, m.Harvested(incident=1, exit_codes=[]))
    job.step()
    first, second = (
        read_json(tmp_path / "dump" / f"incident_{number}" / "incident.json") for number in (0, 1)
    )
    assert (first["ranks_lost"], first["lost_earlier"]) == ([2, 3], [])
    assert (second["ranks_lost"], second["lost_earlier"]) == ([], [[2, 1], [3, 1]])
    job.coordinator.close()


def test_a_stall_while_an_epoch_is_awaited_is_not_due_to_the_rank_that_it_lost(job):
    """It is due to a rank that does not come to the epoch's meeting."""
    job.end(2, -signal.SIGKILL)
    assert job.world.lost_earlier(()).ranks == {}
    assert job.world.lost_earlier((), is_stall=True).ranks == {2: 1}


_FROZEN = {"cause": "frozen_process", "culprit_ranks": [3], "confidence": "certain"}


class _Stalled:
    """A job on two nodes that has stalled, and awaits the verdict."""

    def __init__(self, folder, monkeypatch, *argv: str) -> None:
        self.job = _on_two_nodes(
            folder, monkeypatch, "--on-stall", "replace", "--stall-timeout", "30", *argv
        )
        self.coordinator = self.job.coordinator
        assert self.coordinator._world is not None
        self.world = self.coordinator._world
        _stands(self.job, 0)
        self.incident = Incident(folder / "dump" / "incident_0", "stall", 0, "rank 3 is late")
        self.job.report.incidents.append(self.incident)
        self.is_open = True
        monkeypatch.setattr(self.coordinator._stalls, "_is_open", lambda _: self.is_open)
        self.world.rule._reported = {}
        self.coordinator._stalls.on_examined(
            self.world, StallExamined(lasts=True), self.incident, time.monotonic()
        )

    def explain(self, **verdict) -> None:
        self.is_open, self.incident.verdict = False, _FROZEN | verdict
        self.job.step()

    def killed(self) -> list[list[int]]:
        return [command.ranks for command in self.job.commands(m.KillRanks)]

    def end(self, rank: int) -> None:
        node = self.job.host if rank < 2 else self.job.other
        self.job.take(node, m.WorkerEnded(attempt=0, rank=rank, code=-signal.SIGKILL))


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    one = _Stalled(tmp_path, monkeypatch)
    yield one
    one.coordinator.close()


@pytest.mark.parametrize("culprits", [[3], [1, 3]])
def test_a_culprit_that_is_lost_before_its_verdict_ends_the_stall(stalled, culprits):
    """If another rank still hangs, that is a second stall, with a verdict of its own."""
    stalled.end(3)
    assert "rank 3 is lost; continuing with ranks 0, 1 and 2" in stalled.job.terminal.text
    assert (stalled.incident.recovered, stalled.world.rule.is_stalled) == (True, False)
    stalled.explain(culprit_ranks=culprits)
    assert (stalled.killed(), stalled.job.commands(m.Stop)) == ([], [])
    assert stalled.world.attempt.phase is decide.Phase.RUNNING
    assert "no rank is ended" not in stalled.job.terminal.text


def test_progress_that_was_reported_before_a_verdict_saves_its_culprits(stalled):
    """The next look at the ranks is not due yet."""
    stalled.world.rule._reported = {-1: 100, -3: 100}
    stalled.coordinator._next_look_s = time.monotonic() + 60.0
    for node, first in ((stalled.job.host, 0), (stalled.job.other, 2)):
        folded = [first, 1, 0, -1, first, 150, 0]
        stalled.coordinator.take(node, m.Sights(attempt=0, folded=folded, ranks=[]))
    stalled.explain()
    assert "stall cleared: ranks are making progress again" in stalled.job.terminal.text
    assert stalled.killed() == []


def test_a_stall_lasts_until_the_last_of_its_culprits_has_ended(stalled):
    stalled.explain(culprit_ranks=[0, 3])
    assert stalled.killed() == [[0], [3]]
    stalled.end(0)
    assert (stalled.incident.recovered, stalled.world.rule.is_stalled) == (False, True)
    stalled.coordinator._stalls.step(time.monotonic() + DIES_S + 1)
    assert "rank 3 survived SIGKILL for 30 s" in stalled.job.terminal.text
    assert stalled.world.attempt.phase is decide.Phase.STOPPING
    assert not stalled.incident.recovered


def test_the_loss_of_another_rank_leaves_a_stall_whose_culprit_is_being_killed(stalled):
    stalled.explain()
    stalled.end(0)
    assert (stalled.incident.recovered, stalled.world.rule.is_stalled) == (False, True)
    stalled.end(3)
    assert (stalled.incident.recovered, stalled.world.rule.is_stalled) == (True, False)


def test_a_hang_whose_end_is_not_survived_after_all_is_the_failure(stalled):
    """Not the SIGKILL that ended it, which nothing outside of the job sent."""
    stalled.explain()
    stalled.coordinator._meeting.death = "was killed"
    stalled.end(3)
    assert "cannot continue without rank 3: the job's store was killed" in stalled.job.terminal.text
    assert stalled.world.ended[3].stopped
    for rank in range(3):
        node = stalled.job.host if rank < 2 else stalled.job.other
        stalled.job.take(node, m.WorkerEnded(attempt=0, rank=rank, code=-signal.SIGTERM))
    end = stalled.world.end
    assert end is not None
    assert end.ended_by is decide.EndedBy.STALL
    incident = incident_of(stalled.world, stalled.job.report.incidents, end.ended_by)
    assert incident is stalled.incident
    failure = failure_of(stalled.world, incident)
    assert (failure.cause, failure.culprit_ranks) == ("frozen_process", (3,))
    assert conclude(stalled.world, end, stalled.job.report, 0) == (decide.EndedBy.STALL, 3)


def test_a_replaced_hang_is_no_false_alarm_of_a_learned_limit(stalled):
    limits = stalled.world.limits
    limits._reported = []
    failure = Incident(stalled.incident.folder, "failure", 0, "another rank died")
    stalled.job.report.incidents.append(failure)
    stalled.explain()
    stalled.end(3)
    assert (limits.is_reported, limits.num_cleared) == (False, 0)
    assert (stalled.incident.recovered, failure.recovered) == (True, False)
    assert "stall cleared" not in stalled.job.terminal.text


def test_progress_clears_the_last_stall_and_no_other_incident(stalled):
    failure = Incident(stalled.incident.folder, "failure", 0, "another rank died")
    stalled.job.report.incidents.append(failure)
    stalled.coordinator._incidents.note_progress(stalled.world)
    assert (stalled.incident.recovered, failure.recovered) == (True, False)


def test_stalls_that_ended_with_a_loss_leave_room_for_later_ones(stalled, monkeypatch):
    monkeypatch.setattr(verdicts, "Analysis", _NoAnalysis)
    stalled.explain()
    stalled.end(3)
    for _ in range(20):
        one = Incident(stalled.incident.folder, "stall", 0, "x", recovered=True, is_survived=True)
        stalled.job.report.incidents.append(one)
    stalled.coordinator._decide(stalled.world, decide.StallSeen("no rank recorded anything"))
    stalled.job.step()
    assert [one.kind for one in stalled.job.commands(m.Collect, stalled.job.host)] == ["stall"]


def test_an_attempt_is_judged_by_the_stall_that_lasted(stalled):
    over = Incident(stalled.incident.folder, "stall", 0, "x", recovered=True)
    incidents = [stalled.incident, over]
    found = incident_of(stalled.world, incidents, decide.EndedBy.STALL)
    assert found is stalled.incident


def test_a_killed_rank_has_as_long_to_end_as_its_node_has_to_be_heard(tmp_path, monkeypatch):
    one = _Stalled(tmp_path, monkeypatch, "--rdzv-conf", "lost_after=60")
    one.explain()
    deadline_s = one.coordinator._hung.deadline_s()
    one.coordinator._stalls.step(deadline_s - 0.1)
    assert one.world.attempt.phase is decide.Phase.RUNNING
    one.coordinator._stalls.step(deadline_s)
    assert "rank 3 survived SIGKILL for 70 s; the attempt ends" in one.job.terminal.text
    one.coordinator.close()


def test_no_rank_is_ended_that_would_leave_none(job):
    why_not = job.losses.why_not_without
    assert why_not(job.world, (0, 1, 2, 3)) == "no rank would be left"
    assert why_not(job.world, (0, 1, 2)) == "1 rank is left, below --min-ranks 2"
