"""Schedule the pairwise measurements.

All pairs of n members are measured in n - 1 rounds (n rounds if n is odd). In each round, a member
belongs to at most one pair. The schedule uses the circle method of round-robin tournaments.
"""

from __future__ import annotations

Pair = tuple[int, int]


def rounds(num_members: int) -> list[list[Pair]]:
    """Return the pairs to measure per round. Every pair (a, b) with a < b occurs exactly once."""
    circle: list[int | None] = list(range(num_members))
    if num_members % 2:
        circle.append(None)  # its partner pauses
    found = []
    for _ in range(len(circle) - 1):
        ends = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in ends if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found
