"""The workers' output: to one file per stream as it is, and to the terminal line by line.

A line is written to the terminal whole and with its rank before it, however the worker's writes
were cut. A segment that ends in a carriage return (a progress bar's way) is a live line: on a
terminal it is shown below everything else until the next one replaces it, and not at all elsewhere.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20  # a longer one is cut into several, so that memory stays bounded
_ERASE = b"\r\x1b[2K"


class Terminal:
    """The launcher's own stdout and stderr, shared by all workers."""

    def __init__(self) -> None:
        self._streams: dict[int, BinaryIO] = {1: sys.stdout.buffer, 2: sys.stderr.buffer}
        self._live = b""
        self.columns = _columns()

    def write_lines(self, stream: int, lines: bytes) -> None:
        """Write whole lines, in one piece. A closed terminal is not the job's problem."""
        out = self._streams[stream]
        if self._live:
            lines = _ERASE + lines + self._live
        try:
            out.write(lines)
            out.flush()
        except (BrokenPipeError, ValueError):
            self._streams[stream] = Path(os.devnull).open("wb")  # noqa: SIM115 -- to the end

    def show_live(self, text: bytes) -> None:
        """Show a live line in place of the last one."""
        if self.columns is None:
            return
        self._live = text
        self.write_lines(1, b"")

    def end_live(self) -> None:
        """Take the live line away."""
        if self._live:
            self._live = b""
            self.write_lines(1, _ERASE)


@dataclass
class Stream:
    """One output stream of one worker, from its pipe to its file and the terminal."""

    pipe: int
    number: int  # 1: stdout, 2: stderr
    prefix: bytes
    log: BinaryIO
    terminal: Terminal
    _rest: bytes = field(default=b"", repr=False)

    def pump(self) -> bool:
        """Pass on what has come; return False at the end of the stream."""
        data = os.read(self.pipe, _READ_BYTES)
        if not data:
            self.flush()
            return False
        self.log.write(data)
        self.log.flush()
        self._show(self._rest + data)
        return True

    def flush(self) -> None:
        """Show a last line that has no line end."""
        if self._rest.strip():
            self.terminal.write_lines(self.number, self.prefix + self._rest + b"\n")
        self._rest = b""

    def close(self) -> None:
        """Close the pipe and the file."""
        os.close(self.pipe)
        self.log.close()

    def _show(self, data: bytes) -> None:
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            lines = (_last_state(line) for line in whole.split(b"\n"))
            text = b"".join(self.prefix + line + b"\n" for line in lines)
            self.terminal.write_lines(self.number, text)
        if b"\r" in rest:
            *_, live, rest = rest.split(b"\r")
            if live.strip():
                self.terminal.show_live(self.prefix + live)
        if len(rest) > _LONGEST_LINE_BYTES:
            self.terminal.write_lines(self.number, self.prefix + rest + b"\n")
            rest = b""
        self._rest = rest


def _last_state(line: bytes) -> bytes:
    """Return what a terminal would show of a line with carriage returns in it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _columns() -> int | None:
    if not sys.stdout.isatty():
        return None
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except OSError:
        return None
