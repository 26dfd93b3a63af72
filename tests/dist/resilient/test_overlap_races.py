"""What a step may do to the optimizer's state while a thread copies it."""

# ruff: noqa: F811 -- fixtures

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import echelon.dist as dist
from echelon.dist import checkpoint
from echelon.dist.resilient import copied
from echelon.dist.resilient.copies.copying import Copying
from echelon.dist.resilient.sharded import ShardedState
from echelon.errors import CollectiveError
from tests.dist.resilient.test_overlap import (  # noqa: F401 -- two fixtures
    _LIMIT_S,
    _averages,
    _copied,
    _equal,
    _step,
    _steps,
    _threads,
    gate,
    made,
)


def _first(optimizer):
    return next(iter(optimizer.state.values()))["exp_avg"]


class _Slow(TorchDispatchMode):
    """Lets an operation write to the state, and return only once the thread has copied it."""

    def __init__(self, copying, gate):
        super().__init__()
        self.copying, self.gate = copying, gate

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        found = operation(*args, **(kwargs or {}))
        self.gate.opens.set()
        assert self.copying._has_copied.wait(_LIMIT_S)
        self.copying._thread.join(0.2)  # it may do more than it should
        return found


def test_a_change_that_is_under_way_when_the_copy_is_complete_leaves_no_stamp(made, gate):
    """torch counts a change after it was made, so the thread does not see one that still runs."""
    _, optimizer, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    with _Slow(state._copying, gate):
        _first(optimizer).mul_(0.5)
    assert _steps(state) == [4]
    with pytest.warns(RuntimeWarning, match="exp_avg"):
        assert state.finish() == 4


def test_a_copy_is_offered_during_the_forward_pass_that_follows_it(made):
    """If only the end of the step offered it, a loss would always cost one step more."""
    model, _, state = made
    state.keep(5, overlaps=True)
    state._copying.wait_until_copied(_LIMIT_S)
    assert _steps(state) == [4]
    model(torch.ones(1, 3))
    assert state._copying._has_stamped.wait(_LIMIT_S)
    assert _steps(state) == [4, 5]
    assert state.finish() == 5


def test_a_copy_is_offered_during_the_backward_pass_that_follows_it(made, gate):
    model, _, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    loss = model(torch.ones(1, 3)).sum()
    gate.opens.set()
    state._copying.wait_until_copied(_LIMIT_S)
    loss.backward()
    assert state._copying._has_stamped.wait(_LIMIT_S)
    assert _steps(state) == [4, 5]
    assert state.finish() == 5


def test_a_collective_on_the_state_voids_the_copy(made, gate):
    """It does not go through torch, which therefore does not count the change."""
    _, optimizer, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    dist.world().all_reduce(_first(optimizer))
    gate.opens.set()
    with pytest.warns(RuntimeWarning, match="exp_avg"):
        assert state.finish() == 4


