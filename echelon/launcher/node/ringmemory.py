"""Store the rings of a running job in memory instead of on disk.

[Note: why rings are not on the disk] The kernel writes the pages of a mapped file back to the disk.
If a program modifies a page while the kernel is writing it back, the program can block on the file
system. On a busy disk, such a wait can stall a rank for seconds. The launcher therefore stores the
rings in a folder in /dev/shm, where memory accesses never wait for a disk. Once the workers have
ended, each ring is moved to its rank's folder in the run directory. If the agent is killed, the
guard moves the rings.

If both the agent and the guard are killed, the next launcher on the node cleans up. The file `home`
in the folder names the run to which the folder belongs. The agent and the guard hold a lock on this
file while they run. If /dev/shm is not a tmpfs, or is too small, the rings are stored on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
from pathlib import Path

from echelon.launcher.options.options import Options
from echelon.recorder.format.layout import Layout
from echelon.recorder.format.schema import DEFAULT_NUM_SPANS
from echelon.recorder.write.setup.place import bring_home, file_system

_MEMORY = Path("/dev/shm")  # noqa: S108 -- a private folder is made in it
_PREFIX = "echelon-"
_HOME = "home"  # a file in the folder; guard.py also uses the name
_SHARE = 4  # use at most 1/4 of the free space


class RingMemory:
    """A private folder in memory for this node's rings.

    Attributes:
        folder: the folder; None if the rings are not in memory.
    """

    def __init__(self, folder: Path | None, lock: int = -1) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def for_run(cls, run_dir: Path, options: Options) -> RingMemory:
        """Create the folder, if needed and possible; see [Note: why rings are not on the disk]."""
        if options.recorder_size == 0 or "ECHELON_RING_DIR" in os.environ:
            return cls(None)
        if file_system(_MEMORY) != "tmpfs" or file_system(run_dir) == "tmpfs":
            return cls(None)
        ring_bytes = Layout(options.recorder_size, DEFAULT_NUM_SPANS).file_bytes
        _clear_up_after_the_killed()
        folder = _MEMORY / f"{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
        try:
            status = os.statvfs(_MEMORY)
            if status.f_bavail * status.f_frsize < _SHARE * ring_bytes * options.nproc_per_node:
                return cls(None)
            folder.mkdir(mode=0o700)
            (folder / _HOME).write_text(str(run_dir))
            return cls(folder, _lock(folder, fcntl.LOCK_SH))
        except OSError:
            return cls(None)

    def __str__(self) -> str:
        """Return a phrase that says where the rings are; "" if they are in the run directory."""
        return "" if self.folder is None else f"; rings in {_MEMORY} while it runs"

    def environment(self) -> dict[str, str]:
        """Return the environment variable that makes a worker store its ring in `folder`."""
        return {} if self.folder is None else {"ECHELON_RING_DIR": str(self.folder)}

    def bring_home(self, rank_dir: Path) -> None:
        """Move a rank's ring to the rank's folder in the run directory."""
        try:
            bring_home(rank_dir)
        except OSError as err:
            print(f"echelon: cannot move {rank_dir / 'ring'} to disk: {err}", file=sys.stderr)

    def close(self) -> None:
        """Remove the folder, unless it still contains rings."""
        if self.folder is not None:
            _remove_if_empty(self.folder)
            os.close(self._lock)
            self.folder = None


def _clear_up_after_the_killed() -> None:
    """Recover the rings of launchers that were killed along with their guards."""
    for folder in _MEMORY.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                _bring_all_home(folder)
                _remove_if_empty(folder)
            finally:
                os.close(lock)


def _bring_all_home(folder: Path) -> None:
    """Move each ring to its rank's folder; remove rings to which no rank's folder refers.

    Raises:
        OSError: a ring cannot be moved.
    """
    run_dir = Path((folder / _HOME).read_text())
    for link in run_dir.glob("rank_*/attempt_*/ring"):
        if link.is_symlink() and link.resolve().parents[1] == folder:
            bring_home(link.parent)
    for orphan in folder.glob("*/ring"):
        orphan.unlink()
        orphan.parent.rmdir()


def _lock(folder: Path, how: int) -> int:
    """Lock a folder; return a descriptor that holds the lock while it is open.

    Raises:
        OSError: another process holds the lock, or the folder has just been removed.
    """
    fd = os.open(folder / _HOME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, how)
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(folder)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder if it contains no rings."""
    with contextlib.suppress(OSError):
        if all(path.name == _HOME for path in folder.iterdir()):
            (folder / _HOME).unlink()
            folder.rmdir()
