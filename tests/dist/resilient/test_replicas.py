"""Ranks of a sharded model with replicas (HSDP) that are killed, and whose places others take."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.fsdp import fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.resilient.replicas import Replicas
from tests.dist.resilient.agent import run_replaced, run_watched
from tests.dist.resilient.training import (
    CHANGES_AT,
    FULL_FROM,
    SAVED_STEP,
    train,
    train_on_hosts,
    train_replaced,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 8
_TOTAL_JOINED = 12


def _undisturbed(folder, total):
    """The fingerprint of a replicated run on one rank, which none of this concerns."""
    ((found, _, _),) = run_ranks(train, 1, folder, total, [])
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return _undisturbed(tmp_path_factory.mktemp("whole"), _TOTAL)


def test_the_ranks_that_are_left_form_as_many_replicas_as_fit(tmp_path, undisturbed):
    """Two of two, one of three, two of one (see `Training.prepare`)."""
    kills = [(0, "forward", 2), (3, "after the optimizer", 5)]
    codes = {0: -signal.SIGKILL, 3: -signal.SIGKILL}
    ends, _ = run_watched(train, 4, tmp_path, _TOTAL, kills, "hsdp", exit_codes=codes)
    assert [bits for bits, _, _ in ends] == [undisturbed] * 2
    for _, worlds, commits in ends:
        assert [size for _, _, size in worlds] == [4, 3, 2]
        assert [step for step, _ in commits] == list(range(_TOTAL))


def _lose_three(tmp_path, hosts, kills):
    codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
    ends, _ = run_watched(
        train_on_hosts, 4, tmp_path, _TOTAL, kills, hosts, "hsdp and saved", exit_codes=codes
    )
    return ends


def test_a_host_may_die_whose_shards_only_replicas_on_another_host_have(tmp_path, undisturbed):
    """No copies are sent then, and the checkpoint is not used."""
    kills = [(0, "forward", 4), (1, "restoring shards", 4)]
    ends = _lose_three(tmp_path, [0, 0, 1, 1], kills)
    assert [bits for bits, _, _ in ends] == [undisturbed] * 2
    for _, _, commits in ends:
        assert commits == list(range(_TOTAL))


def test_if_all_replicas_of_a_shard_are_lost_the_checkpoint_is_loaded(tmp_path, undisturbed):
    kills = [(1, "forward", 5), (0, "restoring shards", 5), (2, "restoring shards", 5)]
    ((bits, _, commits),) = _lose_three(tmp_path, [0, 1, 2, 3], kills)
    assert bits == undisturbed
    assert commits == [
        *range(commits.index(SAVED_STEP, SAVED_STEP + 1)),
        *range(SAVED_STEP, _TOTAL),
    ]


@pytest.mark.parametrize(
    "moments",
    [[], pytest.param(["filled", "restoring shards", "after new copies"], marks=pytest.mark.slow)],
)
def test_a_rank_joins_and_the_replicas_are_as_many_as_before(tmp_path, moments):
    joining = [[(2, moment, -1)] for moment in moments]
    lives = {2: [[(2, "forward", CHANGES_AT + 1)], *joining, []]}
    ends, _ = run_replaced(
        train_replaced, 4, tmp_path, _TOTAL_JOINED, "hsdp", [], lives=lives, whole=[]
    )
    folder = tmp_path / "whole"
    folder.mkdir()
    ((whole, *_),) = run_ranks(train_replaced, 1, folder, _TOTAL_JOINED, "", [], {0: []})
    assert {bits for bits, *_ in ends} == {whole}
    for _, worlds, commits, _ in ends:
        assert worlds[-1][1:] == ((), 4)
        assert commits[-1][0] == _TOTAL_JOINED - 1
    assert ends[2][2][0][0] > FULL_FROM


def _refusals(rank, world_size):
    world = dist.init("shm", timeout_s=60)
    mesh = DeviceMesh((2, 1), ("replicate", "shard"))
    backwards = dist.new_group([1, 0])
    model = fully_shard(nn.Linear(2, 2), mesh=mesh)
    cases = [
        (fully_shard(nn.Linear(2, 2), backwards), {}),
        (nn.Sequential(fully_shard(nn.Linear(2, 2)), model), {}),
        (model, {"num_replicas": lambda _: 1}),
        (model, {"num_replicas": lambda _: 3}),
        (nn.Linear(2, 2), {"num_replicas": lambda _: 1}),
    ]
    with torch.no_grad():
        model.bias.add_(rank)
    errors = []
    for one, settings in [*cases, (model, {})]:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with pytest.raises(ValueError) as raised:  # noqa: PT011 -- compared below
            resilient.run(lambda _: print, one, optimizer, total=1, **settings)
        errors.append(str(raised.value))
    world.barrier()
    dist.shutdown()
    return errors


def test_what_cannot_be_continued_is_refused_in_one_line():
    first, second = run_ranks(_refusals, 2, environ={"ECHELON_ON_LOSS": "shrink"})
    assert first == second
    for error, expected in zip(
        first,
        [
            "is not sharded over all ranks of the world, in their order",
            "is not sharded over the same mesh as",
            "num_replicas(2) returned 1, but the model was sharded with 2 replicas",
            "num_replicas(1) must return a divisor of 1, but returned 3",
            "num_replicas= has no effect on a model that is not sharded",
            "the shard of 'bias' on rank 1 differs from its replica on rank 0",
        ],
        strict=True,
    ):
        assert expected in error
        assert "\n" not in error


def test_the_number_of_replicas_follows_from_the_number_of_ranks():
    assert [Replicas(4).number(size) for size in range(1, 9)] == [1, 2, 3, 4, 1, 3, 1, 4]
    own = Replicas(2, lambda size: max(1, size // 4))
    assert [own.number(size) for size in (8, 4, 3)] == [2, 1, 1]
    Replicas(2, lambda size: 2 - size % 2).check(4)
    with pytest.raises(ValueError, match=r"num_replicas\(1\) must return a divisor of 1"):
        Replicas(2, lambda _: 2).check(4)
    with pytest.raises(ValueError, match=r"num_replicas\(3\) must return a divisor of 3"):
        Replicas(2, lambda _: 2).number(3)
