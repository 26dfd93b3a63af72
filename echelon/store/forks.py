"""Keep forked children from holding the sockets and files of stores open.

A descriptor stays open after its process dies for as long as a child holds a copy. Close-on-exec
does not help with a child that never calls exec, such as a data loader's worker. If the parent is
killed, such a child would keep the parent's connections open, and with them waits, arrivals and
presences, a listener's port, and a file's lock. So every owner is registered here, and a forked
child redirects the owner's descriptors to the null device. The descriptor numbers stay in use,
because the owner's objects will still close them.
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
        """Return the open descriptors."""
        ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def keep_from_children(owner: Owner) -> None:
    """Make forked children release the owner's descriptors; the owner is held only weakly."""
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
