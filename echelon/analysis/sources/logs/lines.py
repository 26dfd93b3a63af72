"""Read log lines within size limits, and strip the labels that launchers add.

Examples of labels are `[default3]:` (torchrun), `3: ` (srun `--label`) and `3| ` (echelon). torch
itself adds `[rank3]:` to tracebacks and warnings.
"""

from __future__ import annotations

import re
from pathlib import Path

FIRST_BYTES = 256 << 10  # enough for the first trouble of a rank that then floods its log
LAST_BYTES = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,16}[ -/]{0,4}[@-~]")
_TEXT_SHARE = 0.7
_PROBE_BYTES = 4096
_TORCHRUN = re.compile(r"^\[[A-Za-z_][\w-]{0,40}?(\d{1,7})\]:\s?")
_TORCH = re.compile(r"^\[rank(\d{1,7})\]:\s?")
_TORCH_WORDS = re.compile(r"^\[rank(\d{1,7})\]:(?=\[)")
_LABEL = re.compile(r"^(?:[\w.-]{1,64} )?(\d{1,7})(?:: |\| )")


def read_text(path: Path) -> str | None:
    """Read the beginning and the end of a log; return None if the log is not text.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        first = file.read(FIRST_BYTES)
        if not _is_text(first[:_PROBE_BYTES]):
            return None
        size = file.seek(0, 2)
        rest = b""
        if size > FIRST_BYTES:
            file.seek(max(FIRST_BYTES, size - LAST_BYTES))
            rest = file.read(LAST_BYTES)
            if size > FIRST_BYTES + LAST_BYTES:
                first, rest = first.rpartition(b"\n")[0] + b"\n", rest.partition(b"\n")[2]
    text = (first + rest).decode("utf-8", "replace").replace("\r\n", "\n")
    return _ESCAPES.sub("", text)


def _is_text(head: bytes) -> bool:
    if b"\0" in head:
        return False
    plain = sum(byte >= 32 or byte in b"\t\n\r\x1b\f" for byte in head)
    return plain >= _TEXT_SHARE * len(head)


def by_rank(text: str, *, labeled: bool = False) -> dict[int, str]:
    """Split a merged log by rank; return each rank's lines as a string, keyed by rank.

    Lines that name no rank are collected under the key -1.

    Args:
        labeled: whether a line can start with a label such as `3: ` or `3| `.
    """
    parts: dict[int, list[str]] = {}
    for line in text.splitlines():
        rank, rest = _split(line, labeled=labeled)
        parts.setdefault(rank, []).append(rest)
    return {rank: "\n".join(lines) + "\n" for rank, lines in parts.items()}


def is_labeled(text: str) -> bool:
    """Return whether most lines of a log begin with a rank label."""
    lines = [line for line in text.splitlines() if line.strip()]
    labels = {match[1] for line in lines if (match := _LABEL.match(line))}
    return len(labels) > 1 and 2 * sum(bool(_LABEL.match(line)) for line in lines) > len(lines)


def _split(line: str, *, labeled: bool) -> tuple[int, str]:
    rank = -1
    for pattern in (_TORCHRUN, _TORCH, _TORCH_WORDS):
        match = pattern.match(line)
        if match is not None:
            rank, line = int(match[1]), line[match.end() :]
    if rank < 0 and labeled:
        match = _LABEL.match(line)
        if match is not None:
            rank, line = int(match[1]), line[match.end() :]
            _, line = _split(line, labeled=False)
    return rank, line
