"""The world of this process: `init`, `world`, `new_group`, `shutdown`.

`init` meets the other ranks at the store that the launcher (or torchrun, or rank 0) hosts, makes
the world group and wires the rooms: the store's waits become `store` spans of the black box.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import echelon.recorder.recorder as black_box
from echelon.dist.backends.interface import Members, create
from echelon.dist.environment import Rendezvous
from echelon.dist.group import ProcessGroup, check_ranks
from echelon.recorder import span
from echelon.store import MemoryStore, PrefixStore, TCPStore

_REDUCTIONS = ("fast", "rank_ordered")
DEFAULT_TIMEOUT_S = 600.0


class _World:
    """What `init` made and `shutdown` gives back."""

    def __init__(
        self,
        group: ProcessGroup,
        store: PrefixStore,
        connection: TCPStore | MemoryStore,
        backend: str | None,
        timeout_s: float,
    ) -> None:
        self.group = group
        self.store = store
        self.connection = connection
        self.backend = backend
        self.timeout_s = timeout_s
        self.groups: list[ProcessGroup] = []
        self.num_made = 0

    def close(self) -> None:
        for group in reversed(self.groups):
            group.close()
        self.group.close()
        with contextlib.suppress(OSError):  # the store may be gone before us: that is no error
            self.connection.close()


_current: _World | None = None
_lock = threading.Lock()


def init(
    backend: str | None = None,
    timeout_s: float | timedelta = DEFAULT_TIMEOUT_S,
    reduction: str = "fast",
) -> ProcessGroup:
    """Join the world and return its group. Blocks until all ranks have come.

    Args:
        backend: "shm" (the default on one host).
        timeout_s: limit of this call and of every operation of the groups made from it.
        reduction: "fast", or "rank_ordered": sums in rank order. (The shm engine always does.)

    Raises:
        ValueError: a bad argument or environment, or `init` was called before.
        CollectiveTimeoutError: ranks did not come within `timeout_s`; names them.
        StoreError: the store cannot be reached.
    """
    global _current
    seconds = _seconds(timeout_s)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not known; use one of {_REDUCTIONS}")
    with _lock:
        if _current is not None:
            raise ValueError("init was called before; call shutdown first")
        rendezvous = Rendezvous.from_environment()
        recorder = black_box.current()
        if recorder is not None and recorder.identity.world_size != rendezvous.world_size:
            recorder.identify(world_size=rendezvous.world_size, rank=rendezvous.rank)
        _current = _join(rendezvous, backend, seconds)
        if recorder is not None:
            recorder.mark_initialised()
        return _current.group


def world() -> ProcessGroup:
    """Return the group of all ranks.

    Raises:
        ValueError: `init` was not called.
    """
    return _need().group


def new_group(ranks: Sequence[int], name: str | None = None) -> ProcessGroup | None:
    """Make a group of some of the world's ranks; blocks until its members have come.

    Every rank of the world calls this, in the same order; those left out get None.

    Args:
        ranks: global ranks; their order is the group's.
        name: shown in verdicts; made up if None.

    Raises:
        ValueError: bad ranks, or `init` was not called.
        CollectiveTimeoutError: members did not come within the world's timeout.
    """
    state = _need()
    chosen = check_ranks(ranks, state.group.size)
    number = state.num_made
    state.num_made += 1
    if state.group.rank not in chosen:
        return None
    members = Members(
        name=name or f"group_{number}", rank=chosen.index(state.group.rank), ranks=chosen
    )
    store = PrefixStore(f"group/{number}", state.store)
    engine = create(state.backend, members, store, state.timeout_s)
    group = ProcessGroup(members, engine, state.timeout_s)
    state.groups.append(group)
    return group


def shutdown() -> None:
    """Leave the world and free what it holds. Safe to call when there is none.

    Call it on every rank after the last operation; it does not wait for the others.
    """
    global _current
    with _lock:
        state, _current = _current, None
    if state is not None:
        state.close()


def _need() -> _World:
    if _current is None:
        raise ValueError("there is no world yet; call echelon.dist.init() first")
    return _current


def _seconds(timeout_s: float | timedelta) -> float:
    seconds = timeout_s.total_seconds() if isinstance(timeout_s, timedelta) else float(timeout_s)
    if not seconds > 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}")
    return seconds


def _join(rendezvous: Rendezvous, backend: str | None, timeout_s: float) -> _World:
    deadline_s = time.monotonic() + timeout_s
    connection = _connect(rendezvous, timeout_s)
    try:
        store = PrefixStore(rendezvous.namespace or "echelon/solo", connection)
        members = Members(name="world", rank=rendezvous.rank, ranks=range(rendezvous.world_size))
        engine = create(
            backend,
            members,
            PrefixStore("world", store),
            max(0.001, deadline_s - time.monotonic()),
        )
    except BaseException:
        connection.close()
        raise
    group = ProcessGroup(members, engine, timeout_s)
    return _World(group, store, connection, backend, timeout_s)


def _connect(rendezvous: Rendezvous, timeout_s: float) -> TCPStore | MemoryStore:
    if rendezvous.world_size == 1:
        return MemoryStore()
    return TCPStore(
        rendezvous.master_addr,
        rendezvous.master_port,
        is_master=rendezvous.hosts_store,
        timeout=timeout_s,
        wait_for_workers=False,
        observer=lambda operation, key: span("store", f"{operation} {key}"),
        secret=rendezvous.secret,
    )


atexit.register(shutdown)
