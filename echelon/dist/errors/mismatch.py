"""Say who called something else: the vote over what the members of a group called.

Every rank sees the same calls, so every rank raises the same error: the minority is named; where
there is no majority, both sides are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echelon.dist.backends.interface import Members
from echelon.dist.errors.build import named, place
from echelon.dist.operation.operation import Operation, describe_call
from echelon.errors import CollectiveMismatchError

_MAX_SIDES = 3


def mismatch_error(
    members: Members, operation: Operation, calls: Sequence[bytes]
) -> CollectiveMismatchError:
    """Build the error of collectives that differ; `calls`: per group rank, what it called."""
    votes = Counter(calls).most_common()
    tied = len(votes) > 1 and votes[0][1] == votes[1][1]
    majority = None if tied else votes[0][0]
    odd = [rank for rank, call in enumerate(calls) if call != majority]
    sides = []
    for call, _ in [vote for vote in votes if vote[0] != majority][:_MAX_SIDES]:
        side = [members.ranks[rank] for rank in range(len(calls)) if calls[rank] == call]
        sides.append(f"{named(side, 8)} called {describe_call(call)}")
    said = "; ".join(sides)
    if majority is not None:
        said += f", the others {describe_call(majority)}"
    return _error(members, operation, said, [members.ranks[rank] for rank in odd])


def split_error(
    members: Members, operation: Operation, ranks: Sequence[int]
) -> CollectiveMismatchError:
    """Build the error of an all_to_all whose splits do not fit together."""
    who = [members.ranks[rank] for rank in ranks]
    said = f"what one rank sends is not what the other expects, between {named(who)}; my splits "
    said += f"{list(operation.input_splits)} -> {list(operation.output_splits)}"
    return _error(members, operation, said, who)


def message_error(
    members: Members, operation: Operation, ranks: Sequence[int]
) -> CollectiveMismatchError:
    """Build the error of a send and a receive that differ in dtype or size."""
    who = [members.ranks[rank] for rank in ranks]
    said = f"the two ends, {named(who)}, differ in dtype or size; this one called {operation}"
    return _error(members, operation, said, who)


def _error(
    members: Members, operation: Operation, said: str, ranks: Sequence[int]
) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"{place(members, operation)}: {said}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )
