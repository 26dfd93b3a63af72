"""Every schedule on the made-up device, where a send holds its stream until its receive is posted.

The stages compute on the host; what passes between them is the made-up device's, headers excepted.
"""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.pipeline import Pipeline, Stage, schedule  # noqa: E402
from tests.dist import made_up  # noqa: E402
from tests.dist.pipeline.models import (  # noqa: E402
    Reference,
    loss_fn,
    make_batch,
    make_stage,
    tie_of,
)
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
NAMES = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv",
    "dualpipev",
)  # fmt: skip


class _Work:
    """A work whose waiter computes on the host, so that it waits for its stream as well."""

    def __init__(self, work):
        self._work = work
        self.done = False

    def wait(self):
        self._work.wait()
        made_up.accelerator.current_stream().synchronize()
        self.done = True


class _Channel:
    """A channel that moves tensors of the host as arrays of the device."""

    def __init__(self, channel, counts):
        self._channel = channel
        self._counts = counts

    def open(self, like, async_op):
        return self._channel.open(_array(like), async_op=async_op)

    def send(self, tensor, async_op=False):
        return self._move(self._channel.send, tensor, async_op)

    def recv(self, tensor, async_op=False):
        return self._move(self._channel.recv, tensor, async_op)

    def _move(self, call, tensor, async_op):
        self._counts.append(tensor.numel())
        work = _Work(call(_array(tensor), async_op=True))
        return work if async_op else work.wait()


def _array(tensor):
    """Return an array of the device in the tensor's own memory."""
    array = made_up.DeviceArray(torch.zeros(0), index=made_up.accelerator.current_device())
    array.tensor = tensor.detach()
    return array


def _put_data_on_device(group) -> list:
    """Make a group's data channels the device's; return where their messages are counted."""
    counts, plain = [], group.channel

    def channel(peer, name):
        made = plain(peer, name)
        return made if name.endswith("/headers") else _Channel(made, counts)

    group.channel = channel
    return counts


def _every_schedule(rank, world_size):
    world, _ = made_up.init("made-up", timeout_s=60)
    counts = _put_data_on_device(world)
    for name in NAMES:
        plan = schedule(name, world_size, 4)
        stages = [
            Stage(make_stage(index, plan.num_stages), index=index, num_stages=plan.num_stages)
            for index in plan.stages_of(rank)
        ]
        pipe = Pipeline(
            stages, group=world, schedule=plan, loss_fn=loss_fn, ties=[tie_of(plan.num_stages)]
        )
        links = pipe._links  # a device's: headers are messages of their own
        links.update({n: dataclasses.replace(one, is_joined=False) for n, one in links.items()})
        reference = Reference(plan.num_stages, tied=True)
        for size in (4, 8):  # outputs grow
            del counts[:]
            inputs, targets = make_batch(size, size)
            wanted = reference.train([(inputs, targets)], 4)[0]
            losses = pipe.step(inputs, targets)
            assert counts, "nothing passed over the device"
            if pipe.has_last:
                assert all(torch.equal(a, b) for a, b in zip(losses, wanted, strict=True)), name
            for stage in stages:
                pairs = zip(
                    stage.module.parameters(),
                    reference.stages[stage.index].parameters(),
                    strict=True,
                )
                for mine, theirs in pairs:
                    assert torch.equal(mine.grad, theirs.grad), name
                    mine.grad = None
    world.barrier()
    made_up.shutdown()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_schedule_runs_where_a_send_holds_its_stream(num_ranks):
    run_ranks(_every_schedule, num_ranks, timeout_s=240)
