"""Read the kernel's files about processes, and keep apart "not there" and "not permitted".

In containers any of them may be denied: then the name is noted, the text is empty, and nothing is
guessed.
"""

from __future__ import annotations

from pathlib import Path

_MAX_BYTES = 1 << 22


def read_text(path: str, name: str, denied: list[str]) -> str:
    """Return a file's text; "" if it is not there, or denied: then `name` is added to `denied`."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except PermissionError:
        if name not in denied:
            denied.append(name)
        return ""
    except OSError:
        return ""  # it has ended, or this kernel has no such file
