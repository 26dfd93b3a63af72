"""What a rank does where others join: reports, limits and errors, in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import runtime
from echelon.dist.backends.interface import Members
from echelon.dist.membership.absent import AbsentEngine
from echelon.dist.resilient.epochs import Superseded
from echelon.dist.resilient.joining import JoinDue, Joins, wait_until_admitted
from echelon.dist.resilient.kept import KeptState
from echelon.dist.resilient.training.replicated import Training
from echelon.dist.resilient.training.world import World
from echelon.errors import CollectiveError, PeerLostError, StoreTimeoutError
from echelon.host.identity import process_identity
from echelon.launcher.coordinator.loss.replacing import JOINS_S
from echelon.recorder.continuation import Epoch, read_standing


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A world of one rank, under a launcher."""
    monkeypatch.setenv("ECHELON_RANK_DIR", str(tmp_path))
    yield dist.init(timeout_s=20)
    dist.shutdown()


@pytest.fixture
def training(world):
    """Its training, where the launcher replaces lost ranks."""
    return _training(replaces=True)


def _refuse(*_):
    raise Superseded


def test_a_rank_reports_each_meeting_it_goes_to(training, tmp_path, monkeypatch):
    """The launcher then knows that a rank which joins keeps it waiting; also after a loss."""
    monkeypatch.setattr(training._epochs, "meet", _refuse)
    with pytest.raises(Superseded):
        training._join(Epoch(number=3, roster=(0, 1), lost=(2,)))
    assert read_standing(tmp_path).meets == 3


_EPOCH = Epoch(number=2, roster=(0, 1), lost=())


def _training(prepare=lambda _: lambda step: step, *, replaces, also=()):
    model = nn.Linear(2, 2)
    kept = KeptState(model, torch.optim.SGD(model.parameters(), lr=0.1), also)
    joins = Joins(is_on=replaces)
    return Training(prepare, kept, 0, 1, None, joins, is_protected=True)


@pytest.mark.parametrize(
    ("replaces", "joins", "least_s", "most_s"),
    [(False, False, 20, 20), (True, False, JOINS_S + 50, 600), (True, True, 86400, 2**31)],
    ids=["no rank joins", "another rank may join", "this rank joins"],
)
@pytest.mark.usefixtures("world")
def test_a_meeting_lasts_as_long_as_the_launcher_lets_a_rank_join(
    monkeypatch, replaces, joins, least_s, most_s
):
    """Also where the program's collectives have a shorter timeout."""
    training, given_s = _training(replaces=replaces), []
    training._is_newcomer = joins

    def meet(_epoch, _mine, timeout_s):
        given_s.append(timeout_s)
        raise Superseded

    monkeypatch.setattr(training._epochs, "meet", meet)
    with pytest.raises(Superseded):
        training._join(_EPOCH)
    assert least_s <= given_s[0] <= most_s


def test_a_hand_over_may_take_as_long_and_the_steps_after_it_not(training, monkeypatch):
    given_s = []
    row = {"process": process_identity(), "kept": -1, "finished": -1}
    monkeypatch.setattr(training._epochs, "meet", lambda *_: [row])
    monkeypatch.setattr(training, "_hand_over", lambda group, *_: given_s.append(group.timeout_s))
    training._state.keep()
    world = training._join(Epoch(number=2, roster=(0,), lost=()))
    assert given_s[0] >= JOINS_S + 50
    assert world.group.timeout_s == 20


def test_an_error_of_a_join_that_fails_is_one_that_a_user_knows(training, monkeypatch):
    """First the rank that joins is stuck, then the launcher publishes nothing more."""
    waits_s = []

    def next_epoch(timeout_s):
        waits_s.append(timeout_s)
        if len(waits_s) == 2:
            raise StoreTimeoutError("nothing")
        return _EPOCH

    def lose(_):
        raise PeerLostError("rank 1 is gone", ranks=[1])

    monkeypatch.setattr(training._epochs, "next", next_epoch)
    monkeypatch.setattr(training, "_join", lose)
    with pytest.raises(
        CollectiveError, match="ranks are due to join in epoch 2\nThe ranks do not join: the l"
    ) as raised:
        training._recover(JoinDue("ranks are due to join in epoch 2", operation="join"))
    assert type(raised.value) is CollectiveError
    assert waits_s[1] >= JOINS_S + 30


