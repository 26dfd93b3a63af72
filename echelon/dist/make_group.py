"""Create process groups."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from echelon.dist.backends import registry
from echelon.dist.backends.interface import Engine, Members
from echelon.dist.backends.router import Router
from echelon.dist.channel import ChannelTags
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.absent import AbsentEngine
from echelon.dist.membership.board import Board
from echelon.dist.membership.host import address_towards
from echelon.dist.membership.liveness import Liveness
from echelon.dist.membership.meet import exchange, gather
from echelon.dist.options import Options
from echelon.dist.progress.group_state import GroupState
from echelon.dist.progress.watcher import watcher
from echelon.errors import CollectiveError
from echelon.host.identity import is_same_host, process_identity
from echelon.store import PrefixStore, TCPStore
from echelon.store.base import Store
from echelon.store.deadline import time_left_s

Facts = list[dict[str, Any]]


class GroupMaker:
    """The factory for the groups of one world.

    Args:
        rank: this process's global rank.
        store: the world's view of the store.
        backend: the name of a backend; None chooses a suitable backend.
        options: the options passed to `init`.
    """

    def __init__(self, rank: int, store: Store, backend: str | None, options: Options) -> None:
        self._rank = rank
        self._backend = backend
        self._options = options
        self._board = Board(store)
        self._dropped: list[GroupState] = []
        self._groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
        self._adding = threading.RLock()  # a signal handler may close groups, too
        self._epoch = 0
        self._end: tuple[int, CollectiveError] | None = None  # the epoch that ended the world
        self._may_end = False

    def watch_members(self) -> None:
        """Let `end` also stop groups whose members are still exchanging their identities."""
        self._may_end = True

    def begin(self, epoch: int) -> None:
        """Allow groups to be created in `epoch`, after `end` has aborted all earlier groups."""
        with self._adding:
            self._epoch = epoch
            if self._end is not None and self._end[0] <= epoch:
                self._end = None

    def end(self, error: CollectiveError, epoch: int) -> None:
        """Fail all groups from epochs before `epoch` with the given error.

        The method can be called on any thread. Groups that are being created fail within about a
        second.
        """
        with self._adding:
            if epoch <= self._epoch:
                return
            self._end = (epoch, error)
            groups = list(self._groups)
        for group in groups:
            if not group.state.is_closed:
                group.state.fail(error)

    def _check_end(self) -> None:
        if self._end is not None:
            raise self._end[1]

    def _add(self, group: ProcessGroup) -> None:
        with self._adding:
            self._groups.add(group)
            end = self._end
        if end is not None:
            group.close()
            raise end[1]

    def make(
        self,
        ranks: Sequence[int],
        name: str,
        store: PrefixStore,
        timeout_s: float,
        facts: Facts | None = None,
    ) -> ProcessGroup:
        """Create a group that contains this rank; block until all members have joined.

        Args:
            ranks: global ranks, in group order.
            store: a view of the store reserved for the group.
            timeout_s: the timeout for this call and for the group's operations.
            facts: the `process_identity` of each member. None makes the members exchange their
                identities first; the death of a member during this exchange is not detected.

        Raises:
            ValueError: the backend cannot run on this host.
            CollectiveTimeoutError: some members did not join within `timeout_s`.
            PeerLostError: a member died while the group was being created.
        """
        deadline_s = time.monotonic() + timeout_s
        members = Members(
            name=name, rank=list(ranks).index(self._rank), ranks=ranks, options=self._options
        )
        facts = facts or self._meet(members, store, deadline_s)

        def make_below(ranks: Sequence[int], name: str, path: str) -> ProcessGroup | None:
            # Groups of one name may split at once: the rows of a mesh do.
            return self.make(ranks, name, PrefixStore(path, store), timeout_s)

        with contextlib.ExitStack() as made:  # closed where a later step fails
            liveness = None
            if members.size > 1:
                liveness = Liveness(members, store, self._board, facts)
                made.callback(liveness.close)
                members = dataclasses.replace(
                    members, check=self._checking(liveness), address=_address(store)
                )
            engine = self._engine(members, store, facts, deadline_s)
            made.callback(engine.close)
            made.callback(engine.cut, None)
            if liveness is not None and engine.name != "shm":
                liveness.use_board()
            channels = ChannelTags(PrefixStore("channels", store), members.rank)
            group = ProcessGroup(members, engine, timeout_s, make_below, liveness, channels)
            made.pop_all()
        self._add(group)
        weakref.finalize(group, self._drop, group.state).atexit = False
        return group

    def make_absent(self, ranks: Sequence[int], name: str, timeout_s: float) -> ProcessGroup:
        """Return a group that contains this rank but refuses all operations. Not collective."""
        members = Members(name=name, rank=list(ranks).index(self._rank), ranks=ranks)

        def make_none(ranks: Sequence[int], name: str, path: str) -> ProcessGroup | None:
            raise AssertionError((ranks, name, path))  # `split` fails before that

        group = ProcessGroup(members, AbsentEngine(members), timeout_s, make_none)
        self._add(group)
        return group

    def _checking(self, liveness: Liveness) -> Callable[[], None]:
        def check() -> None:
            self._check_end()
            liveness.check_joining()

        return check

    def _meet(self, members: Members, store: PrefixStore, deadline_s: float) -> Facts:
        """Return the `process_identity` of every member, in group order."""
        mine = process_identity()
        if members.size == 1:
            return [mine]
        if self._may_end:
            watched = dataclasses.replace(members, check=self._check_end)
            return exchange(watched, store, "processes", mine, deadline_s)
        return gather(members, store, "members", mine, deadline_s)

    def _drop(self, state: GroupState) -> None:
        """Let the process's watcher thread close a group that was deleted while it was open.

        If the group's library requires all ranks to close a group together, the group instead
        stays open until `close` closes all groups.
        """
        if state.is_closed or state.is_foreign:
            return
        if getattr(state.engine, "closes_together", False):
            self._dropped.append(state)
        else:
            watcher().post(state.close)

    def first_error(self) -> CollectiveError | None:
        """Return the error of one of the failed groups, or None if no group has failed."""
        with self._adding:
            groups = list(self._groups)
        errors = [group.state.error for group in groups if not group.state.is_closed]
        return next((error for error in errors if error is not None), None)

    def change_timeout(self, before_s: float, timeout_s: float) -> None:
        """Set the timeout of all groups whose timeout is still `before_s`."""
        with self._adding:
            groups = list(self._groups)
        for group in groups:
            if group.timeout_s == before_s:
                group.timeout_s = timeout_s

    def close(self) -> None:
        """Close all open groups in reverse order of creation."""
        with self._adding:
            groups = list(self._groups)
        for group in sorted(groups, key=lambda group: group.created_mono_ns, reverse=True):
            group.close()
        while self._dropped:
            self._dropped.pop().close()

    def _engine(
        self, members: Members, store: PrefixStore, facts: Facts, deadline_s: float
    ) -> Engine:
        on_host = _host_backend(facts)
        engine = registry.create(self._backend or on_host, members, store, time_left_s(deadline_s))
        if self._backend is None:
            return Router(members, store, engine, makes_engines=True)
        is_device = engine.device != "cpu"
        if not is_device and not engine.refuses("send", "float32", ""):
            return Router(members, store, engine)
        try:
            below = PrefixStore("host", store)
            host = registry.create(on_host, members, below, time_left_s(deadline_s))
        except BaseException:
            engine.close()
            raise
        if is_device:
            return Router(members, store, host, device=engine)
        return Router(members, store, engine, messages=host)


def _host_backend(facts: Facts) -> str:
    """Return the backend for host arrays: "shm" if all ranks are on one host, else "shm+gloo"."""
    return "shm" if all(is_same_host(facts[0], fact) for fact in facts) else "shm+gloo"


def _address(store: Store) -> str:
    """Return the address at which other hosts can reach this host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return address_towards(store.host, store.port) if isinstance(store, TCPStore) else ""
