"""Processes in the place of lost ranks, without a process: standings in files, epochs in a list."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.loss import epochs, losses
from echelon.launcher.coordinator.loss.losses import LOST, Losses
from echelon.launcher.coordinator.loss.replacing import Replacements
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.standings import to_row
from echelon.launcher.options.options import parse
from echelon.recorder.continuation import Epoch, Standing, State, note_standing
from tests.launcher.coordinator import jobs
from tests.launcher.coordinator.jobs import JobStore

_SIZE = 3
_KILLED = -signal.SIGKILL


class _Store(JobStore):
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def publish(self, key: str, value: str) -> None:
        self.values[key] = value


class _Job:
    """The places of three ranks on one node."""

    def __init__(self, folder, monkeypatch, *argv: str) -> None:
        self.store, self.said, self.sent = _Store(), [], []
        self.report = Report(job_id="x", world_size=_SIZE)
        self.directory, self._monkeypatch = RunDirectory(folder, ""), monkeypatch
        options = parse(
            [*argv, "--on-loss", "replace", "--nproc-per-node", f"{_SIZE}", "--no-python", "true"],
            {},
        )
        self.losses = Losses(options, self.directory, self.store, self.report, self.said.append)
        self.replacements = Replacements(
            options, self.losses.admissions, lambda _, command: self.sent.append(command),
            self.said.append, self.report, joins_s=5.0, free=list, start_joining=print,
        )  # fmt: skip
        node = Node(name=options.node_name, host="here", num_workers=_SIZE)
        self.node = node.name
        self.world = World.of(
            [node], number=0, grace_s=1.0, stop_on_stall=False, stall_timeout_s=60.0
        )
        for rank in range(_SIZE):
            self.directory.make_rank_dir(rank, 0)
            self.stands(rank)

    def stands(self, rank: int, state: State = State.PROTECTED, **standing) -> None:
        folder = self.directory.rank_dir(rank, 0)
        self._monkeypatch.setenv("ECHELON_RANK_DIR", str(folder))
        note_standing(Standing(state=state, **standing))

    def lose(self, rank: int, code: int = _KILLED) -> bool:
        """End a rank as the coordinator would record it."""
        self.world.note_ended(rank, None if code == LOST else code)
        if not self.losses.takes(self.world, {rank: code}):
            return False
        self.replacements.note_lost(self.world, {rank: code})
        self.world.attempt.on(decide.WorkerLost(rank, "died", is_explained=True), 0.0)
        return True

    def step(self, now_s: float = 0.0, *, may_start: bool = True) -> list[decide.Action]:
        self.losses.look(self.world)
        events = self.replacements.note_taken_back(self.world, now_s)
        events += self.replacements.step(self.world, now_s, may_start=may_start)
        return [action for event in events for action in self.world.attempt.on(event, now_s)]

    def start(self, rank: int) -> None:
        """Let the process for a lost rank start, and wait to join."""
        self.step()
        self.wait(rank)

    def wait(self, rank: int) -> None:
        """Let the process for a lost rank wait to join."""
        self.directory.set_aside(self.directory.rank_dir(rank, 0))
        self.directory.make_rank_dir(rank, 0)
        self.stands(rank, State.JOINING)

    def end(self, rank: int) -> list[decide.Action]:
        """Let a rank finish."""
        self.stands(rank, State.DONE)
        self.step()
        self.world.note_ended(rank, 0)
        return self.world.attempt.on(decide.WorkerEnded(rank, 0), 0.0)

    def given_up(self) -> list[tuple[int, str]]:
        """Return the ranks that report.json lists as not replaced, with the reason."""
        return [(one["rank"], one["why"]) for one in self.report.not_replaced]

    @property
    def newest(self) -> Epoch:
        return Epoch.unpack(self.store.values[f"continuation/{self.losses._epochs.number}/epoch"])


@pytest.fixture
def job(tmp_path, monkeypatch):
    return _Job(tmp_path, monkeypatch)


def _lose_and_continue(job) -> None:
    assert job.lose(1)
    for rank in (0, 2):
        job.stands(rank, epoch=1, step=5)


def test_a_lost_rank_is_replaced_once_its_incident_is_collected(job):
    _lose_and_continue(job)
    job.step(may_start=False)
    assert job.sent == []
    job.start(1)
    assert job.sent == [m.Replace(attempt=0, rank=1, epoch=1)]
    assert job.world.attempt.running == (0, 1, 2)
    job.step()
    assert job.newest == Epoch(number=2, roster=(0, 1, 2), lost=(), joins=(1,), lives=((1, 1),))
    assert 1 not in job.world.ended
    assert job.replacements.is_busy
    for rank in range(_SIZE):
        job.stands(rank, epoch=2, step=9)
    job.step()
    assert not job.replacements.is_busy
    assert job.said[-1].startswith("rank 1 replaced in ")
    assert job.said[-1].endswith("s: joined at step 9; 3 of 3 ranks")
    assert [one["joined_ranks"] for one in job.report.continuations] == [[], [1]]


def test_no_rank_is_admitted_before_the_others_have_met(job):
    assert job.lose(1)
    job.start(1)
    job.step()
    assert job.newest == Epoch(number=1, roster=(0, 2), lost=(1,))


def test_two_ranks_that_wait_join_together(job):
    assert job.lose(1)
    assert job.lose(2)
    job.stands(0, epoch=2, step=5)
    job.start(1)
    job.wait(2)
    job.step()
    assert job.newest == Epoch(
        number=3, roster=(0, 1, 2), lost=(), joins=(1, 2), lives=((1, 1), (2, 1))
    )


def test_a_rank_that_dies_after_its_admission_is_lost_and_replaced_again(job):
    """The others need not leave their step for it: they have never waited for it."""
    _lose_and_continue(job)
    job.start(1)
    job.step()
    assert job.lose(1)
    assert job.newest == Epoch(number=3, roster=(0, 2), lost=(1,), withdraws=2)
    assert "continuation/2/meeting/gate" in job.store.values
    for rank in (0, 2):
        job.stands(rank, epoch=3, step=9)
    job.start(1)
    assert job.sent[-1] == m.Replace(attempt=0, rank=1, epoch=3, life=2)


def test_a_member_that_dies_during_an_admission_leaves_it_in_force(job):
    _lose_and_continue(job)
    job.start(1)
    job.step()
    assert job.lose(0)
    assert job.newest == Epoch(number=3, roster=(1, 2), lost=(0,), lives=((1, 1),))
    for rank in (1, 2):
        job.stands(rank, epoch=3, step=9)
    job.step()
    assert any(line.startswith("rank 1 replaced in ") for line in job.said)
    assert job.report.continuations[-1]["joined_ranks"] == [1]


def test_an_epoch_that_follows_the_loss_of_a_member_is_entered_at_once(job):
    _lose_and_continue(job)
    job.start(1)
    job.step()
    assert job.lose(2)
    assert job.lose(1)
    assert job.newest == Epoch(number=4, roster=(0,), lost=(1, 2))


def _admit_two(job) -> None:
    """Let ranks 1 and 2 join in epoch 3."""
    assert job.lose(1)
    assert job.lose(2)
    job.stands(0, epoch=2, step=5)
    job.start(1)
    job.wait(2)
    job.step()


def test_the_other_ranks_that_join_are_admitted_though_one_of_them_dies(job):
    _admit_two(job)
    assert job.lose(1)
    assert job.newest == Epoch(number=4, roster=(0, 2), lost=(1,), withdraws=3, lives=((2, 1),))
    assert job.lose(2)
    assert job.newest == Epoch(number=5, roster=(0,), lost=(1, 2), withdraws=3)


def test_an_admitted_rank_may_die_before_the_others_finish(job):
    """They finish without having noticed its admission; the other one is dismissed."""
    _admit_two(job)
    assert job.lose(1)
    job.stands(0, State.DONE, epoch=2)
    assert job.losses.look(job.world) is None
    assert job.newest == Epoch(number=5, roster=(), lost=(1, 2), done=(0,), dismissed=(2,))
    assert job.world.is_survived(1)


def test_an_admitted_rank_may_die_while_the_others_finish(job):
    """Its end arrives before the look that would have taken its admission back."""
    _lose_and_continue(job)
    job.start(1)
    job.step()
    job.stands(0, State.DONE, epoch=1)
    assert job.lose(1)
    assert job.newest == Epoch(number=3, roster=(2,), lost=(1,), done=(0,), dismissed=(1,))
    assert job.losses.look(job.world) is None
    assert job.said[-1] == "rank 1 is lost before it joined; the other ranks have finished"


def test_the_last_rank_with_the_state_cannot_be_lost(job):
    _lose_and_continue(job)
    job.start(1)
    job.step()
    assert job.lose(0)
    assert not job.lose(2)
    assert job.said[-1].endswith("no rank would be left that holds the state")


@pytest.mark.parametrize(
    ("code", "how", "retries"),
    [(_KILLED, "was killed by SIGKILL", True), (1, "exited with code 1", False)],
)
def test_a_process_that_ends_before_it_joins_is_no_loss(job, code, how, retries):
    _lose_and_continue(job)
    job.start(1)
    assert job.replacements.is_joining(job.world, 1)
    event = job.replacements.note_ended(job.world, 1, code)
    assert job.world.attempt.on(event, 0.0) == []
    assert job.said[-1] == f"the replacement of rank 1 {how} before it joined"
    job.step()
    assert len(job.sent) == (2 if retries else 1)
    assert job.newest.number == 1
    why = "its replacement exited with code 1 before it joined"
    assert job.given_up() == ([] if retries else [(1, why)])


def test_an_error_of_an_admitted_process_is_a_loss_that_is_not_replaced(job):
    """Its program differs from that of the others: another process would fail as well."""
    _lose_and_continue(job)
    job.start(1)
    job.step()
    assert job.lose(1, code=1)
    assert job.newest == Epoch(number=3, roster=(0, 2), lost=(1,), withdraws=2)
    job.step()
    assert len(job.sent) == 1
    assert not job.replacements.is_busy
    assert job.said[-1] == "rank 1 is not replaced: its replacement exited with code 1"
    assert job.given_up() == [(1, "its replacement exited with code 1")]


def test_a_process_that_a_node_cannot_start_is_not_tried_again(job):
    """Its node has too few descriptors, or its disk is full."""
    _lose_and_continue(job)
    job.step()
    job.replacements.note_ended(job.world, 1, 127, "cannot start worker 1: Too many open files")
    why = "no process could be started: cannot start worker 1: Too many open files"
    assert job.said[-1] == f"rank 1 is not replaced: {why}"
    assert job.given_up() == [(1, why)]
    job.step()
    assert len(job.sent) == 1
    assert not job.replacements.is_busy


def test_one_line_says_that_a_process_takes_long_to_load(job):
    _lose_and_continue(job)
    job.step(now_s=0.0)
    job.step(now_s=599.0)
    said = len(job.said)
    for now_s in (600.0, 601.0, 5000.0):
        job.step(now_s=now_s)
    assert job.said[said:] == ["the replacement of rank 1 has not been ready to join for 600 s"]
    job.wait(1)
    job.step(now_s=5001.0)
    assert job.newest.joins == (1,)
    job.step(now_s=9000.0)
    assert len(job.said) == said + 1


def test_replacements_are_limited(tmp_path, monkeypatch):
    job = _Job(tmp_path, monkeypatch, "--max-replacements", "1")
    _lose_and_continue(job)
    job.start(1)
    job.replacements.note_ended(job.world, 1, _KILLED)
    job.step()
    assert len(job.sent) == 1
    assert job.said[-1] == "rank 1 is not replaced: --max-replacements allows 1 in a job"
    assert job.given_up() == [(1, "--max-replacements allows 1 in a job")]


def test_the_folders_that_will_be_set_aside_are_those_of_ranks_that_are_replaced(
    tmp_path, monkeypatch
):
    job = _Job(tmp_path, monkeypatch, "--max-replacements", "2")
    _lose_and_continue(job)
    assert job.replacements.set_aside((1,)) == {1: 0}
    job.start(1)
    job.step()
    assert job.lose(1)
    assert job.lose(0)
    assert job.replacements.set_aside((0, 1)) == {1: 1}, "none is left for rank 0"


def test_a_rank_of_a_lost_node_is_not_replaced(job):
    job.world.lost.append(job.node)
    assert job.lose(1, LOST)
    assert not job.replacements.is_busy
    assert job.said[-1] == "rank 1 is not replaced: the node was lost, and no other node is free"
    assert job.given_up() == [(1, "the node was lost, and no other node is free")]


def test_a_process_that_waits_is_dismissed_when_the_others_have_finished(job):
    _lose_and_continue(job)
    job.start(1)
    job.stands(0, State.DONE)  # before the look at which it would be admitted
    job.end(0)
    (dismiss,) = job.end(2)
    assert dismiss == decide.DismissJoiners((1,))
    job.replacements.dismiss(job.world, dismiss.ranks, now_s=1.0)
    assert job.newest.dismissed == (1,)
    assert job.sent[1:] == []
    assert job.said[-1] == "rank 1 is not replaced any more: the other ranks have finished"
    assert job.given_up() == [(1, "the other ranks have finished")]
    (over,) = job.world.attempt.on(job.replacements.note_ended(job.world, 1, 0), 0.0)
    assert isinstance(over, decide.EndAttempt)
    assert not over.failed


def test_a_process_that_still_loads_is_killed_when_the_others_have_finished(job):
    _lose_and_continue(job)
    job.step()
    job.directory.set_aside(job.directory.rank_dir(1, 0))
    job.end(0)
    (dismiss,) = job.end(2)
    job.replacements.dismiss(job.world, dismiss.ranks, now_s=1.0)
    assert job.sent[-1] == m.KillRanks(attempt=0, ranks=[1])


def test_an_admission_is_taken_back_when_a_rank_has_finished(job):
    _lose_and_continue(job)
    job.start(1)
    job.step()
    assert job.newest.joins == (1,)
    job.end(0)
    assert job.newest == Epoch(number=3, roster=(2,), lost=(1,), done=(0,), dismissed=(1,))
    assert job.world.ended[1].code == _KILLED
    (dismiss,) = job.end(2)
    job.replacements.dismiss(job.world, dismiss.ranks, now_s=1.0)
    job.step(now_s=100.0)
    assert job.sent[-1] == m.KillRanks(attempt=0, ranks=[1])


def test_a_process_for_which_the_others_wait_is_killed_in_the_end(job):
    _lose_and_continue(job)
    job.start(1)
    job.step()
    job.step(now_s=100.0)
    assert job.sent[1:] == [], "no rank waits for it yet"
    job.stands(0, epoch=1, step=5, meets=2)
    job.step(now_s=100.0)
    job.step(now_s=200.0)
    assert job.sent[1:] == [], "rank 2 has not met it: it may be slow to save a checkpoint"
    job.stands(2, epoch=1, step=5, meets=2)
    job.step(now_s=200.0)
    job.step(now_s=204.0)
    assert job.sent[1:] == []
    job.step(now_s=205.0)
    assert job.sent[1:] == [m.KillRanks(attempt=0, ranks=[1])]
    assert job.said[-1] == "rank 1 did not join within 5 s; ending it"


def test_a_process_that_hangs_while_the_others_begin_the_step_is_killed(job):
    """A small state fits into a buffer: its sender does not wait for the process."""
    _lose_and_continue(job)
    job.start(1)
    job.step()
    for rank in (0, 2):
        job.stands(rank, epoch=2, step=9)
    job.step(now_s=0.0)
    job.step(now_s=5.0)
    assert job.sent[1:] == [m.KillRanks(attempt=0, ranks=[1])]


def test_a_process_that_hangs_is_killed_though_a_rank_was_lost_since_its_admission(job):
    _lose_and_continue(job)
    job.start(1)
    job.step()
    for rank in (0, 2):
        job.stands(rank, epoch=1, step=5, meets=2)
    job.step(now_s=0.0)
    assert job.lose(2)
    job.step(now_s=5.0, may_start=False)
    assert job.sent[1:] == [], "rank 0 has not returned to the meeting yet"
    job.stands(0, epoch=1, step=5, meets=3)
    job.step(now_s=6.0, may_start=False)
    job.step(now_s=11.0, may_start=False)
    assert job.sent[1:] == [m.KillRanks(attempt=0, ranks=[1])]


def test_a_loss_during_an_admission_is_timed_from_that_loss(job, monkeypatch):
    now_ns = 0
    for module in (epochs, losses):
        monkeypatch.setattr(module, "monotonic_ns", lambda: now_ns)
    _lose_and_continue(job)
    job.start(1)
    job.step()
    now_ns = 590 * 10**9
    assert job.lose(1)
    for rank in (0, 2):
        job.stands(rank, epoch=3, step=9, ready_mono_ns=591 * 10**9)
    job.step()
    assert job.said[-1].startswith("continued with 2 of 3 ranks in 1.00 s: ")


def test_nothing_is_said_of_a_process_that_ends_with_the_job_that_is_stopped(job):
    _lose_and_continue(job)
    job.start(1)
    said = len(job.said)
    job.world.attempt.on(decide.StopRequested(signal.SIGTERM), 0.0)
    job.replacements.note_ended(job.world, 1, -signal.SIGTERM)
    assert job.said[said:] == []
    assert job.given_up() == []
    assert not job.replacements.is_busy


def test_a_dismissed_process_that_survives_sigkill_is_not_awaited(job):
    _lose_and_continue(job)
    job.start(1)
    job.end(0)
    (dismiss,) = job.end(2)
    job.replacements.dismiss(job.world, dismiss.ranks, now_s=0.0)
    assert job.step(now_s=100.0) == []
    assert job.sent[-1] == m.KillRanks(attempt=0, ranks=[1])
    (over,) = job.step(now_s=200.0)
    assert isinstance(over, decide.EndAttempt)
    assert not over.failed
    assert job.said[-1] == "the replacement of rank 1 survived SIGKILL for 20 s"
    assert job.replacements.is_joining(job.world, 1), "its end does not count as a loss"


def test_a_place_is_given_up_when_its_node_is_lost_before_its_process_starts(job):
    _lose_and_continue(job)
    job.world.lost.append(job.node)
    job.step()
    assert job.sent == []
    assert not job.replacements.is_busy
    assert job.given_up() == [(1, "the node was lost, and no other node is free")]


class _Launcher:
    """A whole coordinator that replaces ranks, with nodes that answer each collection."""

    def __init__(self, folder, monkeypatch, *, num_nodes: int, nproc: int) -> None:
        monkeypatch.setattr(decide, "SETTLE_S", 0.0)
        self._directory, self._monkeypatch = RunDirectory(folder, ""), monkeypatch
        self._harvested: set[int] = set()
        shape = ["--nnodes", f"{num_nodes}", "--nproc-per-node", f"{nproc}"]
        self.job = jobs.Job(
            folder, "--on-loss", "replace", *shape,
            nproc=nproc, store=_Store(), endpoint="127.0.0.1:1" if num_nodes > 1 else "",
        )  # fmt: skip

    def stands(self, rank: int, state: State = State.PROTECTED, **standing) -> None:
        folder = self._directory.rank_dir(rank, 0)
        folder.mkdir(parents=True, exist_ok=True)
        self._monkeypatch.setenv("ECHELON_RANK_DIR", str(folder))
        note_standing(Standing(state=state, **standing))

    def end_together(self, codes: dict[int, int]) -> None:
        """End ranks of the host; their ends arrive before the next step."""
        for rank, code in codes.items():
            self.job.coordinator.take(self.job.host, _ended(rank, code))
        self.job.step()

    def look_until(self, condition: Callable[[], object]) -> None:
        give_up_s = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < give_up_s, self.job.terminal.text
            time.sleep(0.01)
            self.job.look()
            self._answer_collections()

    def start_joiners(self, *ranks: int) -> None:
        """Let processes start in the place of lost ranks; they load their program."""
        self.look_until(lambda: len(self.job.commands(m.Replace)) == len(ranks))
        for rank in ranks:
            shutil.rmtree(self._directory.rank_dir(rank, 0), ignore_errors=True)

    def _answer_collections(self) -> None:
        for collect in self.job.commands(m.Collect):
            if collect.incident not in self._harvested:
                self._harvested.add(collect.incident)
                for node in (self.job.host, self.job.other):
                    self.job.take(node, m.Harvested(incident=collect.incident, exit_codes=[]))


def _ended(rank: int, code: int) -> m.WorkerEnded:
    return m.WorkerEnded(attempt=0, rank=rank, code=code)


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Three ranks on one node."""
    launcher = _Launcher(tmp_path, monkeypatch, num_nodes=1, nproc=3)
    for rank in range(3):
        launcher.stands(rank)
    yield launcher
    launcher.job.coordinator.close()


