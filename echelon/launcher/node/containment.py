"""Create a control group (version 2) for each worker, if the system permits this.

A worker's group is a reliable way to kill the worker and all its descendants. Without groups, the
guard searches for the descendants instead. The groups set no limits of their own.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_OWN = Path("/proc/self/cgroup")


class Containment:
    """The control groups of one launcher's workers.

    Attributes:
        folder: the parent folder of the groups; None if no groups can be created.
    """

    def __init__(self) -> None:
        self.folder = _make_folder()

    def group(self, name: str) -> str:
        """Create a control group for a worker; return the group's path, or "" on failure."""
        if self.folder is None:
            return ""
        group = self.folder / name
        try:
            group.mkdir(mode=0o700)
        except OSError:
            return ""
        return str(group)

    def close(self) -> None:
        """Remove all empty control groups. Safe to call twice."""
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
