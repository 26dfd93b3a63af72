"""What a machine may run out of, as the launcher meets it: descriptors, processes, threads, memory.

A launcher that is short of descriptors from the start says so in one line before it starts
anything: gRPC, which several nodes need, does not survive it.
"""

from __future__ import annotations

import contextlib
import errno
import resource

from echelon.errors import LaunchError

_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
_NO_THREAD = "can't start new thread"  # a RuntimeError without a type of its own
_OWN = 24  # the launcher's, the guard's and the store's pipes, and an analysis
_OF_GRPC = 40
_OF_A_RANK = 4  # two pipes and two log files


def is_shortage(err: BaseException) -> bool:
    """Whether an error is the machine's and not a defect of the launcher."""
    if isinstance(err, OSError):
        return err.errno in _ERRNOS
    return isinstance(err, MemoryError) or _NO_THREAD in str(err)


def raise_descriptor_limit(num_ranks: int, num_links: int) -> None:
    """Use all descriptors that are allowed: a shell allows 1024, and many ranks need more.

    Args:
        num_ranks: of this node.
        num_links: connections to other nodes without which no world begins; 0 on a single node.

    Raises:
        LaunchError: the launcher cannot work with so few.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OWN + _OF_A_RANK * num_ranks + (_OF_GRPC + num_links if num_links else 0)
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise LaunchError(
            f"Too many open files: the limit is {allowed} (ulimit -Hn), and {num_ranks} ranks on "
            f"this node need {needed}"
        )
