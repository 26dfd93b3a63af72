"""A pipeline that is trained without `SameBitsPipeline`, and whose stages share a parameter."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.pipeline import Pipeline, Stage, split
from tests.dist.resilient.agent import introduce, note_done, run_watched
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_TOTAL = 8


def _layers():
    """A first and a last layer with the same weight."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4) for name in ("token", "middle", "head")}
    layers["head"].weight = layers["token"].weight
    return layers


def _build(world):
    size, rank = world.group.size, world.group.rank
    stage = Stage(split(_layers(), size)[rank], index=rank, num_stages=size)
    ties = [["0:token.weight", f"{size - 1}:head.weight"]] if size > 1 else []
    pipe = Pipeline([stage], ties=ties, num_microbatches=2, loss_fn=nn.MSELoss())
    return pipe, torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def _train(rank, world_size, folder, kills):
    introduce(folder, rank)
    torch.set_num_threads(1)
    dist.init("shm", timeout_s=120)

    def build(world):
        pipe, optimizer = _build(world)

        def train_step(step):
            if (rank, step) in kills:
                os.kill(os.getpid(), signal.SIGKILL)
            data = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            pipe.step(data if pipe.has_first else None, data if pipe.has_last else None)
            optimizer.step()
            optimizer.zero_grad()

        return resilient.PipelineSetup(pipe, optimizer, train_step)

    setup = resilient.run_pipeline(build, total=_TOTAL)
    found = {name: one.tolist() for name, one in setup.pipe.module.state_dict().items()}
    note_done(folder, rank)
    dist.shutdown()
    return found


@pytest.mark.parametrize("lost", [[(1, 2)], [(0, 2), (2, 4)]], ids=["one", "all but one"])
def test_copies_of_a_tied_parameter_stay_equal_wherever_the_stages_are(tmp_path, lost):
    """On two ranks they are two parameters as on three, and on one rank they are one."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    alone.mkdir()
    whole.mkdir()
    (undisturbed,) = run_ranks(_train, 1, alone, [])
    codes = {rank: -signal.SIGKILL for rank, _ in lost}
    ends, _ = run_watched(_train, 3, whole, lost, exit_codes=codes)
    found = {name: value for one in ends for name, value in one.items()}
    assert found.keys() == undisturbed.keys()
    assert found["token.weight"] == found["head.weight"]
    for name, value in found.items():
        expected = torch.tensor(undisturbed[name])
        torch.testing.assert_close(torch.tensor(value), expected, rtol=1e-4, atol=1e-5)
