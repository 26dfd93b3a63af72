"""How the members of a group come to map the same memory, and prove that they do.

One gather through the store tells everyone where everyone runs; group rank 0 hands out the
descriptor; a second gather compares the nonces that each left in the mapping. Same host means: same
boot id, same network namespace, same memory. It is never guessed from host names.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

from echelon.dist.backends.interface import Members
from echelon.dist.backends.shm.peers import Peers, start_ticks
from echelon.dist.backends.shm.segment import (
    NONCE_BYTES,
    Handover,
    Segment,
    anonymous_file,
    receive,
    segment_bytes,
)
from echelon.errors import CollectiveTimeoutError, PeerLostError, StoreTimeoutError
from echelon.store import PrefixStore


def join(
    members: Members, store: PrefixStore, slot_bytes: int, timeout_s: float
) -> tuple[Segment, Peers]:
    """Map the group's memory; every member calls this.

    Raises:
        ValueError: the members do not run on one host.
        CollectiveTimeoutError: members did not come within `timeout_s`; names them.
        PeerLostError: group rank 0 went away meanwhile.
    """
    deadline_s = time.monotonic() + timeout_s
    handover = Handover() if members.rank == 0 and members.size > 1 else None
    try:
        facts = _gather(members, store, "facts", _facts(handover), deadline_s)
        _check_one_host(members, facts)
        fd = _descriptor(members, facts, handover, slot_bytes, deadline_s)
    finally:
        if handover is not None:
            handover.close()
    try:
        segment = Segment(fd, members.size, slot_bytes)
    finally:
        os.close(fd)
    _prove_shared(members, store, segment, deadline_s)
    processes = {r: (f["pid"], f["start"]) for r, f in enumerate(facts) if r != members.rank}
    return segment, Peers(processes)


def _facts(handover: Handover | None) -> dict[str, Any]:
    return {
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "net": _inode("/proc/self/ns/net"),
        "pids": _inode("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "start": start_ticks(os.getpid()) or 0,
        "socket": "" if handover is None else handover.name,
    }


def _gather(
    members: Members, store: PrefixStore, key: str, mine: Any, deadline_s: float
) -> list[Any]:
    value = json.dumps(mine).encode()
    left = max(0.001, deadline_s - time.monotonic())
    try:
        values = store.gather(key, members.rank, members.size, value, timeout=left)
    except StoreTimeoutError as err:
        missing = [members.ranks[int(rank)] for rank in err.missing]
        raise CollectiveTimeoutError(
            f"setting up group {members.name!r} ({members.size} ranks) after {left:.1f} s: "
            f"missing: {', '.join(map(str, missing))}. See stderr.log of those ranks",
            group=members.name,
            operation="init",
            ranks=missing,
        ) from err
    return [json.loads(text) for text in values]


def _check_one_host(members: Members, facts: list[dict[str, Any]]) -> None:
    mine = facts[members.rank]
    elsewhere = [
        members.ranks[r]
        for r, fact in enumerate(facts)
        if (fact["boot"], fact["net"]) != (mine["boot"], mine["net"])
    ]
    if elsewhere:
        raise ValueError(
            f"group {members.name!r}: backend 'shm' needs all ranks on one host; "
            f"not on the host of rank {members.ranks[members.rank]}: {elsewhere}"
        )


def _descriptor(
    members: Members,
    facts: list[dict[str, Any]],
    handover: Handover | None,
    slot_bytes: int,
    deadline_s: float,
) -> int:
    if members.rank == 0:
        fd = anonymous_file(segment_bytes(members.size, slot_bytes))
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
    members: Members, store: PrefixStore, segment: Segment, deadline_s: float
) -> None:
    nonce = secrets.token_bytes(NONCE_BYTES)
    segment.write_nonce(members.rank, nonce)
    nonces = _gather(members, store, "nonces", nonce.hex(), deadline_s)
    for rank, text in enumerate(nonces):
        if segment.read_nonce(rank).hex() != text:
            segment.close()
            raise ValueError(
                f"group {members.name!r}: rank {members.ranks[rank]} maps other memory than "
                f"rank {members.ranks[members.rank]}: the ranks are not on one host"
            )


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return 0
