"""The losses that the benchmark's campaign draws, and what its table counts. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.losses import peers
from benchmarks.losses.plan import (
    HOST,
    HOSTS,
    LAYOUTS,
    SAVE_EVERY,
    TORCHRUN,
    TOTAL,
    compared,
    plan_of,
)
from benchmarks.losses.recovery import Loss, recovery
from benchmarks.losses.table import is_right, kind_of, num_losses, table


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plans_are_the_same_each_time_and_take_no_rank_twice(layout):
    plans = [plan_of(layout, number) for number in range(200)]
    assert plans == [plan_of(layout, number) for number in range(200)]
    for plan in plans:
        lost = [rank for fault in plan.faults for rank in fault.ranks]
        assert len(lost) == len(set(lost)) < plan.num_nodes * plan.ranks_per_node, plan
        assert all(fault.step < TOTAL - SAVE_EVERY for fault in plan.faults), plan
        assert plan.faults[0].moment != "recovery", "no loss precedes it"


def test_a_node_is_taken_with_all_ranks_that_it_has_left():
    for plan in (plan_of(HOSTS, number) for number in range(200)):
        gone = set[int]()
        for fault in plan.faults:
            assert 0 not in fault.nodes, "it hosts the store"
            left = {2 * node + place for node in fault.nodes for place in range(2)} - gone
            assert not fault.nodes or left == set(fault.ranks), plan
            gone.update(fault.ranks)


def test_each_layout_draws_what_the_table_has_a_row_for():
    drawn = {
        (plan.layout, fault.how)
        for layout in LAYOUTS
        for plan in (plan_of(layout, number) for number in range(100))
        for fault in plan.faults
    }
    assert drawn == {
        *((HOST, how) for how in ("kill", "stop", "hang")),
        *((HOSTS, how) for how in ("kill", "hang", "kill node", "cut")),
        (TORCHRUN, "kill"),
    }


def test_both_copies_are_lost_where_two_of_three_hosts_are():
    for number in range(3, 200, 4):
        plan = plan_of(HOSTS, number)
        assert plan.is_sharded
        before = {rank for fault in plan.faults[:-1] for rank in fault.ranks}
        left = set(range(6)) - before - set(plan.faults[-1].ranks)
        assert len({rank // 2 for rank in left}) == 1, plan
        assert plan.faults[-1].step >= max((one.step for one in plan.faults[:-1]), default=0) + 2


def _record(took_s: float | None, **more: Any) -> dict[str, Any]:
    loss = {"how": "kill", "ranks": [2, 3], "nodes": [], "checkpoint": None, "took_s": took_s}
    loss |= {key: more.pop(key) for key in set(more) & set(loss)}
    conditions = {"load_before": 1.0, "load_after": 2.0}
    return {
        "layout": HOSTS, "losses": [loss], "bits": ["a"], "expected": "a", "commit": "c",
        "conditions": conditions, **more,
    }  # fmt: skip


def test_a_row_has_the_losses_of_its_kind():
    records = [_record(1.0), _record(3.0), _record(2.0, how="cut", nodes=[1])]
    assert num_losses(records) == 3
    assert [list(row) for row in table(records).rows] == [
        [f"{HOSTS}: rank killed", "2", "4", "2", "2.00 s", "3.00 s"],
        [f"{HOSTS}: node, link cut", "1", "2", "1", "2.00 s", "2.00 s"],
    ]


def test_both_copies_were_lost_where_the_checkpoint_was_loaded():
    (loss,) = _record(1.0, checkpoint=0)["losses"]
    assert kind_of(HOSTS, loss) == f"{HOSTS}: both copies of a shard, ranks killed"


def test_other_bits_and_failures_are_not_counted_as_the_same():
    wrong = [_record(1.0, bits=["b"]), _record(1.0, bits=["a", "b"]), _record(None, failed="x")]
    assert not any(map(is_right, wrong))
    ((_, losses, _, same, median, _),) = table(wrong).rows
    assert (losses, same, median) == ("3", "0", "1.00 s")


def test_what_is_compared_has_the_same_kill_under_each():
    for number in range(100):
        ours, theirs = compared(HOST, number), compared(TORCHRUN, number)
        assert ours.faults == theirs.faults
        (kill,) = ours.faults
        assert kill.how == "kill"
        assert 0 < kill.step < TOTAL, "a step that follows shows the recovery"


def test_where_all_restart_a_step_that_the_lost_rank_had_finished_is_no_recovery(tmp_path):
    loss = Loss(fault=compared(TORCHRUN, 1).faults[0], step=3, at_s=10.0)
    (rank,) = loss.fault.ranks
    (tmp_path / "1.commits").write_text("0 7.0 \n1 8.0 \n2 9.0 \n3 40.0 \n")
    (tmp_path / "2.commits").write_text("0 7.0 \n1 8.0 \n2 10.1 \n3 40.0 \n")
    assert rank == 1
    assert recovery(tmp_path, loss, (), restarts=True)["took_s"] == pytest.approx(30.0 - 1.55)
    assert recovery(tmp_path, loss, ())["took_s"] == pytest.approx(0.0)


def test_samples_that_no_step_has_are_counted_where_the_bits_do_not_tell():
    ours = _record(1.0) | {"layout": HOST}
    theirs = _record(3.0, bits=["b"], samples_left_out=4) | {"layout": "torchft, its defaults"}
    found = peers.table([theirs, ours, theirs])
    assert [list(row)[1:] for row in found.rows] == [
        ["1", "1", "1", "0", "1.00 s", "1.00 s"],
        ["2", "2", "0", "8", "3.00 s", "3.00 s"],
    ]
