"""Distinguish exceptions raised by signal handlers from exceptions raised by libraries."""

from __future__ import annotations

import signal
import threading
from types import CodeType


def is_from_handler(raised: BaseException) -> bool:
    """Return whether a Python signal handler raised this exception.

    Such an exception has the handler's frame in its traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = _handler_codes()
    trace = raised.__traceback__
    while trace is not None and handlers:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handler_codes() -> set[CodeType]:
    codes = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        function = getattr(handler, "__func__", handler)
        if not hasattr(function, "__code__"):
            function = vars(type(handler)).get("__call__")
        code = getattr(function, "__code__", None)
        if code is not None:
            codes.add(code)
    return codes
