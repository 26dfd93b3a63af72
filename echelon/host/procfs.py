"""Read files in /proc, distinguishing missing files from files to which access is denied.

A container can deny access to some files in /proc. The name of a denied file is recorded, and the
file is treated as empty.
"""

from __future__ import annotations

from pathlib import Path

_MAX_BYTES = 1 << 22


def read_text(path: str, name: str, denied: list[str]) -> str:
    """Return a file's text, or "" if it cannot be read.

    If access is denied, `name` is added to `denied`.
    """
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except PermissionError:
        if name not in denied:
            denied.append(name)
        return ""
    except OSError:
        return ""  # it has ended, or this kernel has no such file
