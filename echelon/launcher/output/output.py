"""Write the workers' output unchanged to one file per stream, and line by line to the terminal.

The terminal shows only complete lines, each prefixed with its rank. Text that ends in a carriage
return, such as a progress bar, is a live line. A live line stays at the bottom of the terminal
until the next live line replaces it. If the output is not a terminal, live lines are not shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, TextIO

from echelon.launcher.output.fit import fit
from echelon.launcher.output.fold import Fold

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20  # a longer line is split, so that memory stays bounded
_ERASE = b"\r\x1b[2K"
_SLOW_S = 1.0
_UNKNOWN_COLUMNS = 80  # assumed for a terminal that reports 0
_NAMES = {1: "stdout", 2: "stderr"}


class Terminal:
    """The launcher's own stdout and stderr, shared by all workers.

    Args:
        as_json: whether to write each line as a JSON object rather than as text with a prefix.
        fold: whether to show only one copy of a line that many ranks print at about the same time.
    """

    def __init__(self, *, as_json: bool = False, fold: bool = False) -> None:
        # Unbuffered: text that a full disk has refused must not reappear at the end.
        self._fds = {1: sys.stdout.fileno(), 2: sys.stderr.fileno()}
        self._live = b""
        self._as_json = as_json
        self._folds = {1: Fold(), 2: Fold()} if fold and not as_json else {}
        self._node = b""
        # A live line on stdout must be erased for text on stderr only if stderr is a terminal too.
        self._stderr_is_shown = _columns(sys.stderr) is not None

    @property
    def columns(self) -> int | None:
        """The current width of stdout in columns; None if stdout is not a terminal."""
        return _columns(sys.stdout)

    @property
    def error_columns(self) -> int | None:
        """The current width of stderr in columns; None if stderr is not a terminal."""
        return _columns(sys.stderr)

    @property
    def deadline_s(self) -> float | None:
        """The time at which to call `tick` again; None if no line is being held."""
        due = [fold.deadline_s for fold in self._folds.values()]
        return min((at for at in due if at is not None), default=None)

    def tick(self) -> None:
        """Show the held-back lines that are now due."""
        for stream, fold in self._folds.items():
            self._write_folded(stream, fold.due(time.monotonic()))

    def show(self, stream: int, source: Source, lines: Sequence[bytes]) -> None:
        """Show complete lines that a worker has printed."""
        if self._as_json:
            text = b"".join(source.as_json(stream, line) for line in lines)
        elif stream in self._folds:
            self._node = source.node_prefix
            now_s = time.monotonic()
            for line in lines:
                self._write_folded(stream, self._folds[stream].add(source.rank, line, now_s))
            return
        else:
            text = b"".join(source.prefix + line + b"\n" for line in lines)
        self.write_lines(stream, text)

    def say(self, text: str) -> None:
        """Print one line on behalf of the launcher."""
        self.write_error(f"echelon: {text}\n")

    def write_error(self, text: str) -> None:
        """Print complete lines to stderr. A live line on the terminal is hidden first."""
        self.end_live()
        self.write_lines(2, text.encode("utf-8", "replace"))

    def write_lines(self, stream: int, lines: bytes) -> None:
        """Write complete lines, and keep the live line below them. Never raises."""
        if self._live and (stream == 1 or self._stderr_is_shown):
            self._write(1, _ERASE)
            self._write(stream, lines)
            self._write(1, self._fitted(self._live))
        else:
            self._write(stream, lines)

    def _write(self, stream: int, data: bytes) -> None:
        """Write to a stream. If the stream is in non-blocking mode, wait at most about a second."""
        fd = self._fds.get(stream)
        deadline_s = time.monotonic() + _SLOW_S
        while fd is not None and data:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    return
                select.select([], [fd], [], 0.1)
            except OSError as err:
                self._lose(stream, err)
                return

    def _lose(self, stream: int, err: OSError) -> None:
        """Stop writing to a stream after an error, and report the error on the other stream.

        If the reader has closed the stream, nothing is reported.
        """
        del self._fds[stream]
        if not isinstance(err, BrokenPipeError):
            name = _NAMES[stream]
            text = f"echelon: cannot write to {name} ({err.strerror}); the job continues\n"
            self._write(3 - stream, text.encode())

    def _fitted(self, line: bytes) -> bytes:
        """Return the live line's text, truncated to the width of the terminal."""
        columns = self.columns
        if columns is None:
            return b""
        return fit(line.decode("utf-8", "replace"), columns).encode()

    def show_live(self, text: bytes) -> None:
        """Replace the live line on the terminal; an empty line removes it."""
        if self.columns is None or self._as_json:
            return
        if not text:
            self.end_live()
            return
        self._write(1, _ERASE + self._fitted(text))
        self._live = text

    def end_live(self) -> None:
        """Remove the live line, and show all lines that were held back."""
        if self._live:
            self._live = b""
            self._write(1, _ERASE)
        for stream, fold in self._folds.items():
            self._write_folded(stream, fold.flush())

    def _write_folded(self, stream: int, lines: Sequence[bytes]) -> None:
        if lines:
            self.write_lines(stream, b"".join(self._node + line for line in lines))


