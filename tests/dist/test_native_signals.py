"""Signal handlers that run inside a waiting call of the C core, and forks of its process."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from echelon.dist.backends.shm.faults import Fault
from echelon.store import StoreServer
from tests.dist.native_ranks import Ranks, Thread, all_reduce, barrier, recv, send, wait_until

FOREVER_S = 600.0


@pytest.fixture
def ranks():
    group = Ranks(2)
    yield group
    group.close()


def _once_asleep(engine, number: int) -> threading.Thread:
    """Send this process a signal once its main thread, which is to call `run`, sleeps in there."""
    main = threading.main_thread().ident
    before = engine.statistics()["sleeps"]

    def is_asleep() -> bool:  # an engine's own thread sleeps too
        frame = sys._current_frames()[main]
        is_inside = ".run(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        return is_inside and engine.statistics()["sleeps"] > before

    def send_it() -> None:
        wait_until(is_asleep)
        time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send_it)
    thread.start()
    return thread


@pytest.fixture
def on_signal(ranks):
    """Install a handler and deliver its signal once, while the main thread waits on rank 0."""
    kept = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)]
    runs: list[float] = []
    senders: list[threading.Thread] = []

    def install(handler) -> list[float]:
        def noted(*_: object) -> None:
            runs.append(time.monotonic())
            handler()

        signal.signal(signal.SIGUSR1, noted)
        senders.append(_once_asleep(ranks[0], signal.SIGUSR1))
        return runs

    yield install
    for sender in senders:
        sender.join()
    for number, handler in zip((signal.SIGUSR1, signal.SIGUSR2), kept, strict=True):
        signal.signal(number, handler)


def test_a_handler_aborts_the_operation_it_interrupts(ranks, on_signal):
    runs = on_signal(ranks[0].abort)
    fault = ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, FOREVER_S))
    assert runs
    assert fault[0] == Fault.ABORTED
    assert fault[1] == [0]


def test_a_handler_closes_the_engine_and_exits(ranks, on_signal):
    def leave() -> None:
        ranks[0].close()
        sys.exit(3)

    on_signal(leave)
    with pytest.raises(SystemExit):
        ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, FOREVER_S))
    with pytest.raises(ValueError, match="closed"):
        ranks[0].run(*barrier(1))
    assert ranks[1].run(*all_reduce(np.ones(3, np.float32), 0)) is None, "rank 0 had given its part"
    assert ranks[1].run(*barrier(1, FOREVER_S))[:2] == (Fault.PEER_LOST, [0])
    ranks.close()
    ranks.memory.close()  # nothing holds it any more


def test_a_handler_closes_the_engine_and_returns(ranks, on_signal):
    on_signal(ranks[0].close)
    fault = ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, FOREVER_S))
    assert fault[0] == Fault.LEFT
    ranks.close()
    ranks.memory.close()


def test_a_collective_of_a_handler_follows_the_one_it_interrupts(ranks, on_signal):
    x, y = np.ones(1000, np.float32), np.ones(2, np.float32)
    order = []

    def sum_more() -> None:
        assert ranks[0].run(*all_reduce(y, 1)) is None
        order.append((x[0], y[0]))

    runs = on_signal(sum_more)

    def come_late() -> None:
        wait_until(lambda: bool(runs))
        for sequence, size in enumerate((1000, 2)):
            assert ranks[1].run(*all_reduce(np.full(size, 2, np.float32), sequence)) is None

    ranks[1]
    peer = Thread(come_late)
    assert ranks[0].run(*all_reduce(x, 0)) is None
    peer.join()
    assert order == [(3, 3)], "both had ended when the inner call returned"


def test_a_collective_of_a_handler_times_out_with_the_one_it_interrupts(ranks, on_signal):
    inner = []
    on_signal(lambda: inner.append(ranks[0].run(*barrier(1, FOREVER_S))))
    fault = ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, 1.0))
    assert fault[:2] == (Fault.TIMED_OUT, [1])
    assert inner[0] == fault


def test_a_message_of_a_handler_passes_the_receive_it_interrupts(ranks, on_signal):
    got, reply = np.zeros(2, np.float32), np.zeros(1, np.float32)

    def call_back() -> None:
        assert ranks[0].run(*send(np.full(1, 5, np.float32), 1, tag=1)) is None

    def answer() -> None:
        assert ranks[1].run(*recv(reply, 0, tag=1)) is None
        assert ranks[1].run(*send(np.full(2, 7, np.float32), 0, tag=2)) is None

    ranks[1]
    on_signal(call_back)
    peer = Thread(answer)
    assert ranks[0].run(*recv(got, 1, tag=2)) is None
    peer.join()
    assert (reply[0], got[1]) == (5, 7)


def test_another_thread_may_abort_while_a_handler_waits_for_it(ranks, on_signal):
    def hand_over() -> None:
        Thread(ranks[0].abort).join()

    on_signal(hand_over)
    fault = ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, FOREVER_S))
    assert fault[0] == Fault.ABORTED


def test_another_thread_may_close_while_a_handler_waits_for_it(ranks, on_signal):
    def hand_over() -> None:
        begun = time.monotonic()
        Thread(ranks[0].close).join()
        assert time.monotonic() - begun < 20, "close() waits a second for other calls, not for ever"

    on_signal(hand_over)
    fault = ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, FOREVER_S))
    assert fault[0] == Fault.LEFT
    ranks.close()
    ranks.memory.close()


def test_asynchronous_operations_advance_while_a_handler_computes(ranks, on_signal):
    got = np.zeros(1, np.float32)
    posted = threading.Event()

    def compute() -> None:
        ticket = ranks[0].start(*recv(got, 1, tag=1))
        posted.set()
        wait_until(lambda: ticket.done)  # no call drives the engine here

    def be_peer() -> None:
        assert posted.wait(60)
        assert ranks[1].run(*send(np.full(1, 4, np.float32), 0, tag=1)) is None
        assert ranks[1].run(*barrier(0)) is None

    ranks[1]
    on_signal(compute)
    peer = Thread(be_peer)
    assert ranks[0].run(*barrier(0)) is None
    peer.join()
    assert got[0] == 4


def test_an_exception_of_a_nested_handler_ends_both_calls(ranks, on_signal):
    """The inner operation lies on the inner call's stack: it must be over when that returns."""

    def nest() -> None:
        signal.signal(signal.SIGUSR2, interrupt)
        _once_asleep(ranks[0], signal.SIGUSR2)
        ranks[0].run(*all_reduce(np.ones(70_000, np.float32), 1, FOREVER_S))

    def interrupt(*_: object) -> None:
        raise KeyError("from the inner handler")

    on_signal(nest)
    with pytest.raises(KeyError, match="inner handler"):
        ranks[0].run(*all_reduce(np.ones(3, np.float32), 0, FOREVER_S))
    assert ranks[0].run(*barrier(2))[0] == Fault.ABORTED


