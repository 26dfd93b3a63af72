"""The ranks of a lost node on another node: which node takes them, and when. No processes."""

from __future__ import annotations

import signal

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.loss.losses import LOST, Losses
from echelon.launcher.coordinator.loss.replacing import Replacements
from echelon.launcher.coordinator.world import World
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.standings import to_row
from echelon.launcher.options.options import parse
from echelon.recorder.continuation import Epoch, Standing, State
from tests.launcher.coordinator.jobs import JobStore

_SIZE = 6


class _Store(JobStore):
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def publish(self, key: str, value: str) -> None:
        self.values[key] = value


def _node(name: str, num_workers: int = 2) -> Node:
    return Node(name=name, host=f"host-{name}", num_workers=num_workers)


class _Job:
    """Three nodes with two ranks each, and the nodes that are free."""

    def __init__(self, folder, *argv: str) -> None:
        self.store, self.said, self.sent, self.started = _Store(), [], [], []
        self.free: list[Node] = []
        self.report = Report(job_id="x", world_size=_SIZE)
        options = parse(
            [*argv, "--on-loss", "replace", "--nproc-per-node", "2", "--no-python", "true"], {}
        )
        directory = RunDirectory(folder, "")
        self.losses = Losses(options, directory, self.store, self.report, self.said.append)
        self.replacements = Replacements(
            options, self.losses.admissions, lambda *sent: self.sent.append(sent),
            self.said.append, self.report, free=lambda: self.free, start_joining=self._start,
        )  # fmt: skip
        self.world = World.of(
            [_node("a"), _node("b"), _node("c")],
            number=0, grace_s=1.0, stop_on_stall=False, stall_timeout_s=60.0,
        )  # fmt: skip
        for rank in range(_SIZE):
            self.stands(rank)

    def _start(self, world: World, node: str, epoch: int, lives) -> None:
        self.free = [one for one in self.free if one.name != node]
        self.started.append((node, epoch, list(lives)))

    def stands(self, rank: int, state: State = State.PROTECTED, **standing) -> None:
        row = to_row(rank, Standing(state=state, **standing))
        self.losses.take_standings(self.world, m.Standings(attempt=0, ranks=[row]))

    def lose(self, node: str) -> None:
        """Lose a node with all of its ranks, as the coordinator would."""
        self.world.lost.append(node)
        ranks = self.world.nodes[node]
        joining = [one for one in ranks if self.replacements.is_joining(self.world, one)]
        for rank in joining:
            self._on(self.replacements.note_ended(self.world, rank, LOST))
        self._end({one: LOST for one in ranks if one not in self.world.ended})

    def kill(self, rank: int) -> None:
        self._end({rank: -signal.SIGKILL})

    def _end(self, ended: dict[int, int]) -> None:
        for rank, code in ended.items():
            self.world.note_ended(rank, None if code == LOST else code)
        if not ended:
            return
        assert self.losses.takes(self.world, ended), self.said
        for rank in ended:
            self._on(decide.WorkerLost(rank, "died", is_explained=True))
        self.replacements.note_lost(self.world, ended)

    def _on(self, event: decide.Event) -> None:
        self.world.attempt.on(event, 0.0)

    def continued(self, epoch: int) -> None:
        """Let all ranks that are left continue in an epoch."""
        for rank in range(_SIZE):
            if rank not in self.world.ended:
                self.stands(rank, epoch=epoch, step=5)
        self.step()

    def step(self, *, may_start: bool = True) -> None:
        self.losses.look(self.world)
        for event in self.replacements.step(self.world, 0.0, may_start=may_start):
            self._on(event)

    def given_up(self) -> list[int]:
        return [one["rank"] for one in self.report.not_replaced]

    @property
    def newest(self) -> Epoch:
        return Epoch.unpack(self.store.values[f"continuation/{self.losses._epochs.number}/epoch"])


@pytest.fixture
def job(tmp_path):
    return _Job(tmp_path)


