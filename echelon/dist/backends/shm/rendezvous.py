"""Map the same memory in all members of a group, and verify that they share it.

The members exchange their host and process identities through the store. Group rank 0 then passes
the memory's descriptor to the other members. Finally, the members compare the marks that they wrote
into the memory. Members are on the same host if they share the boot ID, the network namespace and
the memory. Host names are not compared.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from echelon.dist.backends.interface import Members
from echelon.dist.backends.shm.handover import Handover, receive
from echelon.dist.backends.shm.memory import (
    MARK_BYTES,
    SharedMemory,
    anonymous_file,
    marks_bytes,
)
from echelon.dist.errors import build
from echelon.dist.membership.host import processes_here
from echelon.dist.membership.meet import exchange
from echelon.dist.membership.peers import Peers, adopt
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveTimeoutError, PeerLostError
from echelon.host.identity import is_same_host, process_identity, process_of
from echelon.store import PrefixStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The layout of a group's shared memory.

    Attributes:
        native: whether all members run the C core.
        slot_bytes, ring_bytes: the sizes of a data slot and of a message ring, in bytes.
    """

    native: bool
    slot_bytes: int
    ring_bytes: int


def join(
    members: Members,
    store: PrefixStore,
    offer: Plan,
    engine_bytes: Callable[[Plan], int],
    timeout_s: float,
) -> tuple[Plan, SharedMemory, Peers]:
    """Map the group's memory; every member must call this.

    Args:
        offer: the layout that this process supports; group rank 0 determines the sizes.
        engine_bytes: a function that returns the amount of memory that an engine needs for a given
            layout, in bytes.

    Raises:
        ValueError: the members do not run on one host.
        CollectiveTimeoutError: some members did not join within `timeout_s` seconds. The error
            names these members.
        PeerLostError: group rank 0 exited during the rendezvous.
    """
    deadline_s = time.monotonic() + timeout_s
    handover = Handover() if members.rank == 0 and members.size > 1 else None
    try:
        facts = exchange(members, store, "facts", _facts(handover, offer), deadline_s)
        _check_one_host(members, facts)
        plan = Plan(
            native=all(fact["native"] for fact in facts),
            slot_bytes=facts[0]["slot_bytes"],
            ring_bytes=facts[0]["ring_bytes"],
        )
        num_bytes = engine_bytes(plan)
        total = marks_bytes(members.size) + num_bytes
        fd = _descriptor(members, facts, handover, total, deadline_s)
    finally:
        if handover is not None:
            handover.close()
    try:
        memory = SharedMemory(fd, members.size, num_bytes)
    finally:
        os.close(fd)
    peers = Peers(processes_here(facts, members.rank))
    try:
        _prove_shared(members, store, memory, deadline_s)
    except BaseException:
        peers.close()
        memory.close()
        raise
    return plan, memory, peers


def _facts(handover: Handover | None, offer: Plan) -> dict[str, Any]:
    return process_identity() | {
        "native": offer.native,
        "slot_bytes": offer.slot_bytes,
        "ring_bytes": offer.ring_bytes,
        "socket": "" if handover is None else handover.name,
    }


def _check_one_host(members: Members, facts: list[dict[str, Any]]) -> None:
    mine = facts[members.rank]
    elsewhere = [members.ranks[r] for r, fact in enumerate(facts) if not is_same_host(fact, mine)]
    if elsewhere:
        raise ValueError(
            f"group {members.name!r}: backend 'shm' needs all ranks on one host, but some ranks "
            f"are not on the same host as rank {members.ranks[members.rank]}: {elsewhere}"
        )


def _descriptor(
    members: Members,
    facts: list[dict[str, Any]],
    handover: Handover | None,
    num_bytes: int,
    deadline_s: float,
) -> int:
    peers = Peers(processes_here(facts, members.rank))
    with contextlib.closing(peers), _own_pidfd(facts) as pidfd:
        check = _Check(members, peers)
        if members.rank != 0:
            try:
                fd, pidfds = receive(facts[0]["socket"], members.rank, deadline_s, check, pidfd)
            except OSError as err:
                check()
                raise _no_memory_from(members, err) from err
            _adopt(facts, members.rank, pidfds)
            return fd
        fd = anonymous_file(num_bytes)
        if handover is not None:
            missing = set(range(1, members.size))
            try:
                late, pidfds = handover.serve(fd, missing, deadline_s, check, pidfd)
            except BaseException:
                os.close(fd)
                raise
            _adopt(facts, members.rank, pidfds)
            if late:
                os.close(fd)
                ranks = [members.ranks[r] for r in sorted(late)]
                raise CollectiveTimeoutError(
                    f"group {members.name!r} was not set up, because some ranks did not fetch "
                    f"the shared memory in time (missing: {', '.join(map(str, ranks))})",
                    group=members.name,
                    operation="init",
                    ranks=ranks,
                )
        return fd


def _no_memory_from(members: Members, error: OSError) -> PeerLostError:
    return PeerLostError(
        f"group {members.name!r} was not set up, because rank {members.ranks[0]} did not hand over "
        f"the shared memory: {error}",
        group=members.name,
        operation="init",
        ranks=[members.ranks[0]],
    )


@contextlib.contextmanager
def _own_pidfd(facts: list[dict[str, Any]]) -> Iterator[int]:
    """Yield this process's pidfd if members are in different PID namespaces, and otherwise -1."""
    fd = -1
    if len({fact["pids"] for fact in facts}) > 1:
        with contextlib.suppress(OSError, AttributeError):
            fd = os.pidfd_open(os.getpid())
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _adopt(facts: list[dict[str, Any]], me: int, pidfds: dict[int, int]) -> None:
    for rank, fd in pidfds.items():
        if rank == me or facts[rank]["pids"] == facts[me]["pids"]:
            os.close(fd)
        else:
            adopt(process_of(facts[rank]), fd)


class _Check:
    """A callable that raises an error if a member dies while the group is being created."""

    def __init__(self, members: Members, peers: Peers) -> None:
        self._members = members
        self._peers = peers

    def __call__(self) -> None:
        dead = self._peers.dead(r for r in range(self._members.size) if r != self._members.rank)
        if dead:
            raise build.peer_lost(self._members, Operation("init", 0), dead)


def _prove_shared(
    members: Members, store: PrefixStore, memory: SharedMemory, deadline_s: float
) -> None:
    mark = secrets.token_bytes(MARK_BYTES)
    memory.write_mark(members.rank, mark)
    for rank, text in enumerate(exchange(members, store, "marks", mark.hex(), deadline_s)):
        if memory.read_mark(rank).hex() != text:
            raise ValueError(
                f"group {members.name!r}: ranks {members.ranks[rank]} and "
                f"{members.ranks[members.rank]} do not share memory: they are on different hosts"
            )
