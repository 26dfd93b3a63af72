"""The one maker of groups, for `init`, `new_group`, `split` and torch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

from echelon.dist.backends import registry
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.backends.router import Router
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.host import host_identity
from echelon.dist.membership.meet import gather
from echelon.dist.options import Options
from echelon.store import PrefixStore


class GroupMaker:
    """Makes groups of one world.

    Args:
        rank: this process's global rank.
        backend: a backend's name; None: chosen by hosts and by the arrays' devices.
        options: as `init` was given them.
    """

    def __init__(self, rank: int, backend: str | None, options: Options) -> None:
        self._rank = rank
        self._backend = backend
        self._options = options
        self._groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()

    def make(
        self, ranks: Sequence[int], name: str, store: PrefixStore, timeout_s: float
    ) -> ProcessGroup:
        """Make a group that this rank is in; every member calls this and blocks until all have.

        Args:
            ranks: global ranks, in group order.
            store: a part of the store that is the group's own.
            timeout_s: limit of this call and of the group's operations.

        Raises:
            ValueError: the backend cannot run here.
            CollectiveTimeoutError: members did not join within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        members = Members(
            name=name, rank=list(ranks).index(self._rank), ranks=ranks, options=self._options
        )
        engine = self._engine(members, store, deadline_s)

        def make_below(ranks: Sequence[int], name: str, path: str) -> ProcessGroup | None:
            # Groups of one name may split at once: the rows of a mesh do.
            return self.make(ranks, name, PrefixStore(path, store), timeout_s)

        group = ProcessGroup(members, engine, timeout_s, make_below)
        self._groups.add(group)
        weakref.finalize(group, group.closer).atexit = False  # dropped by its user: released
        return group

    def close(self) -> None:
        """Close the groups that are still open, the latest first."""
        groups = sorted(self._groups, key=lambda group: group.created_mono_ns, reverse=True)
        for group in groups:
            group.close()

    def _engine(self, members: Members, store: PrefixStore, deadline_s: float) -> Engine:
        name = self._backend or _host_backend(members, store, deadline_s)
        engine = registry.create(name, members, store, _left_s(deadline_s))
        if self._backend is None:
            return Router(members, store, engine, makes_engines=True)
        if engine.device != "cpu":
            host = _host_engine(members, store, deadline_s)
            return Router(members, store, host, device=engine)
        if engine.refuses("send", "float32", ""):
            messages = _host_engine(members, store, deadline_s)
            return Router(members, store, engine, messages=messages)
        return Router(members, store, engine)


def _host_engine(members: Members, store: PrefixStore, deadline_s: float) -> Engine:
    store = PrefixStore("host", store)
    name = _host_backend(members, store, deadline_s)
    return registry.create(name, members, store, _left_s(deadline_s))


def _host_backend(members: Members, store: PrefixStore, deadline_s: float) -> str:
    """Return the backend for the host's arrays: shared memory inside one host."""
    if members.size == 1:
        return "shm"
    hosts = gather(members, store, "hosts", host_identity(), deadline_s)
    on_one = all(
        (host["boot"], host["net"]) == (hosts[0]["boot"], hosts[0]["net"]) for host in hosts
    )
    return "shm" if on_one else "shm+gloo"


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
