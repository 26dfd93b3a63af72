"""Find the ranks whose call differs from the most common call among a group's members.

Every rank compares the same calls, so every rank raises the same error. The error names the ranks
that made a different call or, if the most common call is not unique, all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echelon.dist.backends.interface import Members
from echelon.dist.errors.build import named, place
from echelon.dist.operation.operation import HEAD_BYTES, Operation, describe_call
from echelon.errors import CollectiveMismatchError

_MAX_SIDES = 3


def mismatch_error(
    members: Members, operation: Operation, heads: Sequence[bytes]
) -> CollectiveMismatchError:
    """Build the error for ranks that called different collectives.

    Args:
        heads: the operation number and the call of each group rank (see `Operation.head`).
    """
    votes = Counter(heads).most_common()
    tied = len(votes) > 1 and votes[0][1] == votes[1][1]
    majority = None if tied else votes[0][0]
    odd = [rank for rank, head in enumerate(heads) if head != majority]
    has_numbers = len({_number(head) for head in heads}) > 1
    sides = []
    for head, _ in [vote for vote in votes if vote[0] != majority][:_MAX_SIDES]:
        side = [members.ranks[rank] for rank in range(len(heads)) if heads[rank] == head]
        sides.append(f"{named(side, 8)} called {_describe(head, has_numbers)}")
    said = "; ".join(sides)
    if majority is not None:
        said += f", the others {_describe(majority, has_numbers)}"
    return _error(members, operation, said, [members.ranks[rank] for rank in odd])


def _number(head: bytes) -> int:
    return int.from_bytes(head[:8], "little") if len(head) >= HEAD_BYTES else -1


def _describe(head: bytes, has_number: bool) -> str:
    call = describe_call(head[8:] if len(head) >= HEAD_BYTES else head)
    number = _number(head)
    return f"{call} as #{number}" if has_number and number >= 0 else call


def split_error(
    members: Members, operation: Operation, ranks: Sequence[int]
) -> CollectiveMismatchError:
    """Build the error for an all_to_all with inconsistent splits."""
    who = [members.ranks[rank] for rank in ranks]
    said = f"what one rank sends is not what the other expects, between {named(who)}; my splits "
    said += f"{list(operation.input_splits)} -> {list(operation.output_splits)}"
    return _error(members, operation, said, who)


def message_error(
    members: Members, operation: Operation, ranks: Sequence[int]
) -> CollectiveMismatchError:
    """Build the error for a send and a receive whose dtypes or sizes differ."""
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
