"""Copies that threads exchange between hosts while steps compute; the hosts are believed in."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import echelon.dist as dist
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.copies.shards import ShardsWriter
from echelon.dist.resilient.sharded import ShardedState
from tests.dist.resilient.training import believe_to_be_on
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_LIMIT_S = 60.0


class _Rank:
    """A rank that believes to be alone on its host, and has copied the start of step 4."""

    def __init__(self, rank):
        believe_to_be_on(rank)
        self.group = dist.init(timeout_s=_LIMIT_S)
        torch.manual_seed(0)
        self.model = fully_shard(nn.Linear(8, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.compute()
        self.state = ShardedState(self.model, self.optimizer)
        self.state.enter(self.group, 0)
        self.state.keep(4)
        self.group.barrier()

    def compute(self):
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end_step(self):
        """Return the step whose copies are complete on all ranks."""
        found = torch.tensor([self.state.finish()])
        self.group.all_reduce(found, "min")
        return int(found)

    def leave(self):
        self.state.drop()
        dist.shutdown()


def _hold(gate):
    real = ShardsWriter.write_rest

    def write_rest(writer, content, crc):
        assert gate.wait(_LIMIT_S)
        return real(writer, content, crc)

    ShardsWriter.write_rest = write_rest


def _wait_for_a_late_copy(rank, world_size):
    """Rank 0 copies before its step; rank 1's copy is complete only once both are in the step."""
    one = _Rank(rank)
    gate = threading.Event()
    if rank == 0:
        one.state._may_overlap = False
    else:
        _hold(gate)
    one.state.keep(5, overlaps=True)
    one.group.barrier()  # as a gather of a forward pass would wait for the other rank
    gate.set()
    one.compute()
    found = one.end_step(), sorted(one.state.offers([rank])["offers"])
    one.leave()
    return found


def test_a_rank_that_copies_before_its_step_does_not_wait_for_a_copy_of_its_partner():
    """Its partner may have to wait for it before it can send that copy."""
    found = run_ranks(_wait_for_a_late_copy, 2)
    assert found == [
        (5, sorted((0, step, owner) for step in (4, 5) for owner in (0, 1))) for _ in range(2)
    ]


class _Slow(TorchDispatchMode):
    """Does something between an operation's end and the moment when torch counts its change."""

    def __init__(self, before_count):
        super().__init__()
        self.before_count = before_count

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.before_count()
        return found


def _change_while_copying(rank, world_size):
    """Return what rank 1 could offer if rank 0's host was lost within an operation on its state."""
    one = _Rank(rank)
    gate, offered = threading.Event(), []
    if rank == 0:
        _hold(gate)
    one.state.keep(5, overlaps=True)

    def meet():
        if rank == 0:
            gate.set()
            one.state._copying.wait_until_copied(_LIMIT_S)
            one.state._copying._thread.join(0.5)  # it may do more than it should
        one.group.barrier()
        offered.extend(sorted(one.state.offers([1])["offers"]) if rank else [])
        one.group.barrier()

    if rank == 0:
        with _Slow(meet):
            next(iter(one.optimizer.state.values()))["exp_avg"].mul_(0.5)
        with pytest.warns(RuntimeWarning, match="exp_avg"):
            one.compute()
    else:
        meet()
        one.compute()
    found = one.end_step(), [(step, owner) for _, step, owner in offered if owner == 0]
    one.leave()
    return found


def test_a_partner_has_no_copy_of_what_is_being_changed():
    assert run_ranks(_change_while_copying, 2) == [(4, []), (4, [(4, 0)])]
