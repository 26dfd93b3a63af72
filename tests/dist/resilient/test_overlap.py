"""The optimizer's state is copied while the next step computes, and never after it has changed."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon.dist as dist
from echelon.dist import resilient
from echelon.dist.fsdp import fully_shard
from echelon.dist.resilient.copies.copying import NAME, Copying
from echelon.dist.resilient.copies.shards import ShardsReader, ShardsWriter
from echelon.dist.resilient.sharded import ShardedState
from echelon.errors import CollectiveError
from tests.dist.resilient.agent import run_watched
from tests.dist.resilient.training import train
from tests.support.ranks import run_ranks

_LIMIT_S = 30.0


class _Gate:
    """Holds every thread that copies until the test lets it pass."""

    def __init__(self, monkeypatch):
        self.opens = threading.Event()
        self.is_reached = threading.Event()
        real = ShardsWriter.write_rest

        def write_rest(writer, content, crc):
            self.is_reached.set()
            assert self.opens.wait(_LIMIT_S), "no one waited for the copy"
            return real(writer, content, crc)

        monkeypatch.setattr(ShardsWriter, "write_rest", write_rest)

    def open_once_awaited(self, monkeypatch, name):
        """Let the copy begin only when this rank waits for it."""
        real = getattr(Copying, name)

        def wait(copying, *args):
            self.opens.set()
            return real(copying, *args)

        monkeypatch.setattr(Copying, name, wait)


@pytest.fixture
def gate(monkeypatch):
    gate = _Gate(monkeypatch)
    gate.opens.set()
    yield gate
    gate.opens.set()


@pytest.fixture
def made(gate):
    """A model, its optimizer after a step, and its state, of which step 4 has been copied."""
    dist.init()
    try:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        _step(model, optimizer)
        state = ShardedState(model, optimizer)
        state.enter(dist.world(), 0)
        state.keep(4)
        yield model, optimizer, state
        gate.opens.set()
        state.drop()
    finally:
        dist.shutdown()


def _step(model, optimizer):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _averages(optimizer):
    return [values["exp_avg"].clone() for values in optimizer.state.values()]


def _copied(state):
    """Return the parameters' averages in the newest copy of a rank."""
    runs = ShardsReader(state._worlds[-1].newest_own()).runs()
    return [data.clone() for run, data in runs if run.key == "exp_avg"]


def _steps(state):
    return sorted(step for _, step, _ in state.offers([0])["offers"])


def _equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(one.flatten(), other.flatten()) for one, other in zip(some, others, strict=True)
    )


def test_the_optimizer_waits_until_its_state_has_been_copied(made, gate, monkeypatch):
    model, optimizer, state = made
    before = _averages(optimizer)
    gate.opens.clear()
    state.keep(5, overlaps=True)
    assert gate.is_reached.wait(_LIMIT_S)
    gate.open_once_awaited(monkeypatch, "wait_until_copied")
    assert _steps(state) == [4], "the copy has no stamp yet"
    _step(model, optimizer)
    assert not _equal(_averages(optimizer), before)
    assert state.finish() == 5
    assert _steps(state) == [4, 5]
    assert _equal(_copied(state), before)


def test_parameters_may_be_changed_as_soon_as_the_next_step_begins(made, gate):
    """A program may change them in any way, such as through `.data`, which leaves no trace."""
    model, _, state = made
    before = model.weight.detach().clone()
    gate.opens.clear()
    state.keep(5, overlaps=True)
    model.weight.data.zero_()
    gate.opens.set()
    assert state.finish() == 5
    state.restore()
    assert torch.equal(model.weight, before)


def test_a_step_without_an_optimizer_ends_with_a_complete_copy(made, gate, monkeypatch):
    _, _, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    gate.open_once_awaited(monkeypatch, "wait_until_copied")
    assert state.finish() == 5
    assert _steps(state) == [4, 5]
    assert state.finish() == 5, "nothing is left to wait for"


