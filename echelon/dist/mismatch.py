"""Say who called something else: the vote over what the members of a group called.

Every rank sees the same calls, so every rank raises the same error: the minority is named; where
there is no majority, both sides are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from echelon.dist.backends.interface import Members
from echelon.dist.backends.operation import Operation
from echelon.errors import CollectiveMismatchError

_MAX_SIDES = 3


def mismatch_error(
    members: Members, operation: Operation, *, calls: Sequence[bytes], texts: Sequence[str]
) -> CollectiveMismatchError:
    """Build the error of a mismatch.

    Args:
        calls: per group rank, what it called in comparable form.
        texts: per group rank, the same for people.
    """
    votes = Counter(calls).most_common()
    tied = len(votes) > 1 and votes[0][1] == votes[1][1]
    majority = None if tied else votes[0][0]
    odd = [rank for rank, call in enumerate(calls) if call != majority]
    ranks = [members.ranks[rank] for rank in odd]
    sides = []
    for call, _ in [vote for vote in votes if vote[0] != majority][:_MAX_SIDES]:
        side = [rank for rank in range(len(calls)) if calls[rank] == call]
        named = ", ".join(f"rank {members.ranks[rank]}" for rank in side[:8])
        sides.append(f"{named} called {texts[side[0]]}")
    said = "; ".join(sides)
    if majority is not None:
        said += f", the others {texts[calls.index(majority)]}"
    return CollectiveMismatchError(
        f"{operation.kind} #{operation.sequence} in group {members.name!r} "
        f"({members.size} ranks): {said}",
        group=members.name,
        operation=operation.kind,
        sequence=operation.sequence,
        ranks=ranks,
    )
