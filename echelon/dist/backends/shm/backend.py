"""Provide the shm backend, which uses the C core if it was built and pure Python otherwise.

All members of a group use the same engine. If any member lacks the core or sets
ECHELON_SHM=python, the whole group uses the pure-Python engine.
"""

from __future__ import annotations

from echelon.dist.backends.interface import Engine, Members
from echelon.dist.backends.shm import futex, native
from echelon.dist.backends.shm.python import PythonEngine
from echelon.dist.backends.shm.python import engine_bytes as python_bytes
from echelon.dist.backends.shm.rendezvous import Plan, join
from echelon.dist.membership.environment import num_ranks_here, wants_python_engine
from echelon.host.cgroup import usable_cores
from echelon.store import PrefixStore

_SLOT_BYTES = 256 << 10
_SLOT_BYTES_CROWDED = 512 << 10  # each wait costs a change of process: fewer, larger chunks
_RING_BYTES = 256 << 10
_MIN_RING_BYTES = 16 << 10
_ALL_RINGS_BYTES = 64 << 20
_LINE_BYTES = 64


def not_ready() -> str:
    """Return the reason this machine cannot run the backend, or "" if it can."""
    if not futex.available():
        return "needs Linux on a known architecture, for its futex"
    return "" if native.available() else _python_refusal()


def _python_refusal() -> str:
    """Return the reason the pure-Python engine cannot run here, or "" if it can.

    The engine relies on a processor that does not reorder loads, such as x86.
    """
    if futex.STORES_STAY_IN_ORDER:
        return ""
    return (
        "needs its C core on this processor, which may reorder memory accesses: install echelon "
        "with a C compiler present, and use at most 256 ranks per group"
    )


def create(members: Members, store: PrefixStore, timeout_s: float) -> Engine:
    """Create the engine for a group; every member must call this.

    Raises:
        ValueError: the members do not run on one host, or no engine can run on this platform.
        CollectiveTimeoutError: some members did not join within `timeout_s` seconds.
    """
    reason = not_ready()
    if reason:
        raise ValueError(f"backend 'shm' {reason}")
    size = members.size
    crowded = usable_cores() < num_ranks_here(size)
    offer = Plan(
        native=native.available() and not wants_python_engine() and size <= native.max_ranks(),
        slot_bytes=_SLOT_BYTES_CROWDED if crowded else _SLOT_BYTES,
        ring_bytes=max(_MIN_RING_BYTES, min(_RING_BYTES, _ALL_RINGS_BYTES // size**2))
        // _LINE_BYTES
        * _LINE_BYTES,
    )
    plan, memory, peers = join(
        members,
        store,
        offer,
        lambda plan: (native.engine_bytes if plan.native else python_bytes)(size, plan),
        timeout_s,
    )
    engine = native.NativeEngine if plan.native else PythonEngine
    try:
        if not plan.native and (reason := _python_refusal()):
            raise ValueError(f"backend 'shm' {reason}")
        return engine(members, plan, memory, peers, not crowded)
    except BaseException:
        peers.close()
        memory.close()
        raise
