"""Read TORCHELASTIC_ERROR_FILE, in which a program describes its own failure.

The file contains a JSON object with an error message and sometimes a traceback. Torch's `record`
decorator writes this file. Any part of the file can be missing or very long.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MAX_FILE_BYTES = 1 << 20
_MAX_CHARS = 16 << 10


def read_error_file(path: Path) -> str:
    """Return the traceback in an error file, or else the message; "" if there is neither."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return ""
        content = json.loads(path.read_text("utf-8", "replace"))
    except (OSError, ValueError, RecursionError):
        return ""
    message = _field(content, "message")
    stack = _field(_field(message, "extraInfo"), "py_callstack")
    text = next(
        (one for one in (stack, _field(message, "message"), message) if isinstance(one, str)), ""
    )
    return text[-_MAX_CHARS:]


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