def test_dismissed_processes_may_end_together(launcher):
    launcher.end_together({1: _KILLED, 2: _KILLED})
    launcher.stands(0, epoch=2, step=3)
    launcher.start_joiners(1, 2)
    launcher.stands(0, State.DONE, epoch=2, step=3)
    launcher.end_together({0: 0})
    assert launcher.job.commands(m.KillRanks) == [
        m.KillRanks(attempt=0, ranks=[rank]) for rank in (1, 2)
    ]
    launcher.end_together({1: _KILLED, 2: _KILLED})
    assert launcher.job.commands(m.ClearUp) == [m.ClearUp(attempt=0)]


def test_a_job_succeeds_though_an_admitted_rank_dies_during_its_last_step(launcher):
    launcher.end_together({1: _KILLED})
    for rank in (0, 2):
        launcher.stands(rank, epoch=1, step=3)
    launcher.start_joiners(1)
    launcher.stands(1, State.JOINING)
    store = launcher.job.coordinator._meeting
    launcher.look_until(lambda: "continuation/2/epoch" in store.values)
    launcher.end_together({1: _KILLED})
    for rank in (0, 2):
        launcher.stands(rank, State.DONE, epoch=1, step=3)
    launcher.look_until(lambda: not launcher.job.coordinator._incidents.is_collecting)
    launcher.end_together({0: 0, 2: 0})
    world = launcher.job.coordinator._world
    assert world.end == decide.EndAttempt(decide.EndedBy.WORKER, failed=False)
    assert "cannot continue" not in launcher.job.terminal.text


