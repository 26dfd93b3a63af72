"""Ranks that are killed at named moments: the bits at the end are those of an undisturbed run."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.joining import Joins
from echelon.dist.resilient.kept import KeptState
from echelon.dist.resilient.training import replicated
from echelon.errors import CollectiveError, PeerLostError
from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import train
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 14


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a run on one rank, which none of this concerns."""
    ((found, _, _),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def _codes(kills):
    return {rank: -signal.SIGKILL for rank, _, _ in kills}


def _survive(tmp_path, world_size, kills):
    """Run, and return what each rank that is left reports, and what the launcher does."""
    ends, agent = run_watched(train, world_size, tmp_path, _TOTAL, kills, exit_codes=_codes(kills))
    assert len(ends) == world_size - len({rank for rank, _, _ in kills})
    return ends, agent


def test_a_rank_may_die_at_any_moment_of_a_step(tmp_path, undisturbed):
    kills = [
        (0, "forward", 2), (5, "backward", 4), (1, "collective", 6), (4, "before the optimizer", 8),
        (2, "after the optimizer", 10),
    ]  # fmt: skip
    ends, agent = _survive(tmp_path, 6, kills)
    assert [end[0] for end in ends] == [undisturbed]
    ((_, worlds, commits),) = ends
    assert [size for _, _, size in worlds] == [6, 5, 4, 3, 2, 1]
    assert worlds[-1][1] == (0, 1, 2, 4, 5)
    assert [step for step, _ in commits] == list(range(_TOTAL))
    # The agent may look again only after the next loss; then it reports the two as one.
    told = [(one["step"], one["repeated"]) for one in agent.report.continuations]
    # The last two died when nothing was left to exchange: where the others have got that far, they
    # need not repeat the step.
    ways = {(2, True), (4, True), (6, True), (8, True), (9, False), (10, True), (11, False)}
    assert set(told) <= ways
    assert agent.report.continuations[-1]["lost_ranks"] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    "moments",
    [("leaving", "before the meeting", "in the meeting"), ("restoring", "regrouping", "prepare")],
    ids=["before an agreement", "after it"],
)
def test_a_rank_may_die_while_another_loss_is_recovered_from(tmp_path, undisturbed, moments):
    first = [(rank, "forward", step) for rank, step in ((0, 2), (7, 5), (2, 8))]
    second = [(rank, m, step) for rank, m, step in zip((1, 6, 3), moments, (2, 5, 8), strict=True)]
    ends, agent = _survive(tmp_path, 8, first + second)
    assert [end[0] for end in ends] == [undisturbed] * 2
    for _, worlds, commits in ends:
        assert worlds[-1][1:] == ((0, 1, 2, 3, 6, 7), 2)
        assert [step for step, _ in commits] == list(range(_TOTAL))
    assert agent.report.continuations[-1]["lost_ranks"] == [0, 1, 2, 3, 6, 7]


def test_two_may_die_at_once_and_one_while_others_pass_the_barrier(tmp_path, undisturbed):
    kills = [(0, "forward", 3), (1, "forward", 3), (2, "barrier", 6)]
    ends, agent = _survive(tmp_path, 5, kills)
    assert [end[0] for end in ends] == [undisturbed] * 2
    for _, _, commits in ends:
        assert [step for step, _ in commits] == list(range(_TOTAL))
    assert agent.report.continuations[-1]["lost_ranks"] == [0, 1, 2]


@pytest.mark.parametrize("buffer", ["expanded", "plain"])
def test_a_model_that_cannot_be_restored_is_refused(buffer):
    model = nn.Linear(2, 2)
    ones = torch.ones(1).expand(4) if buffer == "expanded" else torch.ones(4)
    model.register_buffer("ones", ones)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.init()
    try:
        if buffer == "plain":
            resilient.run(lambda _: lambda step: step, model, optimizer, total=1)
        else:
            with pytest.raises(ValueError, match="buffer 'ones' is expanded"):
                resilient.run(lambda _: lambda step: step, model, optimizer, total=1)
    finally:
        dist.shutdown()


def test_shards_of_a_module_outside_the_model_are_refused():
    """The optimizer would train them, and a lost rank would take its part along."""
    dist.init()
    try:
        model, outside = fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(3, 3))
        both = torch.optim.SGD([*model.parameters(), *outside.parameters()], lr=0.1)
        with pytest.raises(ValueError, match=r"in the optimizer, but not in the model"):
            resilient.run(lambda _: lambda step: step, model, both, total=1)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        resilient.run(lambda _: lambda step: step, model, own, total=1)
    finally:
        dist.shutdown()


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_that_prepare_shards_is_refused(is_sharded):
    """Its shards were neither copied nor checked."""
    dist.init()
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if is_sharded:
            fully_shard(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def prepare(_):
            fully_shard(model[1])
            return lambda step: step

        with pytest.raises(ValueError, match="prepare called fully_shard"):
            resilient.run(prepare, model, optimizer, total=1)
    finally:
        dist.shutdown()


@pytest.mark.parametrize(
    ("backend", "error", "says"),
    [
        ("shm", PeerLostError("rank 1 died", ranks=[1]), "rank 1 is gone, but the launcher has"),
        ("shm", PeerLostError("2 ranks died", ranks=[1, 2]), "ranks 1 and 2 are gone, but the"),
        ("shm", PeerLostError("a rank died", ranks=[]), "a rank is gone, but the launcher has"),
        ("shm", CollectiveError("torn"), "no rank was lost within 0.01 s of this error"),
        ("gloo", CollectiveError("torn"), "no rank was lost within 0.02 s of this error"),
    ],
    ids=[
        "a rank left by itself",
        "two left",
        "one left",
        "another error",
        "another error over a network",
    ],
)
def test_an_error_without_a_loss_says_so_in_words(monkeypatch, backend, error, says):
    monkeypatch.setattr(replicated, "_LOST_S", 0.02)
    monkeypatch.setattr(replicated, "_OTHER_S", 0.01)

    def fail(_):
        raise error

    dist.init(backend)
    try:
        model = nn.Linear(2, 2)
        kept = KeptState(model, torch.optim.SGD(model.parameters(), lr=0.1), [])
        joins = Joins(is_on=False)
        one = replicated.Training(lambda _: fail, kept, 0, 1, None, joins, is_protected=True)
        with pytest.raises(type(error), match=says) as raised:
            one.train(resilient.World(dist.world(), 0, ()))
        assert "continuation/" not in str(raised.value)
    finally:
        dist.shutdown()


def _run_twice(rank, world_size):
    dist.init("shm", timeout_s=60)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    resilient.run(lambda _: lambda step: step, model, optimizer, total=1)
    with pytest.raises(ValueError, match="run was already called in this process"):
        resilient.run(lambda _: lambda step: step, model, optimizer, total=2, first=1)
    dist.shutdown()


def test_a_second_protected_run_is_refused():
    """It would read what the first one left in the store."""
    run_ranks(_run_twice, 2, environ={"ECHELON_ON_LOSS": "shrink"})
