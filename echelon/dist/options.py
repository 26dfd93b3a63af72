"""Define the settings of a group, which correspond to torch's `pg_options`."""

from __future__ import annotations

from dataclasses import dataclass

REDUCTIONS = ("fast", "rank_ordered")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The settings of a group.

    Attributes:
        reduction: "fast" leaves the order of summation to the backend. "rank_ordered" sums in rank
            order, which makes results bitwise identical on all backends.

    Example:
        >>> Options(reduction="rank_ordered").reduction
        'rank_ordered'
    """

    reduction: str = "fast"

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"unknown reduction {self.reduction!r}; use one of {', '.join(REDUCTIONS)}"
            )