def test_the_last_rank_and_a_process_that_loads_may_end_together(launcher):
    launcher.end_together({1: _KILLED})
    for rank in (0, 2):
        launcher.stands(rank, epoch=1, step=3)
    launcher.start_joiners(1)
    for rank in (0, 2):
        launcher.stands(rank, State.DONE, epoch=1, step=3)
    launcher.end_together({0: 0, 2: 0, 1: 1})
    assert launcher.job.commands(m.ClearUp) == [m.ClearUp(attempt=0)]


def test_the_loss_of_a_node_whose_rank_is_to_be_replaced_does_not_hang_the_job(
    tmp_path, monkeypatch
):
    launcher = _Launcher(tmp_path, monkeypatch, num_nodes=2, nproc=2)
    job = launcher.job
    own, far = job.coordinator._world.nodes[job.host], job.coordinator._world.nodes[job.other]
    for rank in own:
        launcher.stands(rank)
    rows = [to_row(rank, Standing(state=State.PROTECTED)) for rank in far]
    job.take(job.other, m.Standings(attempt=0, ranks=rows))
    job.take(job.other, _ended(far[1], _KILLED))
    job.take(job.other, m.Left(reason="gone"))
    for rank in own:
        launcher.stands(rank, epoch=2, step=3)
    launcher.look_until(lambda: not job.coordinator._replacements.is_busy)
    for rank in own:
        launcher.stands(rank, State.DONE, epoch=2, step=3)
    launcher.end_together(dict.fromkeys(own, 0))
    launcher.look_until(lambda: job.commands(m.ClearUp, job.host))
    assert job.commands(m.Replace) == []
    job.coordinator.close()


