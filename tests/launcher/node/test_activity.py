"""The activity of a worker without a ring, as its host sees it: processor time, output, bytes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from echelon.launcher.node import activity
from echelon.launcher.node.activity import Activity
from echelon.recorder.format.schema import HostThread, Socket

S = 1_000_000_000


@pytest.fixture
def seen(monkeypatch):
    """Numbers that the kernel would show."""
    shown = {"ticks": 0, "sockets": [], "threads": [], "wakes": {}, "waited_ns": 0}
    monkeypatch.setattr(activity, "_TICKS_PER_S", 100)
    monkeypatch.setattr(activity, "_cpu_ticks", lambda _pid: shown["ticks"])
    monkeypatch.setattr(activity, "_waited_ns", lambda _pid: shown["waited_ns"])
    monkeypatch.setattr(activity, "descendants", lambda _pid: [])
    monkeypatch.setattr(activity, "sockets", lambda _pid, _denied: shown["sockets"])
    monkeypatch.setattr(activity, "threads", lambda _pid, _denied: shown["threads"])
    monkeypatch.setattr(activity, "_gloo_wakes", lambda _pid: dict(shown["wakes"]))
    return shown


def _socket(peer: str, num_bytes: int) -> Socket:
    return Socket(state="ESTABLISHED", peer=peer, sent_bytes=num_bytes, received_bytes=0)


def test_processor_time_counts_unless_it_is_a_clocks(seen):
    worker = Activity(1, 29500, 5.0, 0)
    for second in range(1, 61):
        seen["ticks"] = second  # 1 %: threads that look whether it is time
        worker.look(0, second * S)
    assert (worker.num_signs, worker.last_mono_ns) == (0, 0)
    seen["ticks"] += 150
    worker.look(0, 61 * S)
    assert (worker.num_signs, worker.last_mono_ns) == (1, 61 * S)


def test_output_counts(seen):
    worker = Activity(1, 29500, 5.0, 0)
    worker.look(10, 1 * S)
    worker.look(10, 2 * S)
    assert (worker.num_signs, worker.last_mono_ns) == (1, 1 * S)


def test_bytes_count_but_not_the_stores(seen):
    worker = Activity(1, 29500, 5.0, 0)
    for second, carried in enumerate([100, 100, 200, 200], start=6):
        seen["sockets"] = [_socket("10.0.0.1:29500", second), _socket("10.0.0.2:4000", carried)]
        worker.look(0, second * S)
    assert worker.has_met
    assert (worker.num_signs, worker.last_mono_ns) == (1, 8 * S)


def test_doing_nothing_inside_a_collective_is_an_operation_pending(seen):
    worker = Activity(1, 29500, 5.0, 0)
    seen["threads"] = [HostThread(name="pt_gloo_runloop", call="futex", timed=True)]
    worker.look(0, 4 * S)
    assert not worker.is_in_collective, "it may be a short one"
    worker.look(0, 5 * S)
    assert (worker.is_in_collective, worker.last_mono_ns) == (True, 0)
    seen["ticks"] = 500
    worker.look(0, 6 * S)
    assert not worker.is_in_collective


def test_a_gloo_thread_that_waits_for_the_interpreters_lock_is_not_in_a_collective(seen):
    """It waits with a timeout too, of 5 ms at a time, where another thread holds the lock."""
    worker = Activity(1, 29500, 5.0, 0)
    one = HostThread(name="pt_gloo_runloop", call="futex", timed=True)
    seen["threads"] = [one]
    for second in range(5, 9):
        seen["wakes"] = {71: 200 * second}
        worker.look(0, second * S)
    assert not worker.is_in_collective
    seen["threads"], seen["wakes"] = [one, one], {71: 200 * 9, 72: 3}
    worker.look(0, 9 * S)
    assert worker.is_in_collective, "the other one waits for peers"


@pytest.mark.ranks
def test_the_wakes_of_gloo_threads_are_counted_by_thread():
    program = (
        "import sys, threading\n"
        "def wait():\n"
        " open(f'/proc/self/task/{threading.get_native_id()}/comm', 'w').write('pt_gloo_runloop')\n"
        " print(threading.get_native_id(), flush=True)\n"
        " sys.stdin.read()\n"
        "threading.Thread(target=wait).start()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        thread = int(worker.stdout.readline())
        assert activity._gloo_wakes(worker.pid).keys() == {thread}
        worker.stdin.close()
    assert worker.returncode == 0
    assert activity._gloo_wakes(worker.pid) == {}


def test_what_we_asked_for_is_no_sign_of_life(seen):
    worker = Activity(1, 29500, 5.0, 0)
    seen["ticks"] = 500  # a dump took them
    worker.rest(20, 9 * S)
    worker.look(20, 10 * S)
    assert worker.num_signs == 0


def test_a_worker_that_gets_no_processor_is_not_idle(seen):
    worker = Activity(1, 29500, 5.0, 0)
    for second in range(1, 61):
        seen["ticks"] = second  # 1 % of a core: its compiler gets no more
        seen["waited_ns"] = second * S * 9 // 10
        worker.look(0, second * S)
    assert worker.last_mono_ns == 60 * S


def test_short_waits_for_a_processor_are_those_of_a_thread_that_polls(seen):
    worker = Activity(1, 29500, 5.0, 0)
    for second in range(1, 61):
        seen["waited_ns"] = second * S // 20
        worker.look(0, second * S)
    assert worker.num_signs == 0


def test_waiting_for_a_processor_excuses_for_a_limited_time_only(seen):
    worker = Activity(1, 29500, 5.0, 0)
    for second in range(1, 2001):
        seen["waited_ns"] = second * S
        worker.look(0, second * S)
    assert 0 < worker.last_mono_ns < 1000 * S
    seen["ticks"] = 10_000
    worker.look(0, 2001 * S)
    assert worker.last_mono_ns == 2001 * S
    seen["waited_ns"] += S
    worker.look(0, 2002 * S)
    assert worker.last_mono_ns == 2002 * S


def test_the_kernel_tells_how_long_a_process_waited_for_a_processor():
    assert activity._waited_ns(os.getpid()) > 0
    assert activity._waited_ns(1 << 30) == 0  # there is no such process


@pytest.mark.ranks
def test_what_a_worker_has_started_counts_too():
    argv = ["sh", "-c", f"{sys.executable} -c 'while True: pass'; true"]
    with subprocess.Popen(argv, start_new_session=True) as worker:
        try:
            watched = Activity(worker.pid, 29500, 5.0, 0)
            for look in range(1, 1000):
                watched.look(0, look * S // 50)
                if watched.num_signs:
                    break
                select.select([], [], [], 0.02)
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
    assert watched.num_signs
