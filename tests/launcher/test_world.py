"""What is known of an attempt on all its nodes."""

from __future__ import annotations

import pytest

from echelon.launcher import decide
from echelon.launcher.world import World
from echelon.recorder.watchdog import StallRule


def _world() -> World:
    return World(
        number=0,
        attempt=decide.Attempt(4, grace_s=1.0, stop_on_stall=False),
        rule=StallRule(60.0, 0),
        nodes={"a": range(2), "b": range(2, 4)},
        hosts={"a": "one", "b": "two"},
    )


@pytest.mark.parametrize(
    ("ends", "lost"),
    [
        ([(2, None), (3, None), (0, 1)], [2, 3]),
        ([(0, 0), (3, None), (2, None)], [2, 3]),
        ([(0, 1), (2, None), (3, None)], []),
        ([(0, 0), (1, 0)], []),
    ],
    ids=["loss first", "a good end before", "a failure before", "all well"],
)
def test_a_loss_is_the_root_if_nothing_failed_before_it(ends, lost):
    world = _world()
    world.lost = ["b"]
    for rank, code in ends:
        world.note_ended(rank, code)
    assert world.ranks_lost_first == lost
