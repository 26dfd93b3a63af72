"""Manage this process's world with `init`, `world`, `new_group` and `shutdown`.

`init` finds the other ranks through the store and creates the world group. The black box records
waits for the store as `store` spans. If there are several hosts, it also records the offset of this
rank's clock from rank 0's clock.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import echelon.recorder.current as black_box
from echelon.dist.agreement.agreement import Agreement
from echelon.dist.backends import registry
from echelon.dist.backends.interface import Members
from echelon.dist.group import ProcessGroup
from echelon.dist.make_group import Facts, GroupMaker
from echelon.dist.membership import clocks
from echelon.dist.membership.environment import Rendezvous
from echelon.dist.membership.meet import latest_round, next_round
from echelon.dist.operation.checks import check_name, check_ranks, check_timeout
from echelon.dist.options import Options
from echelon.errors import CollectiveError, StoreConnectionError, StoreError
from echelon.recorder import span
from echelon.recorder.clock import ClockOffset
from echelon.store import MemoryStore, PrefixStore, TCPStore
from echelon.store.deadline import time_left_s

DEFAULT_TIMEOUT_S = 600.0
_CLOCKS_S = 30.0
_RECONNECT_S = 0.05


class _World:
    """The resources that `init` creates and `shutdown` releases."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        connection: TCPStore | MemoryStore,
        backend: str | None,
        options: Options,
        timeout_s: float,
        number: int,
    ) -> None:
        self.rendezvous = rendezvous
        self.connection = connection
        self._whole_store = PrefixStore(f"world_{number}", _attempt(rendezvous, connection))
        self.store = self._whole_store
        self.timeout_s = timeout_s
        self.num_made = 0
        self.is_between = False
        self.agreements: list[Agreement] = []
        self._num_named: Counter[str] = Counter()
        self.pid = os.getpid()
        self.world: ProcessGroup | None = None
        self.is_joining = False
        self.maker = GroupMaker(rendezvous.rank, self.store, backend, options)

    @property
    def group(self) -> ProcessGroup:
        assert self.world is not None
        return self.world

    def make(self, ranks: Sequence[int], name: str, path: str) -> ProcessGroup | None:
        """Create a group under a path in the store; return None if this rank is not a member.

        If this process has not joined the other ranks yet, the group refuses all operations.
        """
        if self.rendezvous.rank not in ranks:
            return None
        if self.is_joining:
            return self.maker.make_absent(ranks, name, self.timeout_s)
        store = PrefixStore(path, self.store)
        return self.maker.make(ranks, name, store, self.timeout_s)

    def leave_groups(self) -> None:
        """Close all groups and all `Agreement` objects, but stay connected to the store."""
        self.is_between = True
        while self.agreements:
            self.agreements.pop().close()
        self.maker.close()

    def regroup(
        self, ranks: Sequence[int], epoch: int, facts: Facts, timeout_s: float
    ) -> ProcessGroup:
        """Create a new world group that uses its own prefix in the store."""
        self.store = PrefixStore(f"epoch_{epoch}", self._whole_store)
        self.maker.begin(epoch)
        self.num_made = 0
        self._num_named.clear()
        store = PrefixStore("world", self.store)
        self.world = self.maker.make(ranks, f"world.{epoch}", store, timeout_s, facts)
        self.is_between = self.is_joining = False
        return self.world

    def agree(self, what: str) -> Agreement:
        store = PrefixStore(f"agreement/{what}/{self._num_named[what]}", self.store)
        self._num_named[what] += 1
        members = Members(name=self.group.name, rank=self.group.rank, ranks=self.group.ranks)
        made = Agreement(members, self.group.state, store, self.timeout_s, what)
        self.agreements.append(made)
        return made

    def close(self) -> None:
        if os.getpid() != self.pid:
            return  # a forked child holds copies of what its parent owns
        self.leave_groups()
        with contextlib.suppress(OSError):  # the store may have ended before: that is not an error
            self.connection.close()


class _Joining:
    """A call to `init` that is waiting for the other ranks."""

    def __init__(self) -> None:
        self.connection: TCPStore | MemoryStore | None = None
        self.is_cancelled = False
        self.pid = os.getpid()

    def cancel(self) -> None:
        """Make a pending `init` call raise an error. Safe on any thread and in signal handlers."""
        self.is_cancelled = True
        if self.connection is not None:
            self.connection.close()

    def check(self) -> None:
        if self.is_cancelled:
            raise CollectiveError("init was cancelled by shutdown()", operation="init")


