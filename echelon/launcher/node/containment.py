"""A control group for each worker, where the machine delegates them (version 2).

With one, a worker and all that it starts are ended by one write that no fork outruns and no missing
permission stops. Without one, the guard's walk over its descendants does the work. A group has no
limits of its own: those of the launcher's group still hold.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")


class Containment:
    """The groups of one launcher's workers.

    Attributes:
        folder: None where no groups can be made.
    """

    def __init__(self) -> None:
        self.folder = _make_folder()

    def group(self, name: str) -> str:
        """Make a worker's group; return its path, "" if there can be none."""
        if self.folder is None:
            return ""
        group = self.folder / name
        try:
            group.mkdir(mode=0o700)
        except OSError:
            return ""
        return str(group)

    def close(self) -> None:
        """Remove what is empty; the guard removes the rest. Safe to call twice."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                for group in self.folder.iterdir():
                    if group.is_dir():
                        group.rmdir()
                self.folder.rmdir()
            self.folder = None


def _make_folder() -> Path | None:
    own = _own_group()
    if own is None or not os.access(own / "cgroup.procs", os.W_OK):
        return None
    folder = own / f"echelon-{os.getpid()}-{secrets.token_hex(3)}"
    try:
        folder.mkdir(mode=0o700)
        if (folder / "cgroup.kill").exists():  # Linux 5.14
            return folder
        folder.rmdir()
    except OSError:
        return None
    return None


def _own_group() -> Path | None:
    try:
        mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
        groups = _OWN.read_text().splitlines()
    except OSError:
        return None
    paths = [line.partition("::")[2] for line in groups if line.startswith("0::")]
    for fields in mounts:
        if paths and "cgroup2" in fields[fields.index("-") :]:
            return Path(fields[4]) / paths[0].strip("/")
    return None