@dataclass(frozen=True, slots=True)
class Source:
    """The rank that printed a line."""

    rank: int
    node_rank: int
    has_many_nodes: bool

    @property
    def node_prefix(self) -> bytes:
        """The node's label, or b"" if the job has one node."""
        return b"%d:" % self.node_rank if self.has_many_nodes else b""

    @property
    def prefix(self) -> bytes:
        """The label before a line: `3| `, or `1:3| ` if the job has several nodes."""
        return self.node_prefix + b"%d| " % self.rank

    def as_json(self, stream: int, line: bytes) -> bytes:
        """Return a line of output as a single-line JSON object."""
        fields = {
            "node": self.node_rank,
            "rank": self.rank,
            "stream": _NAMES[stream],
            "line": line.decode("utf-8", "replace"),
        }
        return json.dumps(fields).encode() + b"\n"


@dataclass
class Stream:
    """One output stream of one worker, from its pipe to its file and the terminal.

    Attributes:
        terminal: the terminal that shows the stream; None if the stream is not shown.
        filters: the strings that select lines. A line that contains one of these strings is also
            written to `filtered`.
        on_lost: a function that is called when a file cannot be written. After that, the stream is
            no longer written to the file.
        num_bytes: the number of bytes that have arrived.
    """

    pipe: int
    number: int  # 1: stdout, 2: stderr
    source: Source
    log: BinaryIO | None
    terminal: Terminal | None
    filters: tuple[bytes, ...] = ()
    filtered: BinaryIO | None = None
    on_lost: Callable[[OSError], None] = field(default=lambda _: None, repr=False)
    num_bytes: int = 0
    _rest: bytes = field(default=b"", repr=False)

    def pump(self) -> bool:
        """Forward the output that has arrived; return False at the end of the stream."""
        data = os.read(self.pipe, _READ_BYTES)
        if not data:
            self.flush()
            return False
        self.num_bytes += len(data)
        self._keep(data)
        if self.terminal is not None or self.filtered is not None:
            self._cut(self._rest + data)
        return True

    def flush(self) -> None:
        """Show any remaining output that does not end with a newline."""
        if self._rest.strip():
            self._pass([self._rest])
        self._rest = b""

    def close(self) -> None:
        """Close the pipe and the files."""
        os.close(self.pipe)
        for file in (self.log, self.filtered):
            if file is not None:
                with contextlib.suppress(OSError):  # a full disk has been reported
                    file.close()

    def _keep(self, data: bytes) -> None:
        if self.log is None:
            return
        try:
            self.log.write(data)
            self.log.flush()
        except OSError as err:
            lost, self.log = self.log, None
            with contextlib.suppress(OSError):
                lost.close()
            self.on_lost(err)

    def _cut(self, data: bytes) -> None:
        whole, newline, rest = data.rpartition(b"\n")
        if newline:
            self._pass([_last_state(line) for line in whole.split(b"\n")])
        if b"\r" in rest:
            *_, live, rest = rest.split(b"\r")
            if self.terminal is not None:
                shown = live.replace(b"\x1b[2K", b"")
                self.terminal.show_live(self.source.prefix + live if shown.strip() else b"")
        if len(rest) > _LONGEST_LINE_BYTES:
            self._pass([rest])
            rest = b""
        self._rest = rest

    def _pass(self, lines: Sequence[bytes]) -> None:
        if self.filtered is not None:
            try:
                for line in lines:
                    if any(text in line for text in self.filters):
                        self.filtered.write(line + b"\n")
                self.filtered.flush()
            except OSError as err:
                self.filtered = None
                self.on_lost(err)
        if self.terminal is not None:
            self.terminal.show(self.number, self.source, lines)


def _last_state(line: bytes) -> bytes:
    """Return the text that remains visible on a terminal after a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _columns(stream: TextIO) -> int | None:
    try:
        size = os.get_terminal_size(stream.fileno()) if stream.isatty() else None
    except (OSError, ValueError):
        return None
    return None if size is None else size.columns or _UNKNOWN_COLUMNS
