"""Settings of a group, for callers that hand them on as one object."""

from __future__ import annotations

from dataclasses import dataclass

REDUCTIONS = ("fast", "rank_ordered")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a group computes.

    Attributes:
        reduction: "fast" leaves the order of summation to the backend; "rank_ordered" sums in rank
            order, so that results are the same bits on every backend and every run.
    """

    reduction: str = "fast"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction {self.reduction!r} is not known; use one of {', '.join(REDUCTIONS)}"
            )
