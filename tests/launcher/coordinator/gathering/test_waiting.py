"""What a job says that it waits for. Pure."""

from __future__ import annotations

import pytest

from echelon.launcher.coordinator.gathering import waiting


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), "the ranks"),
        ((3,), "rank 3"),
        ((0, 1, 3), "ranks 0, 1 and 3"),
        (tuple(range(8)), "ranks 0, 1, 2, 3, 4, 5, 6 and 7"),
        (tuple(range(20)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_ranks_are_listed_with_their_number_if_there_are_many(ranks, text):
    assert waiting._ranks(ranks) == text