def test_a_copy_of_what_the_step_has_changed_is_not_used(made, gate):
    """The older copy stays until there is another; from then on, nothing is copied meanwhile."""
    model, optimizer, state = made
    before = _averages(optimizer)
    gate.opens.clear()
    state.keep(5, overlaps=True)
    next(iter(optimizer.state.values()))["exp_avg"].mul_(0.5)
    gate.opens.set()
    state._copying.wait_until_copied(_LIMIT_S)
    assert _steps(state) == [4], "it does not wait for the optimizer to notice"
    with pytest.warns(RuntimeWarning, match=r"'weight' exp_avg before optimizer\.step"):
        _step(model, optimizer)
    assert state.finish() == 4
    assert _steps(state) == [4]
    state.discard_newest()
    assert _equal(_copied(state), before)
    after = _averages(optimizer)
    gate.opens.set()
    state.keep(6, overlaps=True)
    assert not _threads()
    next(iter(optimizer.state.values()))["exp_avg"].zero_()
    assert _steps(state) == [4, 6]
    assert _equal(_copied(state), after)
    assert state.finish() == 6


def test_a_change_after_the_copy_does_not_leave_a_stamp_either(made):
    """Whether the change or the copy came first is a race, which must not decide."""
    model, optimizer, state = made
    state.keep(5, overlaps=True)
    state._copying.wait_until_copied(_LIMIT_S)
    next(iter(optimizer.state.values()))["exp_avg"].mul_(0.5)
    with pytest.warns(RuntimeWarning, match="exp_avg"):
        _step(model, optimizer)
    assert state.finish() == 4
    assert _steps(state) == [4]


def test_state_that_shares_memory_with_a_gradient_is_copied_at_once(made, gate):
    """A backward pass may write to it without a trace."""
    model, optimizer, state = made
    model(torch.ones(1, 3)).sum().backward()
    kept = model.weight.grad.detach()
    optimizer.state[model.weight]["exp_avg"] = kept
    before = kept.clone()
    gate.opens.clear()
    state.keep(5, overlaps=True)
    kept.data.zero_()
    gate.opens.set()
    assert state.finish() == 5
    assert _equal(_copied(state)[:1], [before])


def test_an_error_in_the_thread_is_raised_at_the_end_of_the_step(made, monkeypatch):
    model, optimizer, state = made

    def fail(*_):
        raise OSError("no memory left")

    monkeypatch.setattr(ShardsWriter, "write_rest", fail)
    state.keep(5, overlaps=True)
    _step(model, optimizer)
    with pytest.raises(OSError, match="no memory left"):
        state.finish()
    assert _steps(state) == [4]


def test_a_wait_for_a_copy_has_a_deadline(made, gate):
    _, _, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    with pytest.raises(CollectiveError, match=r"the copy of step 5 .* not complete after 0\.01 s"):
        state.stop(0.01)
    assert _steps(state) == [4]


def test_after_a_loss_a_copy_that_was_complete_is_offered(made, gate):
    _, _, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    gate.opens.set()
    state.stop(_LIMIT_S)
    assert _steps(state) == [4, 5]
    assert not _threads()


def test_an_optimizer_is_left_as_it_was(made):
    _, optimizer, state = made
    state.keep(5, overlaps=True)
    assert optimizer._optimizer_step_pre_hooks
    state.drop()
    assert not optimizer._optimizer_step_pre_hooks
    assert not _threads()


def test_a_forked_child_neither_waits_for_the_copy_nor_keeps_its_memory(made, gate):
    """A loader's worker is often forked at the beginning of a step."""
    _, optimizer, state = made
    gate.opens.clear()
    state.keep(5, overlaps=True)
    assert gate.is_reached.wait(_LIMIT_S)
    inodes = {os.fstat(one._fd).st_ino for one in state._worlds[-1]._own.memories}
    child = os.fork()
    if child == 0:
        signal.alarm(int(_LIMIT_S))
        optimizer.step()
        os._exit(_num_mapped(inodes))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert _num_mapped(inodes) > 0
    gate.opens.set()
    assert state.finish() == 5