_current: _World | None = None
_joining: _Joining | None = None
_has_left = False  # a world, earlier in this process
_lock = threading.RLock()  # held for moments only; a signal handler may take it again


def init(
    backend: str | None = None,
    timeout_s: float | timedelta = DEFAULT_TIMEOUT_S,
    reduction: str = "fast",
) -> ProcessGroup:
    """Join the world and return its group; block until all ranks have joined.

    After `shutdown`, a program can call `init` again with the same store if every rank does so.

    In a process that replaces a lost rank (`echelon run --on-loss replace`), the call
    returns immediately. The world already has its full size and its rank numbers, but refuses all
    operations until `resilient.run` has let the process join the other ranks.

    Args:
        backend: "shm", "gloo", "shm+gloo", "xccl", "nccl" or a plug-in's name. None means "shm" if
            all ranks are on one host, and "shm+gloo" otherwise; a device backend is added at the
            first collective on a device. A device backend (such as "nccl") uses the program's
            current device or, if none is set, the device given by LOCAL_RANK.
        timeout_s: the timeout for this call and for every operation of the world's groups.
        reduction: "fast", or "rank_ordered" for sums in rank order on every backend.

    Raises:
        ValueError: an argument or the environment is invalid, or `init` was already called.
        CollectiveTimeoutError: some ranks did not join within `timeout_s`. The error message names
            these ranks.
        StoreError: the store cannot be reached.

    Example:
        >>> world = dist.init(timeout_s=60)  # on each of 2 ranks
        >>> world.name, world.size, world.rank in (0, 1)
        ('world', 2, True)
    """
    global _current, _joining
    seconds = check_timeout(timeout_s)
    options = Options(reduction=reduction)
    if backend is not None:
        registry.check_name(backend)
    with _lock:
        if _current is not None:
            _check_process(_current)
            raise ValueError("init was already called; call shutdown() first")
        if _joining is not None:
            raise ValueError("init is already running in another thread")
        rendezvous = Rendezvous.from_environment()
        joining = _joining = _Joining()
    try:
        black_box.record_as_rank(rendezvous.rank, rendezvous.world_size)
        recorder = black_box.current()
        if recorder is not None and recorder.identity.world_size != rendezvous.world_size:
            recorder.identify(world_size=rendezvous.world_size, rank=rendezvous.rank)
        state = _join(joining, rendezvous, backend, options, seconds)
        offset = None if state.is_joining else _clock_offset(state, rendezvous)
        if recorder is not None:
            if offset is not None:
                recorder.identify(clock_offset_ns=offset.offset_ns, clock_error_ns=offset.error_ns)
            recorder.mark_initialized()
        with _lock:
            if not joining.is_cancelled:
                _current = state
        if joining.is_cancelled:
            state.close()
            joining.check()
        return state.group
    finally:
        _joining = None


def is_initialized() -> bool:
    """Return whether this process is in a world that `init` created.

    In a forked child of a rank, the result is False, because the world belongs to the parent.

    Example:
        >>> _ = dist.init()
        >>> dist.is_initialized()
        True
        >>> dist.shutdown()
        >>> dist.is_initialized()
        False
    """
    return _current is not None and _current.pid == os.getpid()


def world() -> ProcessGroup:
    """Return the group of all ranks.

    Raises:
        ValueError: `init` was not called.

    Example:
        >>> dist.world().barrier()
    """
    return _need().group


def new_group(ranks: Sequence[int], name: str | None = None) -> ProcessGroup | None:
    """Create a group of some of the world's ranks; block until all its members have joined.

    Every rank of the world must make the same calls to this function in the same order. The
    function returns None on ranks outside the group.

    Args:
        ranks: the world ranks of the members, in group order.
        name: the group's name in verdicts; None generates a name.

    Raises:
        TypeError: `ranks` is not a sequence, or `name` is not a str.
        ValueError: the ranks are invalid, or `init` was not called.
        CollectiveTimeoutError: some members did not join within the world's timeout.

    Example:
        >>> world = dist.init()  # on each of 2 ranks
        >>> first = dist.new_group([0], name="first")
        >>> (first is None) == (world.rank != 0)
        True
    """
    state = _need()
    chosen = [state.group.ranks[rank] for rank in check_ranks(ranks, state.group.size)]
    title = check_name(name)
    number = state.num_made
    state.num_made += 1
    return state.make(chosen, title or f"group_{number}", f"group/{number}")


