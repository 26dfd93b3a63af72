"""Fold lines that many ranks print at about the same time into one line, such as `0-7| line`.

A line is held for a fifth of a second after the first rank prints it. Ranks that print the same
line within that time are added to its label. The lines of one rank are always shown in order.
"""

from __future__ import annotations

from dataclasses import dataclass

HOLD_S = 0.2


@dataclass(slots=True)
class _Held:
    line: bytes
    ranks: list[int]
    due_s: float


class Fold:
    """Lines that are held back until other ranks have had time to print the same lines.

    The caller passes the current time to the methods that need it.
    """

    def __init__(self) -> None:
        self._held: dict[bytes, _Held] = {}

    @property
    def deadline_s(self) -> float | None:
        """The time at which the next line is due; None if no line is held back."""
        return min((held.due_s for held in self._held.values()), default=None)

    def add(self, rank: int, line: bytes, now_s: float) -> list[bytes]:
        """Add a line; return the lines that must be shown before it."""
        held = self._held.get(line)
        if held is not None and rank not in held.ranks and not self._has_later(rank, held):
            held.ranks.append(rank)
            return []
        out = self._release(rank)
        self._held[line] = _Held(line, [rank], now_s + HOLD_S)
        return out

    def _has_later(self, rank: int, held: _Held) -> bool:
        """Return whether any line that `rank` printed after `held` is also being held."""
        return any(h.due_s >= held.due_s and rank in h.ranks for h in self._held.values())

    def due(self, now_s: float) -> list[bytes]:
        """Return the lines whose holding time has expired."""
        return self._take([h for h in self._held.values() if h.due_s <= now_s])

    def flush(self) -> list[bytes]:
        """Return all lines that are being held back."""
        return self._take(list(self._held.values()))

    def _release(self, rank: int) -> list[bytes]:
        """Stop holding back a rank's lines and all lines older than its newest; return them all."""
        mine = [h.due_s for h in self._held.values() if rank in h.ranks]
        if not mine:
            return []
        return self._take([h for h in self._held.values() if h.due_s <= max(mine)])

    def _take(self, held: list[_Held]) -> list[bytes]:
        for one in held:
            del self._held[one.line]
        return [_spans(one.ranks).encode() + b"| " + one.line + b"\n" for one in held]


def _spans(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