def test_a_stop_kills_a_process_that_has_not_joined_and_leaves_the_loss_as_it_was(launcher):
    """The process has nothing to save; the loss was no act of the launcher."""
    launcher.end_together({1: _KILLED})
    for rank in (0, 2):
        launcher.stands(rank, epoch=1, step=3)
    launcher.start_joiners(1)
    job = launcher.job
    job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    assert job.commands(m.Stop)
    assert job.commands(m.KillRanks) == [m.KillRanks(attempt=0, ranks=[1])]
    launcher.end_together({1: _KILLED, 0: -signal.SIGTERM, 2: -signal.SIGTERM})
    job.take(job.host, m.Idle(attempt=0, exit_codes=[], stopped=[0, 1, 2]))
    assert [one.rank for one in job.report.ranks if one.stopped] == [0, 2]
    assert "the replacement of rank 1" not in job.terminal.text


def _grow(job, num_ranks: int) -> list[int]:
    assert job.losses.may_grow(job.world)
    late = Node(name="late", host="there", num_workers=num_ranks)
    for event in job.replacements.grow(job.world, late, 0.0):
        job.world.attempt.on(event, 0.0)
    ranks = [*job.world.nodes["late"]]
    job.losses.note_grown(ranks)
    return ranks


def _waits(job, rank: int) -> None:
    row = to_row(rank, Standing(state=State.JOINING))
    job.losses.take_standings(job.world, m.Standings(attempt=0, ranks=[row]))


