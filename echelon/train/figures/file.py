"""Append to, truncate and read a file that holds one JSON object per step.

A run that is killed can leave an incomplete line, and lines for steps after the checkpoint from
which the run resumes. These lines are at the end of the file, so the file is truncated and never
rewritten. Earlier lines therefore survive a crash at any point.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 16


class FigureFile:
    """An open metrics log, which must be used by only one thread at a time.

    Args:
        path: the path of the file, which is created along with its folder if necessary.
        last_step: the last step whose lines are retained; lines of later steps and an incomplete
            last line are removed.

    Raises:
        OSError: the file cannot be opened or read.
        ValueError: the file exists but is not a metrics log. The file is left unchanged.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            self._check(path)
            self.drop_after(last_step)
        except BaseException:
            self.close()
            raise

    def _check(self, path: Path) -> None:
        """Raise an error if the file is not a metrics log."""
        begin = os.pread(self._descriptor, _BLOCK_BYTES, 0)
        line, newline, _ = begin.partition(b"\n")
        is_torn = not newline and begin.startswith(b'{"') and len(begin) < _BLOCK_BYTES
        if begin and not is_torn and _step_of(line) is None:
            raise ValueError(f"{path} exists but is not a metrics log; it was left unchanged")

    def drop_after(self, step: int) -> None:
        """Remove the lines for steps after `step`, and any incomplete last line."""
        size = os.fstat(self._descriptor).st_size
        end = self._end_of_whole_lines(size)
        while end:
            start = self._start_of_line(end)
            found = _step_of(os.pread(self._descriptor, end - start, start))
            if found is not None and found <= step:
                break
            end = start
        if end != size:
            os.ftruncate(self._descriptor, end)

    def _end_of_whole_lines(self, size: int) -> int:
        """Return the position in the file just after the last newline."""
        if size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n":
            return size
        return self._start_of_line(size + 1)

    def _start_of_line(self, end: int) -> int:
        """Return the start of the line that ends just before `end`."""
        at = end - 1
        while at > 0:
            begin = max(0, at - _BLOCK_BYTES)
            found = os.pread(self._descriptor, at - begin, begin).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            at = begin
        return 0

    def append(self, figures: Mapping[str, Any]) -> None:
        """Append a line of figures, completely or not at all.

        Raises:
            OSError: the write failed.
        """
        data = json.dumps(figures, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise

    def close(self) -> None:
        """Close the file. Can be called more than once."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)


def _step_of(line: bytes) -> int | None:
    """Return the step recorded in a line, or None if the line does not hold figures."""
    figures = _figures_of(line)
    return None if figures is None else int(figures["step"])


def _figures_of(line: bytes | str) -> dict[str, Any] | None:
    try:
        figures = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(figures, dict) or not isinstance(figures.get("step"), int):
        return None
    return figures


def read_figures(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics log, possibly while a run is writing it.

    Args:
        path: the file, or a folder that contains a `figures.jsonl`.

    Returns:
        One dictionary per line, in the order of the file. An incomplete last line and lines that do
        not hold figures are skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file has lines, but none of them holds figures.

    Example:
        >>> with FigureLog("runs/gpt/figures.jsonl") as figures:
        ...     figures.step(1, 4.2)
        >>> [line["loss"] for line in read_figures("runs/gpt")]
        [4.2]
    """
    path = Path(path)
    if path.is_dir():
        path = path / "figures.jsonl"
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = [_figures_of(line) for line in file]
    found = [figures for figures in lines if figures is not None]
    if lines and not found:
        raise ValueError(f"{path} is not a metrics log: no line contains a step number")
    return found
