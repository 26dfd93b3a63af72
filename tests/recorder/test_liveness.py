"""Stopped, holding the GIL, waiting and running are told apart from outside."""

from __future__ import annotations

import signal
import time

import pytest

from echelon.recorder import signals
from echelon.recorder.liveness import STALE_S, Liveness, liveness
from echelon.recorder.read import LiveRing
from echelon.recorder.schema import Live
from tests.recorder.conftest import wait_until

S = 1_000_000_000


@pytest.mark.parametrize(
    ("state", "age_s", "facts", "answer"),
    [
        ("", 0, {}, Liveness.GONE),
        ("Z", 0, {}, Liveness.GONE),
        ("T", 0, {}, Liveness.STOPPED),
        ("t", 100, {}, Liveness.STOPPED),
        ("S", 100, {"frozen": True}, Liveness.STOPPED),
        ("S", 100, {"cpu_share": 0.0, "frozen": False}, Liveness.GIL_HELD),
        ("R", 100, {"cpu_share": 1.0}, Liveness.GIL_HELD),
        ("D", 100, {}, Liveness.GIL_HELD),
        ("R", STALE_S - 0.1, {"cpu_share": 1.0}, Liveness.RUNNING),
        ("R", 0.2, {"cpu_share": 0.1}, Liveness.RUNNING),
        ("S", 0.2, {"cpu_share": 0.9}, Liveness.RUNNING),
        ("S", 0.2, {"cpu_share": 0.01}, Liveness.WAITING),
        ("S", 0.2, {}, Liveness.WAITING),
        ("S", None, {}, Liveness.UNKNOWN),
    ],
)
def test_a_judgement(state, age_s, facts, answer):
    now = 1000 * S
    beat = 0 if age_s is None else now - int(age_s * S)
    assert liveness(state, beat, now, **facts) is answer


START = """
import ctypes
from echelon.recorder import step
step()
print("ready", flush=True)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("does", "answer"),
    [
        ("input()", Liveness.WAITING),
        ("while True: pass", Liveness.RUNNING),
        ("ctypes.PyDLL(None).sleep(600)", Liveness.GIL_HELD),  # PyDLL keeps the lock
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", Liveness.STOPPED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Liveness.GONE),
    ],
    ids=lambda value: value.name if isinstance(value, Liveness) else "",
)
def test_a_process_that_does_it_is_seen_so(program, does, answer):
    one = program(START + does)
    one.wait_for("ready")
    live = LiveRing(one.ring)
    looks = [(signals.sample(one.process.pid), time.monotonic())]

    def judged() -> Liveness:
        one.process.poll()
        looks.append((signals.sample(one.process.pid), time.monotonic()))
        (before, since_s), (after, now_s) = looks[max(-50, -len(looks))], looks[-1]
        share = signals.cpu_share(before, after, now_s - since_s)
        beat = live.words()[Live.HEARTBEAT_MONO_NS]
        return liveness(after.state, beat, time.monotonic_ns(), cpu_share=share)

    try:
        wait_until(lambda: judged() is answer, str(answer), timeout_s=60)
    finally:
        live.close()
        if answer is Liveness.STOPPED:
            one.process.send_signal(signal.SIGCONT)