def _num_mapped(inodes):
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(int(line.split()[4]) in inodes for line in maps)


def _threads():
    return [one for one in threading.enumerate() if one.name == NAME]


# ---- ranks ----

_TOTAL = 10


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of a replicated run on one rank."""
    ((found, _, _),) = run_ranks(train, 1, tmp_path_factory.mktemp("whole"), _TOTAL, [])
    return found


def _survive(tmp_path, world_size, kills, layout):
    codes = {rank: -signal.SIGKILL for rank, _, _ in kills}
    ends, agent = run_watched(train, world_size, tmp_path, _TOTAL, kills, layout, exit_codes=codes)
    assert len(ends) == world_size - len(codes)
    for _, worlds, commits in ends:
        assert worlds[-1][1] == tuple(sorted(codes))
        assert [step for step, _ in commits] == list(range(_TOTAL))
    return ends, agent


@pytest.mark.ranks
def test_a_rank_may_die_in_a_step_whose_start_it_has_not_copied(tmp_path, undisturbed):
    """The step before is repeated as well, because its start is the newest complete copy."""
    ends, agent = _survive(tmp_path, 4, [(2, "forward", 4)], "sharded, slowly copied")
    assert [end[0] for end in ends] == [undisturbed] * 3
    (loss,) = agent.report.continuations
    assert (loss["step"], loss["repeated"], loss["steps_lost"]) == (3, True, 1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kills", "resumed"),
    [
        ([(0, "before the optimizer", 3), (1, "after the optimizer", 4)], [2, 4]),
        ([(1, "in a copy", 3)], [2]),
    ],
    ids=["before and after", "before the next copy is complete"],
)
def test_ranks_may_die_around_a_step_that_changes_the_optimizers_state_early(
    tmp_path, kills, resumed
):
    """Its copy is void, so all ranks keep the one before until the next one is complete."""
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    alone.mkdir()
    whole.mkdir()
    ((undisturbed, _, _),) = run_ranks(train, 1, alone, _TOTAL, [], ", halved")
    ends, agent = _survive(whole, 4, kills, "sharded, halved")
    assert [end[0] for end in ends] == [undisturbed] * (4 - len(kills))
    assert [one["step"] for one in agent.report.continuations] == resumed


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kills",
    [
        [(2, "before the optimizer", 3)],
        [(1, "discarding", 4)],
        [(3, "after the optimizer", 5)],
        [(3, "after the optimizer", 5), (0, "restoring shards", 5)],
    ],
    ids=["the first", "the second", "the third", "the third, and then another"],
)
def test_ranks_may_die_while_several_ranks_void_copies_in_successive_steps(
    tmp_path, undisturbed, kills
):
    """The start of step 2 remains the newest of which all copies are complete."""
    ends, agent = _survive(tmp_path, 4, kills, "sharded, touched")
    assert [end[0] for end in ends] == [undisturbed] * (4 - len(kills))
    assert {one["step"] for one in agent.report.continuations} == {2}


def _leave(rank, world_size):
    dist.init("shm", timeout_s=60)
    model = fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def train_step(step):
        seen.append(bool(optimizer._optimizer_step_pre_hooks))
        if step == 3:
            raise KeyError(step)
        _step_of_eight(model, optimizer)

    with pytest.raises(KeyError):
        resilient.run(lambda _: train_step, model, optimizer, total=5)
    found = seen, len(_threads()), len(optimizer._optimizer_step_pre_hooks)
    dist.shutdown()
    return found


def _step_of_eight(model, optimizer):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks
def test_a_step_that_fails_leaves_neither_a_thread_nor_a_hook():
    found = run_ranks(_leave, 2, environ={"ECHELON_ON_LOSS": "shrink"})
    assert found == [([False, True, True, True], 0, 0)] * 2
