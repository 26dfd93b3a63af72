"""The errors of a group's operations, built in one place so that all backends speak alike."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.dist.backends.interface import Members
from echelon.dist.operation.operation import ANY_SOURCE, Operation
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError


def place(members: Members, operation: Operation) -> str:
    """Say which operation it is: `all_reduce #7 in group 'world' (4 ranks)`."""
    what = f"{operation.kind} #{operation.sequence}"
    if operation.is_message:
        way = "to" if operation.kind == "send" else "from"
        peer = (
            "any rank" if operation.peer == ANY_SOURCE else f"rank {members.ranks[operation.peer]}"
        )
        what += f" {way} {peer}"
    return f"{what} in group {members.name!r} ({members.size} ranks)"


def named(ranks: Sequence[int], most: int = 16) -> str:
    """List global ranks: `rank 1, rank 5`."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"


def timed_out(
    members: Members, operation: Operation, late: Sequence[int]
) -> CollectiveTimeoutError:
    """Say that the group ranks `late` did not come in time."""
    ranks = [members.ranks[r] for r in late]
    missing = f" (missing: {', '.join(map(str, ranks))})" if ranks else ""
    return CollectiveTimeoutError(
        f"{place(members, operation)} after {operation.timeout_s:.1f} s: "
        f"{members.size - len(ranks)} of {members.size} ranks came{missing}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )


def peer_lost(members: Members, operation: Operation, gone: Sequence[int]) -> PeerLostError:
    """Say that the group ranks `gone` died or left."""
    ranks = [members.ranks[r] for r in gone]
    return PeerLostError(
        f"{place(members, operation)}: {named(ranks) or 'a rank'} died or left "
        "and did not take part",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )


def aborted(members: Members, operation: Operation) -> CollectiveError:
    """Say that this rank itself ended the group."""
    rank = members.ranks[members.rank]
    return CollectiveError(
        f"{place(members, operation)}: the group was aborted on rank {rank}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=[rank],
    )


def broken_since(members: Members, operation: Operation, first: CollectiveError) -> CollectiveError:
    """Refuse an operation of a group that an earlier one has broken."""
    why = f", for {named(first.ranks)}" if first.ranks else ""
    return type(first)(
        f"{place(members, operation)}: the group is broken since {first.operation} "
        f"#{first.sequence}{why} ({type(first).__name__}); make a new one",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=first.ranks,
    )
