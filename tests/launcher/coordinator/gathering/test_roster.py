"""The nodes of the next world, without real nodes and without a clock."""

from __future__ import annotations

import pytest

from echelon.launcher.coordinator.gathering.roster import Node, Roster


def _node(name: str, *, host: str = "", rank: int = -1, is_host: bool = False) -> Node:
    return Node(name=name, host=host or name, num_workers=2, node_rank=rank, is_host=is_host)


def _roster(low: int, high: int, **options) -> Roster:
    roster = Roster(low, high, spares=options.pop("spares", 0), join_timeout_s=100, **options)
    roster.open(0.0)
    return roster


def _names(world) -> list[str] | None:
    return None if world is None else [node.name for node in world]


def test_a_full_world_begins_at_once():
    roster = _roster(2, 2)
    roster.join(_node("a", is_host=True), 1.0)
    assert roster.world(1.0) is None
    roster.join(_node("b"), 1.1)
    assert _names(roster.world(1.1)) == ["a", "b"]


def test_the_last_call_ends_soon_after_the_last_join_and_within_3_s():
    roster = _roster(1, 9)
    roster.join(_node("a"), 1.0)
    assert roster.deadline_s() == pytest.approx(2.0)
    for i in range(5):
        roster.join(_node(f"n{i}"), 1.6 + 0.6 * i)
        assert roster.world(1.6 + 0.6 * i) is None or i == 4
    assert roster.deadline_s() == pytest.approx(4.0)
    assert len(roster.world(4.0)) == 6


def test_one_node_of_one_to_two_waits_one_second():
    roster = _roster(1, 2)
    roster.join(_node("a"), 1.0)
    assert roster.world(1.9) is None
    assert _names(roster.world(2.0)) == ["a"]


def test_after_a_loss_nobody_waits_for_the_lost():
    roster = _roster(1, 2, last_call_s=60)
    roster.join(_node("a", is_host=True), 1.0)
    roster.join(_node("b"), 1.0)
    assert _names(roster.world(1.0)) == ["a", "b"]
    roster.leave("b")
    roster.open(9.0)
    assert _names(roster.world(9.0)) == ["a"]


def test_who_comes_late_is_in_the_next_world():
    roster = _roster(1, 2)
    roster.join(_node("a", is_host=True), 1.0)
    assert _names(roster.world(2.0)) == ["a"]
    roster.join(_node("b"), 5.0)
    roster.open(9.0)
    assert _names(roster.world(9.0)) == ["a", "b"]


def test_a_spare_waits_and_replaces_a_lost_node():
    roster = _roster(2, 2, spares=1)
    for name in ("a", "b", "c"):
        assert roster.join(_node(name, is_host=name == "a"), 1.0) == ""
    assert "the job already has 2 nodes and 1 spare" in roster.join(_node("d"), 1.0)
    assert _names(roster.world(1.0)) == ["a", "b"]
    roster.leave("b")
    roster.open(5.0)
    assert _names(roster.world(5.0)) == ["a", "c"]


def test_a_spare_displaces_no_healthy_node():
    roster = _roster(2, 2, spares=1)
    for name in ("b", "c"):
        roster.join(_node(name), 1.0)
    assert _names(roster.world(1.0)) == ["b", "c"]
    roster.join(_node("a"), 2.0)
    roster.open(3.0)
    assert _names(roster.world(3.0)) == ["b", "c"]
    roster.leave("b")
    roster.open(5.0)
    assert _names(roster.world(5.0)) == ["a", "c"], "the spare takes the lost node's place"


def test_ranks_follow_node_rank_then_host_then_natural_order():
    roster = _roster(4, 4)
    roster.join(_node("x", host="gpu10"), 1.0)
    roster.join(_node("y", host="gpu9"), 1.0)
    roster.join(_node("z", host="zeta", is_host=True), 1.0)
    roster.join(_node("w", host="gpu1", rank=0), 1.0)
    assert _names(roster.world(1.0)) == ["w", "z", "y", "x"]


def test_a_node_rank_is_nobodys_twice():
    roster = _roster(2, 2)
    roster.join(_node("a", rank=1), 1.0)
    assert roster.join(_node("b", rank=1), 1.0) == "another node already has --node-rank 1"


def test_too_few_in_time_is_a_failure_that_names_who_came():
    roster = _roster(3, 3)
    roster.join(_node("a", host="one"), 1.0)
    assert not roster.has_failed(99.0)
    assert roster.has_failed(100.0)
    assert roster.shortage() == "1 of 3 required nodes connected within 100 s (one)"