def test_a_child_forked_by_a_handler_cannot_touch_the_operation(ranks, on_signal):
    """It returns from the handler into a call that is its parent's."""
    parent, status = os.getpid(), []

    def fork() -> None:
        child = os.fork()
        if child:
            status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    ranks[1]
    ticket = ranks[0].start(*recv(np.zeros(1, np.float32), 1, tag=1))  # starts its thread
    on_signal(fork)
    peer = Thread(lambda: wait_until(lambda: bool(status)) or ranks[1].run(*barrier(0)))
    try:
        fault = ranks[0].run(*barrier(0))
    except RuntimeError as err:
        assert os.getpid() != parent
        code = 0 if "forked child" in str(err) else 1
        for call in (ranks[0].close, ranks[1].close):
            call()  # neither waits nor writes
        os._exit(code)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    peer.join()
    assert fault is None
    assert status == [0]
    assert not ticket.done


def test_a_forked_child_leaves_its_parents_group_alone(ranks):
    tickets = [ranks[rank].start(*barrier(0)) for rank in (0, 1)]
    assert all(ticket.wait(60.0) for ticket in tickets)
    pending = ranks[0].start(*barrier(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for rank in (0, 1):
                with pytest.raises(ValueError, match="parent"):
                    ranks[rank].run(*barrier(1))
                ranks[rank].abort()
                ranks[rank].close()
            with pytest.raises(ValueError, match="closed"):
                pending.wait(1.0)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ranks[1].run(*barrier(1)) is None
    assert pending.wait(60.0)
    assert pending.fault is None


_SCRIPT = """
import os, sys, numpy as np
import echelon.dist as dist
world = dist.init("shm", timeout_s=60)
world.all_reduce(np.ones(4), async_op=True).wait()
if world.rank == 0:
    child = os.fork()
    if child == 0:
        sys.exit(0)  # through the interpreter's whole shutdown
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for _ in range(3):
    x = np.ones(1000)
    world.all_reduce(x)
    assert (x == 2).all()
dist.shutdown()
"""


@pytest.mark.ranks
def test_a_forked_child_that_exits_ends_neither_its_parents_group_nor_hangs():
    server = StoreServer("127.0.0.1", 0)
    server.start()
    try:
        common = os.environ | {
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ECHELON_SHM": "native",
        }  # fmt: skip
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _SCRIPT],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in (0, 1)
        ]
        errors = [process.communicate(timeout=300)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
    finally:
        for process in processes:
            process.kill()
        server.close()