def test_new_ranks_of_a_node_are_admitted_together(job):
    assert _grow(job, 2) == [3, 4]
    assert job.said[-1] == "node there adds ranks 3 and 4"
    assert job.world.attempt.running == (0, 1, 2, 3, 4)
    _waits(job, 4)
    job.step()
    assert job.losses._epochs.number == 0
    _waits(job, 3)
    job.step()
    assert job.newest.roster == (0, 1, 2, 3, 4)
    assert (job.newest.joins, job.newest.lost) == ((3, 4), ())
    for rank in (3, 4):
        row = to_row(rank, Standing(state=State.PROTECTED, epoch=1, step=7))
        job.losses.take_standings(job.world, m.Standings(attempt=0, ranks=[row]))
    for rank in range(_SIZE):
        job.stands(rank, epoch=1, step=7)
    job.step()
    assert not job.replacements.is_busy
    assert job.said[-1].startswith("new ranks 3 and 4 ready in ")
    assert job.said[-1].endswith("s: joined at step 7; 5 of 5 ranks")
    assert job.losses.may_grow(job.world)


def test_the_others_of_a_node_join_without_a_new_rank_that_failed(job):
    _grow(job, 2)
    _waits(job, 4)
    job.step()
    for event in [job.replacements.note_ended(job.world, 3, 1)]:
        job.world.attempt.on(event, 0.0)
    assert job.said[-1] == "new rank 3 exited with code 1 before it joined"
    assert job.given_up() == [(3, "it exited with code 1 before it joined")]
    job.step()
    assert job.newest.joins == (4,)


@pytest.mark.parametrize("state", [State.DONE, None])
def test_nothing_grows_unless_all_ranks_train(job, state):
    if state is None:
        (job.directory.rank_dir(1, 0) / "standing.json").unlink()
    else:
        job.stands(1, state)
    assert not job.losses.may_grow(job.world)


def test_new_ranks_wait_while_an_incident_is_examined(job):
    _grow(job, 1)
    _waits(job, 3)
    for event in job.replacements.step(job.world, 0.0, may_start=True, may_grow=False):
        job.world.attempt.on(event, 0.0)
    assert job.losses._epochs.number == 0
    job.step()
    assert job.newest.joins == (3,)


def test_a_new_rank_waits_for_one_of_its_node_that_is_started_again(job):
    _grow(job, 2)
    _waits(job, 4)
    job.world.attempt.on(job.replacements.note_ended(job.world, 3, _KILLED), 0.0)
    assert job.said[-1] == "new rank 3 was killed by SIGKILL before it joined"
    job.step()
    assert job.losses._epochs.number == 0
    _waits(job, 3)
    job.step()
    assert job.newest.joins == (3, 4)
