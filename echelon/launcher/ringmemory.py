"""Keep the rings of a job in memory while it runs.

[Note: why rings are not on the disk] A mapped file on a disk's file system is written back by the
kernel, and the next store to such a page waits for the journal. While something else keeps the
disk busy (a checkpoint is enough) every rank then stands still for seconds, in a plain store to
memory. So the launcher gives the rings a folder in /dev/shm: it belongs to the node too, outlives
the ranks, and never waits. Once the workers have ended, each ring is moved to its place in the run
directory; the guard does the same if the agent is killed, so that nothing stays in memory.

Where /dev/shm is no tmpfs, or too small (containers often give it 64 MB), the rings stay where the
recorder puts them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path

from echelon.launcher.options import Options
from echelon.recorder.layout import Layout
from echelon.recorder.place import bring_home, file_system
from echelon.recorder.schema import DEFAULT_NUM_SPANS

_MEMORY = Path("/dev/shm")  # noqa: S108 -- a private folder is made in it
_SHARE = 4  # take at most this part of what is free


class RingMemory:
    """A private folder in memory for this node's rings, or none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def for_run(cls, run_dir: Path, options: Options) -> RingMemory:
        """Make the folder if it is of use: see the note above."""
        if options.recorder_size == 0 or "ECHELON_RING_DIR" in os.environ:
            return cls(None)
        if file_system(_MEMORY) != "tmpfs" or file_system(run_dir) == "tmpfs":
            return cls(None)
        ring_bytes = Layout(options.recorder_size, DEFAULT_NUM_SPANS).file_bytes
        folder = _MEMORY / f"echelon-{os.getuid()}-{secrets.token_hex(8)}"
        try:
            status = os.statvfs(_MEMORY)
            if status.f_bavail * status.f_frsize < _SHARE * ring_bytes * options.nproc_per_node:
                return cls(None)
            folder.mkdir(mode=0o700)
        except OSError:
            return cls(None)
        return cls(folder)

    def __str__(self) -> str:
        """Say where the rings lie while the job runs."""
        return "" if self._folder is None else f"; rings in {_MEMORY} while it runs"

    def environment(self) -> dict[str, str]:
        """Return what tells a worker's recorder."""
        return {} if self._folder is None else {"ECHELON_RING_DIR": str(self._folder)}

    def bring_home(self, rank_dir: Path) -> None:
        """Move a rank's ring to its place in the run directory."""
        try:
            bring_home(rank_dir)
        except OSError as err:
            print(f"echelon: {rank_dir / 'ring'} stays in memory: {err}", file=sys.stderr)

    def close(self) -> None:
        """Remove the folder; what could not be brought home stays, and was said."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
