"""Who is to blame for a message that did not arrive, by what every rank says it waits for."""

from __future__ import annotations

import pytest

from echelon.dist.membership.answer import Answer, origins

IDLE = Answer(3)


def waits_for(*peers: int) -> Answer:
    return Answer(3, peers=peers)


def inside(number: int) -> Answer:
    """The answer of a rank inside a collective, which it has called."""
    return Answer(number + 1, collectives=[number])


@pytest.mark.parametrize(
    ("answers", "silent", "expected"),
    [
        pytest.param({1: IDLE}, [], ([1], []), id="computes"),
        pytest.param({}, [1], ([1], []), id="silent"),
        pytest.param({1: waits_for(2), 2: IDLE}, [], ([2], [1]), id="waits for one that computes"),
        pytest.param({1: waits_for(2)}, [2], ([2], [1]), id="waits for a silent one"),
        pytest.param({1: waits_for(2), 2: waits_for(3)}, [3], ([3], [1, 2]), id="chain"),
        pytest.param({1: waits_for(2, 3), 2: IDLE, 3: IDLE}, [], ([2, 3], [1]), id="fork"),
        pytest.param({1: waits_for(0)}, [], ([1], []), id="waits for the rank that asks"),
        pytest.param({1: waits_for(2), 2: waits_for(1)}, [], ([1], []), id="circle"),
        pytest.param({1: inside(3), 2: IDLE, 3: inside(3)}, [], ([2], [1]), id="collective"),
        pytest.param({1: inside(3), 2: inside(3)}, [3], ([3], [1]), id="a silent one is missing"),
        pytest.param({1: inside(3), 2: inside(3)}, [], ([1], []), id="only the asker is missing"),
        pytest.param({1: inside(2)}, [], ([1], []), id="all have called it"),
    ],
)
def test_the_end_of_the_chain_is_named(answers, silent, expected):
    assert origins(0, [1], {0: waits_for(1), **answers}, silent) == expected
