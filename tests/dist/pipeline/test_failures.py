"""User code that raises on one rank: every rank gets an error that names it, within seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.backends.interface import Members  # noqa: E402
from echelon.dist.fsdp import fully_shard  # noqa: E402
from echelon.dist.mesh import DeviceMesh  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage, schedule  # noqa: E402
from echelon.dist.pipeline.execute.failure import end_groups  # noqa: E402
from echelon.errors import CollectiveError  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
TIMEOUT_S = 600.0  # of the groups: no rank may wait for it
SOON_S = 60.0  # about 0.1 s on a quiet machine


class OurError(Exception):
    """What the program itself raises."""


class Breaks(nn.Module):
    """A layer that raises in its n-th forward, or in the backward of that."""

    def __init__(self, where):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.where = where
        self.num_forwards = 0

    def forward(self, x):
        self.num_forwards += 1
        y = self.layer(x)
        if self.num_forwards == 6:
            if self.where == "forward":
                raise OurError("ours\nwith a second line")
            if self.where == "backward":
                y.register_hook(self._raise)
        return y

    def _raise(self, _):
        raise OurError("ours")


def _loss(output, targets):
    return (output - targets).square().mean()


def _raising_loss(output, targets):
    raise OurError("ours")


def _steps(pipe, x):
    for _ in range(4):
        pipe.step(x, x)


def _check(pipe, rank, culprit, folder):
    """Run steps until one fails; check what this rank gets for it, and how soon."""
    began_s = time.monotonic()
    x = torch.ones(4, 4)
    with pytest.raises((OurError, CollectiveError)) as caught:
        _steps(pipe, x)
    assert time.monotonic() - began_s < SOON_S
    if rank == culprit:
        assert isinstance(caught.value, OurError)
    else:
        assert isinstance(caught.value, CollectiveError)
        assert caught.value.ranks == (culprit,), caught.value
        said = f"rank {culprit} failed: OurError: ours (at test_failures.py:"
        assert said in str(caught.value), caught.value
        assert len(str(caught.value).splitlines()) <= 3
    with pytest.raises(ValueError, match="failed in an earlier step"):
        pipe.step(x, x)
    # No rank exits or leaves before all have their error, as in a program that catches it.
    folder.mkdir(exist_ok=True)
    Path(folder, str(rank)).touch()
    while len(list(folder.iterdir())) < dist.world().size:
        assert time.monotonic() - began_s < 2 * SOON_S, list(folder.iterdir())
        time.sleep(0.01)


CASES = {
    "the last stage's forward": ("1f1b", 1, "forward"),
    "the first stage's backward": ("1f1b", 0, "backward"),
    "a split backward": ("zbv", 1, "backward"),
    "the loss": ("gpipe", 1, "loss"),
}


def _each(rank, world_size, backend, folder):
    torch.set_num_threads(1)
    for number, (name, culprit, where) in enumerate(CASES.values()):
        dist.init(backend, timeout_s=TIMEOUT_S)
        plan = schedule(name, world_size, 4)
        stages = [
            Stage(Breaks(where if rank == culprit else ""), index=index, num_stages=plan.num_stages)
            for index in plan.stages_of(rank)
        ]
        pipe = Pipeline(stages, schedule=plan, loss_fn=_raising_loss if where == "loss" else _loss)
        _check(pipe, rank, culprit, Path(folder, str(number)))
        dist.shutdown()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_a_stage_raises_on_one_rank_ends_the_step_on_all_with_its_name(tmp_path, backend):
    run_ranks(_each, 2, backend, str(tmp_path), timeout_s=300)


def _grid(rank, world_size, folder):
    """Rank 3 raises; ranks 0 and 1 are in another pipeline, and see it through their replicas."""
    torch.set_num_threads(1)
    for number, is_sharded in enumerate((False, True)):
        dist.init(timeout_s=TIMEOUT_S)
        grid = DeviceMesh((2, 2), ("pp", "dp"))
        group, data = grid.group("pp"), grid.group("dp")
        module = Breaks("forward" if rank == 3 else "")
        if is_sharded:
            fully_shard(module, group=data)
        stage = Stage(module, index=group.rank, num_stages=2)
        pipe = Pipeline(
            [stage], group=group, num_microbatches=4, loss_fn=_loss,
            replicas=None if is_sharded else data,
        )  # fmt: skip
        _check(pipe, rank, 3, Path(folder, str(number)))
        dist.shutdown()


def test_ranks_of_other_pipelines_that_share_replicas_or_shards_get_the_error_too(tmp_path):
    run_ranks(_grid, 4, str(tmp_path), timeout_s=300)


class _State:
    """A group's state, of which only the end is asked."""

    is_closed = is_foreign = False

    def __init__(self, error=None):
        self.members = Members(name="dp", rank=0, ranks=(4, 5))
        self.error = error

    def fail(self, error):
        self.error = self.error or error


class _Group:
    size = 2

    def __init__(self, error=None):
        self.state = _State(error)


def test_a_group_that_had_ended_before_passes_on_why_and_not_that_it_is_broken():
    """A second operation of a broken group may be what a rank sees first."""
    text = "recv #5 in group 'pp' (2 ranks): rank 5 failed: OurError: ours"
    first = CollectiveError(text, operation="recv", sequence=5, ranks=[5])
    raised = CollectiveError("send #1: the group is broken since recv #5", ranks=[5])
    ended, other = _Group(first), _Group()
    end_groups([ended, other], "step", 3, 4, raised)
    assert ended.state.error is first
    assert other.state.error.ranks == (5,)
    assert "step #3" in str(other.state.error)
    assert "rank 5 failed: OurError: ours" in str(other.state.error)
