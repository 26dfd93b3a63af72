"""Prevent forked children from keeping stores' sockets and files open.

A forked child inherits its parent's descriptors. If the parent is killed, the child keeps the
parent's connections, listening port and file lock open. Close-on-exec does not help if the child
never calls exec, as is the case for data loader workers. Therefore, every object that owns
descriptors is registered here, and a forked child redirects those descriptors to the null device.
The descriptor numbers remain valid, because the owners in the child will still close them.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from typing import Protocol


class Owner(Protocol):
    """An object with descriptors that forked children must not share."""

    def descriptors(self) -> Iterable[int]:
        """Return the object's open descriptors."""
        ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def keep_from_children(owner: Owner) -> None:
    """Make forked children release the descriptors that an object owns.

    Only a weak reference to the object is stored.
    """
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