class _Lookahead(torch.optim.Optimizer):
    """As published: it wraps an optimizer, and never calls `Optimizer.__init__`."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = inner.state

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none=True):  # torch's own would make the class call hooks
        self.inner.zero_grad(set_to_none)


class _HookedLookahead(_Lookahead):
    """It has hooks, which no one calls."""

    def __init__(self, inner):
        super().__init__(inner)
        self._optimizer_step_pre_hooks = OrderedDict()


@pytest.mark.parametrize("kind", [_Lookahead, _HookedLookahead])
def test_an_optimizer_that_does_not_call_hooks_is_copied_at_once(made, kind):
    """Its fused step would change the state while it is copied, and torch would not count that."""
    model, _, state = made
    state.drop()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    _step(model, inner)
    optimizer = kind(inner)
    state = ShardedState(model, optimizer)
    state.enter(dist.world(), 0)
    state.keep(4)
    before = _averages(optimizer)
    state.keep(5, overlaps=True)
    assert not _threads()
    _step(model, optimizer)
    assert state.finish() == 5
    assert _equal(_copied(state), before)
    state.drop()


def test_the_hook_runs_before_those_of_the_program(made, gate, monkeypatch):
    """They belong to the optimizer, and may write to its state in a way that torch does not see."""
    model, optimizer, state = made
    before = _averages(optimizer)

    def zero(*_):
        _first(optimizer).data.zero_()

    optimizer.register_step_pre_hook(zero)
    gate.opens.clear()
    state.keep(5, overlaps=True)
    gate.open_once_awaited(monkeypatch, "wait_until_copied")
    _step(model, optimizer)
    gate.opens.set()
    assert state.finish() == 5
    assert _equal(_copied(state), before)


def test_a_compiled_step_waits_as_well(made, gate, monkeypatch):
    model, optimizer, state = made
    before = _averages(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    for number in (5, 6):
        gate.opens.clear()
        before = _averages(optimizer)
        state.keep(number, overlaps=True)
        gate.open_once_awaited(monkeypatch, "wait_until_copied")
        model(torch.ones(1, 3)).sum().backward()
        step()
        optimizer.zero_grad()
        assert not _equal(_averages(optimizer), before)
        assert state.finish() == number
        assert _equal(_copied(state), before)
        gate.opens.set()


def test_where_no_thread_can_be_started_the_copy_is_made_at_once(made, monkeypatch):
    _, optimizer, state = made
    before = _averages(optimizer)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        state.keep(5, overlaps=True)
    assert _steps(state) == [4, 5]
    _first(optimizer).mul_(0.5)
    assert state.finish() == 5
    assert _equal(_copied(state), before)


def test_a_thread_that_was_too_slow_for_the_end_of_a_step_is_still_stopped(made, monkeypatch):
    """Else it would write to its copies while the survivors read or release them."""
    model, optimizer, state = made
    arrives = threading.Event()
    world = state._worlds[-1]
    monkeypatch.setattr(world, "is_one_place", False)
    monkeypatch.setattr(world, "_exchange", lambda *_: arrives.wait(_LIMIT_S))
    state.keep(5, overlaps=True)
    _step(model, optimizer)
    dist.world().timeout_s = 0.01
    with pytest.raises(CollectiveError, match=r"the copy of step 5 .* not complete after"):
        state.finish()
    with pytest.raises(CollectiveError, match=r"the copy of step 5 .* not complete after"):
        state.stop(0.01)
    arrives.set()
    state.stop(_LIMIT_S)
    assert not _threads()
    assert _steps(state) == [4, 5]


def test_a_run_that_has_failed_waits_until_its_state_is_copied(made, gate, monkeypatch):
    """However long that takes: a thread that is left would abort the process at its exit."""
    _, _, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    real = Copying.wait_until_copied

    def wait(copying, timeout_s):
        if timeout_s > copied._CLOSE_S:
            gate.opens.set()
        real(copying, timeout_s)

    monkeypatch.setattr(Copying, "wait_until_copied", wait)
    state.close()
    assert not _threads()


def test_a_child_may_change_the_state_and_leave(made, gate):
    """Its parent's copies are none of its business."""
    _, optimizer, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    assert gate.is_reached.wait(_LIMIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(int(_LIMIT_S))
        code = 1
        try:
            _first(optimizer).mul_(0.5)
            state.close()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    gate.opens.set()
    assert state.finish() == 5


def test_state_that_a_step_replaces_is_copied_as_it_was(made, gate):
    _, optimizer, state = made
    before = _averages(optimizer)
    gate.opens.clear()
    state.keep(5, overlaps=True)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] * 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    gate.opens.set()
    assert state.finish() == 5
    assert _equal(_copied(state), before)
    state.restore()
    assert _equal(_averages(optimizer), before)


def test_a_checkpoint_that_a_step_loads_does_not_get_into_the_copy(made, gate, tmp_path):
    _, optimizer, state = made
    told = {"model": made[0], "optimizer": optimizer}
    checkpoint.save(tmp_path / "checkpoint", told)
    state.keep(5)
    for values in optimizer.state.values():
        values["exp_avg"].mul_(0.5)
    before = _averages(optimizer)
    gate.opens.clear()
    state.keep(6, overlaps=True)
    checkpoint.load(tmp_path / "checkpoint", told)
    gate.opens.set()
    assert not _equal(_averages(optimizer), before)
    assert state.finish() == 6
    assert _equal(_copied(state), before)


def test_copies_that_are_void_elsewhere_leave_the_last_complete_one(made):
    """Two steps in a row, each of which some rank has voided."""
    model, optimizer, state = made
    before = _averages(optimizer)
    for number in (5, 6):
        _step(model, optimizer)
        state.keep(number, overlaps=True)
        assert state.finish() == number
        state.discard_newest()
        assert _steps(state) == [4]
    _step(model, optimizer)
    state.restore_rest(4)
    state.restore()
    assert _equal(_averages(optimizer), before)


def test_a_step_that_a_scaler_leaves_out_ends_with_a_complete_copy(made):
    model, optimizer, state = made
    before = _averages(optimizer)
    state.keep(5, overlaps=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.full((1, 3), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert state.finish() == 5
    assert _equal(_averages(optimizer), before)
    assert _equal(_copied(state), before)
