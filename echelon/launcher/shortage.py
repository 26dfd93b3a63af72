"""Detect that this machine has run out of descriptors, processes, threads, memory or disk space.

gRPC, which multi-node jobs use, cannot recover from a lack of file descriptors. The launcher
therefore checks the descriptor limit before it starts any process.
"""

from __future__ import annotations

import contextlib
import errno
import resource

from echelon.errors import LaunchError

_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
_NO_THREAD = "can't start new thread"  # a plain RuntimeError, recognizable only by its text
_OWN = 24  # the launcher's, the guard's and the store's pipes, and an analysis
_OF_GRPC = 40
_OF_A_RANK = 4  # two pipes and two log files


def is_shortage(err: BaseException) -> bool:
    """Return whether an error means that the machine has run out of a resource."""
    if isinstance(err, OSError):
        return err.errno in _ERRNOS
    return isinstance(err, MemoryError) or _NO_THREAD in str(err)


def raise_descriptor_limit(num_ranks: int, num_links: int) -> None:
    """Raise this process's soft limit on open file descriptors to the hard limit.

    Args:
        num_ranks: the number of ranks on this node.
        num_links: the number of connections to other nodes that the first world requires; 0 for a
            single-node job.

    Raises:
        LaunchError: even the hard limit is too low for the launcher.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN + _OF_A_RANK * num_ranks + (_OF_GRPC + num_links if num_links else 0)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise LaunchError(
            f"Too many open files: the limit is {allowed} (ulimit -Hn), but {num_ranks} ranks on "
            f"this node need {needed}"
        )
