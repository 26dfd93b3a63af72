"""Log to standard error from a separate thread, so that the server's loop never blocks.

When the queue is full, lines are dropped. A later line reports how many lines were dropped.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading

_LINES = 1000
_CLOSE_S = 1.0


class StderrSink(logging.Handler):
    """A log handler for standard error; `emit` never blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="echelon-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the formatted record, or drop it if the queue is full."""
        line = self.format(record)
        if self._num_dropped:
            line += f" ({self._num_dropped} lines before this one were dropped)"
        try:
            self._lines.put_nowait(line)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def close(self) -> None:
        """Wait briefly for the queued lines to be written."""
        try:
            self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)
        except queue.Full:
            pass
        super().close()

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                print(line, file=sys.stderr, flush=True)
            except OSError:  # its reader has exited
                return