def test_a_collective_before_the_state_is_there_says_what_to_skip():
    members = Members(name="world", rank=1, ranks=[0, 1])
    operation = SimpleNamespace(kind="broadcast", sequence=0)
    with pytest.raises(CollectiveError, match=r"checkpoint\.load is also a collective: skip it"):
        AbsentEngine(members).prepare(operation)


class _Seen:
    """State of a kind that cannot be sent."""

    def state_dict(self):
        return {"seen": {1, 2}}

    def load_state_dict(self, state) -> None: ...


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("replaces", [True, False])
def test_a_state_that_cannot_be_sent_is_refused_at_the_start(replaces):
    """Not hours later, where a rank is to be replaced."""
    done = []
    training = _training(lambda _: done.append, replaces=replaces, also=[_Seen()])
    if replaces:
        with pytest.raises(
            ValueError,
            match=r"sent to a rank that replaces a lost one: also\[0\]\['seen'\] has type",
        ):
            training.train(World(dist.world(), 0, ()))
    else:
        training.train(World(dist.world(), 0, ()))
    assert done == ([] if replaces else [0])


@pytest.mark.parametrize(
    ("told", "entered", "is_orderly"),
    [
        ({}, 0, False),
        ({"joins": (1,)}, 0, True),
        ({"joins": (1,)}, 1, True),
        ({"withdraws": 2}, 0, True),
        ({"withdraws": 2}, 1, True),
        ({"withdraws": 2}, 2, False),  # it met the rank that died, or waits for it
        ({"withdraws": 2}, 3, False),
    ],
)
def test_an_epoch_is_entered_at_the_end_of_a_step_unless_a_rank_of_the_world_is_lost(
    told, entered, is_orderly
):
    joins = Joins(is_on=True)
    joins.entered = entered
    epoch = Epoch(number=4, roster=(0, 2), lost=(), **told)
    assert joins.is_orderly(Epoch.unpack(epoch.pack())) == is_orderly


def test_a_rank_knows_which_epoch_it_goes_to_before_it_meets_the_others(training, monkeypatch):
    """A later epoch that withdraws this one then finds it in the meeting."""
    monkeypatch.setattr(training._epochs, "next", lambda _: _EPOCH)
    assert training._next_epoch(JoinDue("x", operation="join"), 1.0) is _EPOCH
    assert training._joins.entered == _EPOCH.number


@pytest.mark.parametrize(("lives", "is_meant"), [((), True), (((0, 1),), False), (((1, 2),), True)])
def test_a_rank_whose_place_another_process_has_taken_does_not_continue(
    training, monkeypatch, lives, is_meant
):
    """It was cut off and did not see the epoch without it."""
    epoch = Epoch(number=2, roster=(0, 1), lost=(), lives=lives)
    monkeypatch.setattr(training._epochs, "next", lambda _: epoch)
    err = PeerLostError("x", operation="barrier", ranks=(1,))
    if is_meant:
        assert training._next_epoch(err, 1.0) is epoch
        return
    with pytest.raises(PeerLostError, match="another process has taken the place of rank 0"):
        training._next_epoch(err, 1.0)


def test_a_process_that_waits_to_join_ignores_epochs_that_mean_another_one(training, monkeypatch):
    monkeypatch.setattr(runtime, "own_life", lambda: 2)
    epochs = [
        Epoch(number=n, roster=(0, 1), lost=(), joins=(0,), lives=((0, life),))
        for n, life in ((3, 1), (5, 2))
    ]
    left = iter(epochs)
    monkeypatch.setattr(training._epochs, "next", lambda _: next(left))
    assert wait_until_admitted(training._epochs) is epochs[1]
