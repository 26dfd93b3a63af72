"""The one state under every engine: the first end wins, and no engine is released in use."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from echelon.dist.backends.interface import Members
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import mismatch_error
from echelon.dist.operation.operation import Operation, encode_call
from echelon.dist.progress import group_state
from echelon.dist.progress.group_state import GroupState
from echelon.errors import CollectiveError, CollectiveTimeoutError
from echelon.recorder.write.recorder import NOT_RECORDED

MEMBERS = Members(name="world", rank=0, ranks=(0, 1, 2))
CALL = encode_call("all_reduce", "sum", "float32", -1, (3,))
SUM = Operation("all_reduce", 0, timeout_s=60.0, call=CALL)


class Engine:
    name, device, nests = "fake", "cpu", False

    def __init__(self, act=lambda: None):
        self.act = act
        self.log = []

    def prepare(self, operation):
        pass

    def execute(self, operation, watch):
        self.log.append("in")
        self.act()
        self.log.append("out")
        watch.check()

    def cut(self, reason):
        self.log.append("cut")

    def close(self):
        self.log.append("close")


def test_the_first_end_wins_and_cuts_the_engine_once():
    engine = Engine()
    state = GroupState(MEMBERS, engine)
    first = CollectiveTimeoutError("late", operation="all_reduce", sequence=3, ranks=[2])
    assert state.fail(first) is first
    assert state.fail(CollectiveError("another")) is first
    state.abort()
    state.close()
    assert engine.log == ["cut", "close"]
    error = state.end_of(SUM)
    assert isinstance(error, CollectiveTimeoutError)
    assert error.ranks == (2,)
    assert "broken since all_reduce #3" in str(error)
    assert "the first error was: late" in str(error)


def test_a_rank_that_enters_a_broken_collective_late_gets_its_own_story():
    state = GroupState(MEMBERS, Engine())
    first = CollectiveError("rank 1 failed: out", operation="all_reduce", sequence=0, ranks=[1])
    state.fail(first)
    with pytest.raises(CollectiveError, match="rank 1 failed: out") as caught:
        state.check_end(SUM)
    assert caught.value is first


class Waiting(Engine):
    """Its operations end when they are released, or with what the watch raises."""

    def __init__(self):
        super().__init__()
        self.begun, self.released = threading.Event(), threading.Event()

    def execute(self, operation, watch):
        self.log.append("in")
        self.begun.set()
        while not self.released.wait(0.01):
            watch.check()
        self.log.append("out")


def _verdict(number: int) -> CollectiveError:
    return CollectiveError("rank 1 failed", operation="all_reduce", sequence=number, ranks=[1])


@pytest.fixture
def running():
    """Yield a group in whose collective #0 a thread is, its engine, and how that ended."""
    engine = Waiting()
    state = GroupState(MEMBERS, engine)
    state.admit(SUM)
    ends = []

    def run():
        try:
            state.run(SUM)
            ends.append(None)
        except CollectiveError as err:
            ends.append(err)

    thread = threading.Thread(target=run)
    thread.start()
    assert engine.begun.wait(20)

    def end():
        thread.join(20)
        return ends[0]

    yield state, engine, end
    engine.released.set()
    thread.join(20)
    state.close()


def test_a_collective_may_end_though_another_rank_has_failed_in_a_later_one(running, monkeypatch):
    monkeypatch.setattr(group_state, "_GRACE_S", 60.0)
    state, engine, end = running
    state.hear(_verdict(1))
    engine.released.set()
    assert end() is None
    deadline = time.monotonic() + 20
    while engine.log != ["in", "out", "cut"] and time.monotonic() < deadline:
        time.sleep(0.001)
    assert engine.log == ["in", "out", "cut"]
    with pytest.raises(CollectiveError, match="the first error was: rank 1 failed") as caught:
        state.admit(Operation("all_reduce", 2, timeout_s=60.0, call=CALL))
    assert caught.value.ranks == (1,)


def test_a_collective_that_does_not_end_within_the_grace_ends_with_the_later_verdict(
    running, monkeypatch
):
    monkeypatch.setattr(group_state, "_GRACE_S", 0.05)
    state, _, end = running
    state.hear(_verdict(1))
    assert end().ranks == (1,)


def test_a_verdict_about_the_same_collective_ends_it_at_once(running, monkeypatch):
    monkeypatch.setattr(group_state, "_GRACE_S", 60.0)
    state, engine, end = running
    state.hear(_verdict(0))
    assert "cut" in engine.log
    assert end().ranks == (1,)


class _OnDevice:
    """An operation that a device has done; the device knows when it began."""

    done, error, started_mono_ns, ended_mono_ns = True, None, 70, 90


class _Recorder:
    def __init__(self):
        self.log = []

    def started(self, *what):
        self.log.append(("started", *what))

    def completed(self, *what):
        self.log.append(("completed", *what))


def test_the_start_on_a_device_is_recorded_with_its_own_time(monkeypatch):
    recorder = _Recorder()
    monkeypatch.setattr("echelon.recorder.current.current", lambda: recorder)
    engine = Engine()
    engine.submit = lambda *_: _OnDevice()
    state = GroupState(MEMBERS, engine)
    state.admit(SUM)
    state.settle(state.launch(SUM, 5))
    assert recorder.log == [("started", 5, 70), ("completed", 5, 90)]
    state.close()


def test_an_operation_that_ends_while_its_lateness_is_looked_into_has_not_failed():
    """The thread that checks deadlines may have stood still between its look and its check."""
    operation = Operation("all_reduce", 0, device="cuda", timeout_s=0.0, call=CALL)
    pending = SimpleNamespace(done=False, error=None, started_mono_ns=0, ended_mono_ns=90)
    engine = Engine()
    engine.submit = lambda *_: pending
    state = GroupState(MEMBERS, engine)

    def end_meanwhile(operation, *_):
        pending.done = True
        return build.timed_out(MEMBERS, operation, [])

    state.evidence.find = end_meanwhile
    work = state.launch(operation, NOT_RECORDED)
    state.tick()
    assert (state.error, work.error) == (None, None)
    state.close()


def test_an_engine_is_released_by_the_call_that_closing_interrupts():
    engine = Engine(lambda: state.close())
    state = GroupState(MEMBERS, engine)
    state.admit(SUM)
    with pytest.raises(CollectiveError, match="closed on rank 0"):
        state.run(SUM)
    assert engine.log == ["in", "cut", "out", "close"]


def test_a_librarys_own_error_names_this_rank_and_keeps_its_text():
    def fail():
        raise RuntimeError("ncclUnhandledCudaError: out of memory")

    state = GroupState(MEMBERS, Engine(fail))
    with pytest.raises(CollectiveError, match="rank 0 failed: RuntimeError: ncclUnh") as caught:
        state.run(SUM)
    assert caught.value.ranks == (0,)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_ranks_that_are_one_call_apart_are_named_with_their_numbers():
    heads = [number.to_bytes(8, "little") + CALL for number in (4, 5, 5)]
    error = mismatch_error(MEMBERS, SUM, heads)
    assert error.ranks == (0,)
    assert "rank 0 called all_reduce(sum) float32[3] as #4" in str(error)
    assert "the others all_reduce(sum) float32[3] as #5" in str(error)
