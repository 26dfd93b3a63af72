"""How the members of a group come to map the same memory, and prove that they do.

One gather through the store tells everyone where everyone runs; group rank 0 hands out the
descriptor; a second gather compares the marks that each left in the mapping. Same host means: same
boot id, same network namespace, same memory. It is never guessed from host names.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
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
from echelon.dist.membership.host import is_same_host, process_identity, watchable
from echelon.dist.membership.meet import gather
from echelon.dist.membership.peers import Peers
from echelon.errors import CollectiveTimeoutError, PeerLostError
from echelon.store import PrefixStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the members of a group have agreed to share memory; group rank 0 decides.

    Attributes:
        native: whether all of them run the C core.
        slot_bytes, ring_bytes: sizes of a data slot and of a message ring.
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
    """Map the group's memory; every member calls this.

    Args:
        offer: what this process can do; group rank 0's sizes are taken.
        engine_bytes: size of the engine's part of the memory under a plan.

    Raises:
        ValueError: the members do not run on one host.
        CollectiveTimeoutError: members did not come within `timeout_s`; names them.
        PeerLostError: group rank 0 went away meanwhile.
    """
    deadline_s = time.monotonic() + timeout_s
    handover = Handover() if members.rank == 0 and members.size > 1 else None
    try:
        facts = gather(members, store, "facts", _facts(handover, offer), deadline_s)
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
    _prove_shared(members, store, memory, deadline_s)
    return plan, memory, Peers(watchable(facts, members.rank))


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
            f"group {members.name!r}: backend 'shm' needs all ranks on one host; "
            f"not on the host of rank {members.ranks[members.rank]}: {elsewhere}"
        )


def _descriptor(
    members: Members,
    facts: list[dict[str, Any]],
    handover: Handover | None,
    num_bytes: int,
    deadline_s: float,
) -> int:
    if members.rank == 0:
        fd = anonymous_file(num_bytes)
        if handover is not None:
            late = handover.serve(fd, set(range(1, members.size)), deadline_s)
            if late:
                os.close(fd)
                ranks = [members.ranks[r] for r in sorted(late)]
                raise CollectiveTimeoutError(
                    f"setting up group {members.name!r}: missing: "
                    f"{', '.join(map(str, ranks))}: did not fetch the shared memory",
                    group=members.name,
                    operation="init",
                    ranks=ranks,
                )
        return fd
    try:
        return receive(facts[0]["socket"], members.rank, deadline_s)
    except OSError as err:
        raise PeerLostError(
            f"setting up group {members.name!r}: rank {members.ranks[0]} did not hand over the "
            f"shared memory: {err}",
            group=members.name,
            operation="init",
            ranks=[members.ranks[0]],
        ) from err


def _prove_shared(
    members: Members, store: PrefixStore, memory: SharedMemory, deadline_s: float
) -> None:
    mark = secrets.token_bytes(MARK_BYTES)
    memory.write_mark(members.rank, mark)
    marks = gather(members, store, "marks", mark.hex(), deadline_s)
    for rank, text in enumerate(marks):
        if memory.read_mark(rank).hex() != text:
            memory.close()
            raise ValueError(
                f"group {members.name!r}: rank {members.ranks[rank]} maps other memory than "
                f"rank {members.ranks[members.rank]}: the ranks are not on one host"
            )
