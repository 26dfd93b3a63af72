"""What a forked child inherits and must not hold: a store's sockets and files.

A descriptor outlives its process as long as a child has a copy. Close-on-exec does not help a child
that executes nothing (a data loader's worker): after its parent was killed it would keep the
parent's connections alive, and with them waits, arrivals and presences, a listener's port, and a
file's lock. So every owner is known here, and its descriptors are replaced in the child by the null
device: their numbers stay taken, because the owner's objects still close them.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Owner(Protocol):
    """Holds descriptors that no child may share."""

    def descriptors(self) -> Iterable[int]:
        """Return the open ones."""
        ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def keep_from_children(owner: Owner) -> None:
    """Have children of this process release the owner's descriptors; keeps no owner alive."""
    _owners.add(owner)


def _release() -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    for owner in list(_owners):
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: changed while forking
            for descriptor in list(owner.descriptors()):
                if descriptor >= 0:
                    os.dup2(null, descriptor, inheritable=False)
    os.close(null)


os.register_at_fork(after_in_child=_release)
