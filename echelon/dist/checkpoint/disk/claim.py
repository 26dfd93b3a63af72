"""Claim a folder so that only one job at a time can save checkpoints in it.

The claim is a lock (`flock`) on a file in the folder. The lock is released when the process ends,
even if the process is killed. Forked children close their copies of the lock. If the file system
does not support locks, a warning is issued and the folder is not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import warnings
import weakref
from pathlib import Path

from echelon.dist.checkpoint.disk import files
from echelon.errors import CheckpointError

CLAIM = ".keeper"
_SAME_HOST_S = 10.0  # for a process that was killed to be gone
_OTHER_HOST_S = 120.0  # for a file server to notice that a host is lost: NFS 4 takes 90 s
_LOOK_S = 0.1


class Claim:
    """This process's exclusive claim on a folder, which lasts until `close`.

    If another process holds the lock, the constructor waits for at most `same_host_s` seconds, or
    `other_host_s` seconds if that process runs on another host.

    Raises:
        CheckpointError: another process still holds the lock after the wait.
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        same_host_s: float = _SAME_HOST_S,
        other_host_s: float = _OTHER_HOST_S,
    ) -> None:
        files.make_folder(folder)
        self._path = folder / CLAIM
        self._descriptor = os.open(
            self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666
        )
        _claims.add(self)
        try:
            self._lock(same_host_s, other_host_s)
            self._sign()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the folder. Calling this twice is safe."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _lock(self, same_host_s: float, other_host_s: float) -> None:
        began_s = time.monotonic()
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                host, process = self._owner()
            except OSError as error:
                reason = (
                    f"{self._path}: files cannot be locked here ({error.strerror}): make sure no "
                    "other"
                )
                warnings.warn(
                    f"{reason} job is saving to this folder", RuntimeWarning, stacklevel=2
                )
                return
            limit_s = same_host_s if host == socket.gethostname() else other_host_s
            if time.monotonic() - began_s > limit_s:
                folder = self._path.parent
                raise CheckpointError(
                    f"{folder}: another job is saving its checkpoints here (process {process} on "
                    f"{host}). Give each job its own folder",
                    path=folder,
                )
            time.sleep(_LOOK_S)

    def _owner(self) -> tuple[str, int]:
        try:
            host, process = json.loads(os.pread(self._descriptor, 4096, 0))
            return str(host), int(process)
        except (OSError, ValueError, TypeError):
            return "another host", 0

    def _sign(self) -> None:
        """Record this process as the owner of the folder, for the error messages of other jobs."""
        with contextlib.suppress(OSError):  # a full disk does not end the claim
            text = json.dumps([socket.gethostname(), os.getpid()]).encode()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the lock files that a forked child inherited, so that no lock outlives the parent."""
    for claim in list(_claims):
        claim.close()


os.register_at_fork(after_in_child=_release_in_child)