def test_a_spare_node_takes_the_place_of_a_lost_one_and_its_ranks_join(job):
    job.free = [_node("spare")]
    job.lose("b")
    assert job.replacements.is_busy
    job.step(may_start=False)
    assert job.started == [], "the incident is read first"
    job.continued(1)
    assert job.started == [("spare", 1, [1, 1])]
    assert job.said[-1] == "node host-spare takes the place of lost node host-b with ranks 2 and 3"
    assert job.world.nodes == {"a": range(2), "spare": range(2, 4), "c": range(4, 6)}
    assert job.world.present == ["a", "spare", "c"]
    assert job.world.host_of(2) == "host-spare"
    assert job.given_up() == []
    for rank in (2, 3):
        assert job.replacements.is_joining(job.world, rank)
        job.stands(rank, State.JOINING)
    job.step()
    assert job.newest.joins == (2, 3)
    assert job.newest.roster == (0, 1, 2, 3, 4, 5)
    assert job.newest.lives == ((2, 1), (3, 1))
    job.continued(2)
    assert not job.replacements.is_busy
    assert job.report.continuations[-1]["joined_ranks"] == [2, 3]


def test_a_node_that_connects_later_takes_the_place(job):
    job.lose("b")
    job.continued(1)
    assert not job.replacements.is_busy, "nothing can be done until a node connects"
    assert (
        "ranks 2 and 3 are not replaced: the node was lost, and no other node is free" in job.said
    )
    assert job.given_up() == [2, 3]
    job.free = [_node("late")]
    assert job.replacements.is_busy
    job.step()
    assert job.started == [("late", 1, [1, 1])]
    assert job.given_up() == [], "they are replaced after all"


def test_a_node_with_too_few_workers_does_not_take_the_place(job):
    job.free = [_node("small", 1), _node("large", 4)]
    job.lose("b")
    job.continued(1)
    assert [node for node, *_ in job.started] == ["large"]


def test_two_lost_nodes_and_one_spare(job):
    job.free = [_node("spare")]
    job.lose("c")
    job.lose("b")
    job.continued(2)
    assert [node for node, *_ in job.started] == ["spare"]
    assert job.world.present == ["a", "spare"]
    assert len(job.world.nodes) == 3
    job.free = [_node("late")]
    job.step()
    assert [node for node, *_ in job.started] == ["spare", "late"]
    assert len(job.world.present) == 3
    assert job.given_up() == []


def test_a_node_that_is_lost_before_its_ranks_have_joined_is_followed_by_another_one(job):
    job.free = [_node("first"), _node("second")]
    job.lose("b")
    job.continued(1)
    job.lose("first")
    job.step()
    assert job.started == [("first", 1, [1, 1]), ("second", 1, [2, 2])]
    assert job.world.present == ["a", "second", "c"]


def test_a_node_that_is_lost_after_its_ranks_have_joined_is_replaced_again(job):
    job.free = [_node("first"), _node("second")]
    job.lose("b")
    job.continued(1)
    for rank in (2, 3):
        job.stands(rank, State.JOINING)
    job.step()
    job.continued(2)
    job.lose("first")
    job.continued(3)
    assert job.started[-1] == ("second", 3, [2, 2])


def test_a_rank_that_was_to_be_replaced_on_its_node_moves_with_the_node(job):
    job.kill(2)
    job.free = [_node("spare")]
    job.lose("b")
    job.continued(2)
    assert job.started == [("spare", 2, [1, 1])]
    assert job.sent == [], "its own node is gone"


def test_a_node_counts_once_per_rank_towards_the_most_replacements(tmp_path):
    job = _Job(tmp_path, "--max-replacements", "1")
    job.free = [_node("spare")]
    job.lose("b")
    job.continued(1)
    assert job.started == []
    assert job.said[-1] == ("ranks 2 and 3 are not replaced: --max-replacements allows 1 in a job")
    assert not job.replacements.is_busy


def test_another_attempt_forgets_the_lost_nodes(job):
    job.lose("b")
    job.continued(1)
    job.free = [_node("late")]
    other = World.of(
        [_node("a"), _node("late")],
        number=1, grace_s=1.0, stop_on_stall=False, stall_timeout_s=60.0,
    )  # fmt: skip
    assert job.replacements.step(other, 0.0, may_start=True) == []
    assert job.started == []
    assert not job.replacements.is_busy
