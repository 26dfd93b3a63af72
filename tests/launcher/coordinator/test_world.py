"""What is known of an attempt on all its nodes."""

from __future__ import annotations

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator import decide
from echelon.launcher.coordinator.gathering.roster import Node
from echelon.launcher.coordinator.world import World
from echelon.recorder.stall.watchdog import StallRule


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
    assert world.ranks_lost_first() == lost


@pytest.mark.parametrize(
    ("ends", "earlier", "lost"),
    [
        ([(2, None), (3, None)], {2, 3}, []),
        ([(2, None), (3, None), (0, 1)], {2, 3}, []),
        ([(0, -9), (2, None), (3, None)], {0}, [2, 3]),
        ([(3, -9), (2, None)], {3}, [2]),
    ],
    ids=["only survived", "an error after it", "after a survived kill", "without its killed rank"],
)
def test_a_loss_that_was_survived_is_the_root_of_nothing_later(ends, earlier, lost):
    world = _world()
    world.lost = ["b"]
    for rank, code in ends:
        world.note_ended(rank, code)
    assert world.ranks_lost_first(earlier) == lost


def test_ranks_of_a_late_node_are_no_part_of_the_world_until_they_are_admitted():
    world = _world()
    ranks = world.grow(Node(name="c", host="three", num_workers=2), 1)
    assert (ranks, world.size, world.node_of(5)) == (range(4, 6), 4, "c")
    world.note_ended(0, 1)
    assert world.ranks_lost_first() == []
    assert world.lost_earlier([], is_stall=True).ranks == {}
    assert (world.present, world.members) == (["a", "b", "c"], ["a", "b"])
    world.lost = ["c"]
    assert world.ranks_lost_for_good == world.ranks_lost_first() == []
    world.lost = []
    ended, epoch = world.admit(4)
    assert world.size == 5
    world.take_back(4, ended, epoch)
    assert world.size == 4
    world.admit(5)
    assert (world.num_members, world.members) == (5, ["a", "b", "c"])
    assert (world.size, world.lost_earlier([]).ranks) == (6, {4: 1})
    world.admit(4)
    world.note_ended(5, None)
    assert world.size == 6


def test_a_rank_that_has_yet_to_join_shows_no_progress():
    world = _world()
    world.grow(Node(name="c", host="three", num_workers=1), 1)
    row = [4, True, 0, -1, 7, True, 0]
    world.note_sights("c", m.Sights(attempt=0, ranks=[row], folded=[]), 1)
    assert not world.records
    world.admit(4)
    world.note_sights("c", m.Sights(attempt=0, ranks=[row], folded=[]), 2)
    assert len(world._sights) == 1


def test_a_node_whose_ranks_have_all_closed_their_rings_shows_what_it_sees_from_outside():
    world = _world()
    second = 1_000_000_000
    waits = m.Sights(attempt=0, folded=[0, 1, 100, 100, 0, 7, 0], ranks=[])
    world.note_sights("a", waits, 100 * second)
    computes = [[rank, 1, 0, -1, 3, 0, 0] for rank in (0, 1)]
    world.note_sights("a", m.Sights(attempt=0, folded=[], ranks=computes), 300 * second)
    assert world.look(300 * second) is None


def test_a_dump_is_named_by_the_rank_that_wrote_it_and_not_by_the_one_that_waits_longest():
    second = 1_000_000_000
    world = _world()
    for dumps, dumped_rank in ((0, -1), (1, 0)):
        row = [0, 1, 100, 100, 1, 7, dumps]  # rank 1 has waited for longest
        seen = m.Sights(attempt=0, folded=row, ranks=[], dumped_rank=dumped_rank)
        world.note_sights("a", seen, second)
        stall = world.look(second)
    assert stall is not None
    assert stall.reason == "rank 0 wrote a dump of torch's flight recorder"