def leave_groups() -> None:
    """Close all groups and all agreements (see `agree_on_calls`) within about 1 s.

    The process stays connected to the store. Until `regroup` creates a new world, `world` returns
    the closed group.

    Raises:
        ValueError: there is no world.
    """
    _need().leave_groups()


def regroup(ranks: Sequence[int], epoch: int, facts: Facts, timeout_s: float) -> ProcessGroup:
    """Create a new world from some of this world's ranks.

    Every rank of the new world must call this function. The call blocks until all of these ranks
    have joined. Errors in the new world identify ranks by the numbers that the launcher gave them.

    Args:
        ranks: the numbers that the launcher gave to the new world's ranks, in group order.
        epoch: a number higher than the epochs of all earlier worlds of these ranks.
        facts: the `process_identity` of each of these ranks.
        timeout_s: the timeout for this call and for the new world's operations.

    Raises:
        ValueError: there is no world.
        CollectiveTimeoutError: some members did not join within `timeout_s`.
        PeerLostError: a member has died.
    """
    return _need().regroup(ranks, epoch, facts, timeout_s)


def set_timeout(timeout_s: float) -> None:
    """Set the timeout of this world, its groups, and all groups created later.

    Groups whose timeout the program has changed are not affected.

    Raises:
        ValueError: there is no world.
    """
    state = _need()
    state.maker.change_timeout(state.timeout_s, timeout_s)
    state.timeout_s = timeout_s


def expect_epochs() -> None:
    """Declare that `end_world` might be called later. Every rank must call this function.

    Raises:
        ValueError: there is no world.
    """
    _need().maker.watch_members()


def end_world(error: CollectiveError, epoch: int) -> None:
    """End all groups with an error, unless this process has already reached `epoch`.

    Each new world has a higher epoch than the previous world. The function can be called on any
    thread. Without a world, it does nothing.
    """
    state = _current
    if state is not None:
        state.maker.end(error, epoch)


def is_between_worlds() -> bool:
    """Return whether this process has left its groups but not yet joined a new world.

    Raises:
        ValueError: there is no world.
    """
    return _need().is_between


def first_error() -> CollectiveError | None:
    """Return an error that ended a group of this world, or None if no group has failed.

    Raises:
        ValueError: there is no world.
    """
    return _need().maker.first_error()


def join_after() -> int | None:
    """Return the epoch that was current when this process was started to replace a lost rank.

    Returns:
        None if this process was started with the other ranks or has already joined them.

    Raises:
        ValueError: there is no world.
    """
    state = _need()
    return state.rendezvous.join_after if state.is_joining else None


def own_rank() -> int:
    """Return the rank that the launcher assigned to this process.

    Raises:
        ValueError: there is no world.
    """
    return _need().rendezvous.rank


def own_life() -> int:
    """Return how many earlier processes had this process's rank in this attempt.

    Raises:
        ValueError: there is no world.
    """
    return _need().rendezvous.life


def job_store() -> TCPStore | MemoryStore:
    """Return this world's connection to the job's store.

    Raises:
        ValueError: there is no world.
    """
    return _need().connection


def agree_on_calls(what: str) -> Agreement:
    """Create an agreement, which applies one rank's request at the same step on every rank.

    Every rank must call this function. The call does not block.

    Args:
        what: the subject of the agreement, shown in errors and spans. The n-th call with a given
            subject creates the same agreement on every rank.

    Raises:
        ValueError: `init` was not called.
    """
    return _need().agree(what)


_before_shutdown: list[Callable[[], None]] = []


def before_shutdown(action: Callable[[], None]) -> Callable[[], None]:
    """Make `shutdown` call `action` first.

    If `action` raises an exception, `shutdown` leaves the world and then raises it.
    """
    _before_shutdown.append(action)
    return action


def shutdown() -> None:
    """Leave the world and release its resources. Safe to call if there is no world.

    Every rank should call this function after its last operation. The function does not wait for
    other ranks, but it waits for a checkpoint that this rank is saving in the background.

    Raises:
        CheckpointError, OSError: the checkpoint could not be saved. Even in that case, this rank
            leaves the world.

    Example:
        >>> world = dist.init()
        >>> try:
        ...     world.barrier()
        ... finally:
        ...     dist.shutdown()
    """
    try:
        for action in _before_shutdown:
            action()
    finally:
        _leave()


