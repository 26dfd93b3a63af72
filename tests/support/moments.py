"""Time and moments for tests on a busy machine, where a process may stand still for seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_TICK_S = 0.01
_PATIENCE_S = 60.0


class _Ticks(threading.Thread):
    """Counts the short sleeps that it finds the time for."""

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
    """Return the seconds since the first call for which this process could run.

    A process that is stopped, or gets no processor, lives through one tick at most. So a bound on
    the difference of two calls shows a wait that should not be there wherever the machine is idle,
    and holds on a machine that is not.
    """
    if not _ticks:
        _ticks.append(_Ticks())
        _ticks[0].start()
    return _ticks[0].count * _TICK_S


def once_inside(name: str, act: Callable[[], object], after_s: float = 0.2) -> threading.Thread:
    """Call `act` in a thread of its own, once the main thread is inside a function of that name.

    Args:
        name: of a function that the main thread is about to call.
        act: what is called.
        after_s: how long after the main thread was seen in there; it sleeps by then.
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
