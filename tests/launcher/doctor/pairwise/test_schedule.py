"""Who measures with whom in which round."""

from __future__ import annotations

from itertools import combinations

import pytest

from echelon.launcher.doctor.pairwise.schedule import rounds


@pytest.mark.parametrize("number", range(12))
def test_each_pair_occurs_once_and_each_member_once_per_round(number):
    found = rounds(number)
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == list(combinations(range(number), 2))
    for one in found:
        members = [member for pair in one for member in pair]
        assert len(members) == len(set(members)), one


@pytest.mark.parametrize(("number", "num_rounds"), [(2, 1), (3, 3), (8, 7), (9, 9), (64, 63)])
def test_the_time_grows_with_the_members_not_their_pairs(number, num_rounds):
    assert len(rounds(number)) == num_rounds
