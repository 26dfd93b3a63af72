"""Build the errors that a group's operations raise, in the same form for all engines."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.dist.backends.interface import Members
from echelon.dist.operation.operation import ANY_SOURCE, OPEN, Operation
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError

_WAYS = {"send": "to", "recv": "from", OPEN: "with"}


def place(members: Members, operation: Operation) -> str:
    """Describe an operation, for example as `all_reduce #7 in group 'world' (4 ranks)`."""
    what = f"{operation.kind} #{operation.sequence}"
    if operation.is_message:
        way = _WAYS[operation.kind]
        peer = (
            "any rank" if operation.peer == ANY_SOURCE else f"rank {members.ranks[operation.peer]}"
        )
        what += f" {way} {peer}"
    return f"{what} in group {members.name!r} ({members.size} ranks)"


def named(ranks: Sequence[int], most: int = 16) -> str:
    """Format a list of global ranks, for example as `rank 1, rank 5`."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"


def timed_out(
    members: Members,
    operation: Operation,
    late: Sequence[int],
    *,
    silent: Sequence[int] = (),
    between: Sequence[int] = (),
    after_s: float | None = None,
) -> CollectiveTimeoutError:
    """Build the error for an operation in which the group ranks `late` did not arrive in time.

    Args:
        late: group ranks that had not arrived; empty if unknown.
        silent: the ranks in `late` that also did not answer the liveness check.
        between: group ranks that had not arrived because they were waiting for the `late` ranks.
        after_s: the elapsed time in seconds; None means the operation's timeout.
    """
    ranks = [members.ranks[r] for r in late]
    passed_s = operation.timeout_s if after_s is None else after_s
    if between:
        waiting = named([members.ranks[r] for r in between])
        said = f"{waiting} {'wait' if len(between) > 1 else 'waits'} in turn for {named(ranks)}"
    elif ranks:
        said = f"{members.size - len(ranks)} of {members.size} ranks had arrived"
        said += f" (missing: {', '.join(map(str, ranks))})"
    else:
        said = "which ranks are missing is not known"
    if silent:
        said += f"; not heard from: {named([members.ranks[r] for r in silent])}"
    return CollectiveTimeoutError(
        f"{place(members, operation)} timed out after {passed_s:.1f} s: {said}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )


def peer_lost(
    members: Members, operation: Operation, gone: Sequence[int], *, silent: Sequence[int] = ()
) -> PeerLostError:
    """Build the error for an operation that needs the group ranks `gone`, which died or left.

    Args:
        silent: other group ranks that did not answer the liveness check.
    """
    ranks = [members.ranks[r] for r in gone]
    said = f"{named(ranks) or 'a rank'} died or left and did not take part"
    if silent:
        said += f"; not heard from: {named([members.ranks[r] for r in silent])}"
    return PeerLostError(
        f"{place(members, operation)}: {said}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )


def aborted(members: Members, operation: Operation) -> CollectiveError:
    """Build the error for an operation on a group after this rank has aborted the group."""
    return _of_this_rank(members, operation, "the group was aborted on rank {rank}")


def interrupted(members: Members, operation: Operation, raised: BaseException) -> CollectiveError:
    """Build the error for a group that was aborted because a signal handler raised an exception."""
    what = f"{type(raised).__name__} in a signal handler"
    return _of_this_rank(members, operation, f"the group was aborted on rank {{rank}}: {what}")


def closed(members: Members, operation: Operation) -> CollectiveError:
    """Build the error for an operation on a group after this rank has closed the group."""
    return _of_this_rank(members, operation, "the group was closed on rank {rank}")


def nested(members: Members, operation: Operation) -> CollectiveError:
    """Build the error for a collective that a signal handler calls during another collective."""
    return _of_this_rank(
        members,
        operation,
        "called from a signal handler while another collective of the group runs on this thread; "
        "set a flag in the handler and call it afterwards",
    )


def local_failure(members: Members, operation: Operation, raised: BaseException) -> CollectiveError:
    """Build the error for an operation that failed because of an exception on this rank."""
    text = f"{type(raised).__name__}: {raised}".replace("{", "{{").replace("}", "}}")
    return _of_this_rank(members, operation, f"rank {{rank}} failed: {text}")


def reported(
    members: Members,
    operation: Operation,
    make: type[CollectiveError],
    text: str,
    ranks: Sequence[int],
) -> CollectiveError:
    """Build the error for an operation whose group has ended, for a reason that another rank gave.

    Args:
        make: the class of the error.
        text: the reason.
        ranks: the global ranks at fault, which can include ranks outside this group.
    """
    return make(
        f"{place(members, operation)}: {text}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )


def out_of_reach(
    members: Members, operation: Operation, broken: BaseException | None, store: BaseException
) -> CollectiveError:
    """Build the error for an operation that failed while the store was not answering."""
    if broken is None:
        make: type[CollectiveError] = CollectiveTimeoutError
        what = f"timed out after {operation.timeout_s:.1f} s"
    else:
        make, what = CollectiveError, f"a connection broke: {broken}"
    return make(
        f"{place(members, operation)}: {what}\nThe store does not answer, so which rank is at "
        f"fault is not known: {store}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
    )


def connection_broken(
    members: Members, operation: Operation, raised: BaseException, ranks: Sequence[int] = ()
) -> CollectiveError:
    """Build the error for a connection that broke although no rank is known to have died."""
    return CollectiveError(
        f"{place(members, operation)}: a connection broke although no rank is known to have "
        f"died: {raised}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=[members.ranks[r] for r in ranks],
    )


def broken_since(members: Members, operation: Operation, first: CollectiveError) -> CollectiveError:
    """Build the error for an operation on a group that an earlier failure has broken."""
    why = f", for {named(first.ranks)}" if first.ranks else ""
    said = str(first).partition("\n")[0]
    return type(first)(
        f"{place(members, operation)}: the group is broken since {first.operation} "
        f"#{first.sequence}{why} ({type(first).__name__}); make a new one\n"
        f"the first error was: {said}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=first.ranks,
    )


def _of_this_rank(members: Members, operation: Operation, said: str) -> CollectiveError:
    rank = members.ranks[members.rank]
    return CollectiveError(
        f"{place(members, operation)}: {said.format(rank=rank)}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=[rank],
    )
