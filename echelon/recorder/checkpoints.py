"""Exchange information about checkpoints and attempts between a rank and its launcher.

`RANK_DIR/checkpoint.json` names the newest checkpoint. The rank writes this file after each commit.
ECHELON_ATTEMPTS names a file in which the launcher records how earlier attempts ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from echelon.recorder.current import current

_FILE = "checkpoint.json"
_STEP_NAME = re.compile(r"step_(\d{1,18})")


def note_checkpoint(path: Path, step: int | None) -> None:
    """Report a committed checkpoint to the launcher, if a launcher started this rank.

    Args:
        path: the folder in which the checkpoint was saved.
        step: the step at which the checkpoint was saved, or None if unknown. If the folder's name
            has the form `step_<n>`, the step in the name takes precedence.
    """
    folder = os.environ.get("ECHELON_RANK_DIR", "")
    if not folder:
        return
    named = _STEP_NAME.fullmatch(path.name)
    told = {"format": 1, "path": str(path), "step": int(named[1]) if named is not None else step}
    part = Path(folder) / f".{_FILE}.{os.getpid()}.part"
    with contextlib.suppress(OSError):  # the checkpoint is safe; the launcher reports an older one
        part.write_text(json.dumps(told))
        part.replace(part.with_name(_FILE))


def last_step() -> int | None:
    """Return the last step that this rank began.

    If the rank has not begun a step, the result is the highest step that an earlier attempt began.

    Returns:
        The step number, or None if no attempt has recorded the start of a step.

    Example:
        >>> last_step() is None  # no recorder runs in this process
        True
    """
    recorder = current()
    own = -1 if recorder is None else recorder.step_number
    if own >= 0:
        return own
    steps = [one.get("last_step") for one in _attempts()]
    return max((step for step in steps if isinstance(step, int)), default=None)


def _attempts() -> list[dict[str, Any]]:
    """Return the launcher's records of earlier attempts."""
    name = os.environ.get("ECHELON_ATTEMPTS", "")
    if not name:
        return []
    try:
        told = json.loads(Path(name).read_text())["attempts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [one for one in told if isinstance(one, dict)]