def _leave() -> None:
    global _current, _has_left
    with _lock:
        state, joining = _current, _joining
        if joining is not None and joining.pid == os.getpid():
            joining.cancel()
        if state is None or os.getpid() != state.pid:
            return
        _current = None
        _has_left = True
    state.close()


def _need() -> _World:
    if _current is None:
        raise ValueError("there is no world yet; call echelon.dist.init() first")
    _check_process(_current)
    return _current


def _check_process(state: _World) -> None:
    if os.getpid() != state.pid:
        raise ValueError(
            f"the world belongs to process {state.pid}, and this process, a fork of it, cannot use "
            "the world. Start ranks with a launcher, or call init only in the child"
        )


def _join(
    joining: _Joining,
    rendezvous: Rendezvous,
    backend: str | None,
    options: Options,
    timeout_s: float,
) -> _World:
    if rendezvous.join_after >= 0 and not _has_left:
        return _stand_by(joining, rendezvous, backend, options, timeout_s)
    connection, number = _meet(joining, rendezvous, options, timeout_s)
    state = _World(rendezvous, connection, backend, options, timeout_s, number)
    try:
        joining.check()
        state.world = state.make(range(rendezvous.world_size), "world", "world")
    except BaseException as err:
        state.close()
        if isinstance(err, Exception):
            joining.check()
        raise
    return state


def _stand_by(
    joining: _Joining,
    rendezvous: Rendezvous,
    backend: str | None,
    options: Options,
    timeout_s: float,
) -> _World:
    """Return a world that refuses all operations until `regroup` lets this process join."""
    connection = joining.connection = _connect(rendezvous, timeout_s)
    number = latest_round(_attempt(rendezvous, connection))
    state = _World(rendezvous, connection, backend, options, timeout_s, number)
    state.is_joining = True
    state.world = state.maker.make_absent(range(rendezvous.world_size), "world", timeout_s)
    return state


def _attempt(rendezvous: Rendezvous, connection: TCPStore | MemoryStore) -> PrefixStore:
    """Return this attempt's view of the store."""
    return PrefixStore(rendezvous.namespace or "echelon/solo", connection)


def _meet(
    joining: _Joining, rendezvous: Rendezvous, options: Options, timeout_s: float
) -> tuple[TCPStore | MemoryStore, int]:
    """Connect to the store, and agree with all ranks on the new world's number.

    [Note: a store that ends with its world] If rank 0 hosts the store, rank 0's `shutdown` ends the
    store. A rank that is already joining the next world might be connected to the old store. In
    that case, the rank reconnects to the store that rank 0 opens next.
    """
    members = Members(
        name="world", rank=rendezvous.rank, ranks=range(rendezvous.world_size), options=options
    )
    can_repeat = rendezvous.rank_0_hosts_store and not rendezvous.hosts_store and _has_left
    deadline_s = time.monotonic() + timeout_s
    while True:
        connection = None
        try:
            left_s = time_left_s(deadline_s)
            connection = joining.connection = _connect(rendezvous, left_s)
            joining.check()
            return connection, next_round(members, _attempt(rendezvous, connection), deadline_s)
        except BaseException as err:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.close()
            if isinstance(err, Exception):
                joining.check()
            is_lost = isinstance(err, StoreConnectionError)
            if not (is_lost and can_repeat and time.monotonic() < deadline_s):
                raise
        time.sleep(_RECONNECT_S)


def _clock_offset(state: _World, rendezvous: Rendezvous) -> ClockOffset | None:
    """Return the offset of this rank's clock from rank 0's clock.

    Return None if all ranks are on one host, or if the measurement failed.
    """
    if rendezvous.local_world_size >= rendezvous.world_size:
        return None
    try:
        return clocks.agree(
            PrefixStore("clocks", state.store),
            rendezvous.rank,
            rendezvous.world_size,
            min(state.timeout_s, _CLOCKS_S),
        )
    except StoreError:
        return None  # records then line up less well; that must not stop training


def _connect(rendezvous: Rendezvous, timeout_s: float) -> TCPStore | MemoryStore:
    if rendezvous.world_size == 1 and not rendezvous.may_grow:
        return MemoryStore()
    return TCPStore(
        rendezvous.master_addr,
        rendezvous.master_port,
        is_master=rendezvous.hosts_store,
        timeout=timeout_s,
        wait_for_workers=False,
        observer=lambda operation, key: span("store", f"{operation} {key}"),
    )


def _forget_lock() -> None:
    """Replace the lock in a forked child, because a thread of the parent might have held it."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)
atexit.register(shutdown)
