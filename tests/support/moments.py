"""Measure time and time actions on a busy machine, where a process may be paused for seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_TICK_S = 0.01
_PATIENCE_S = 60.0


class _Ticks(threading.Thread):
    """A thread that counts its own short sleeps."""

    def __init__(self) -> None:
        super().__init__(name="ticks", daemon=True)
        self.count = 0

    def run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_TICK_S)
            self.count += 1


_ticks: list[_Ticks] = []


def lived_s() -> float:
    """Return how long this process has been able to run since the first call, in seconds.

    A pause, in which the process is stopped or not scheduled, counts as at most one tick. An upper
    bound on the difference between two calls therefore detects an unwanted wait on an idle machine,
    and does not fail on a busy machine.
    """
    if not _ticks:
        _ticks.append(_Ticks())
        _ticks[0].start()
    return _ticks[0].count * _TICK_S


def once_inside(name: str, act: Callable[[], object], after_s: float = 0.2) -> threading.Thread:
    """Call `act` in a new thread, once the main thread is inside the function called `name`.

    Args:
        name: the name of a function that the main thread is about to call.
        act: the function to call.
        after_s: how long to wait after the main thread has entered the function, so that it blocks.
    """
    main = threading.main_thread().ident
    assert main is not None

    def is_inside() -> bool:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_name != name:
            frame = frame.f_back
        return frame is not None

    def run() -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not is_inside():
            if time.monotonic() > deadline_s:
                return  # the test finds that nothing happened
            time.sleep(0.005)
        time.sleep(after_s)
        act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
