"""Plans that people wrote: each mistake is told with its row and column, before anything runs."""

import pytest

from echelon.dist.pipeline import Plan, PlanError, schedule
from echelon.dist.pipeline.plan.check import check_plan
from echelon.dist.pipeline.plan.deadlock import find_deadlock
from echelon.dist.pipeline.plan.lower import add_messages, add_sharding

GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
MESSAGES = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"

MISTAKES = [
    ("0F0,0G1\n1F0,1B0\n", 0, 1, "'0G1' is not an action"),
    (GOOD.replace("1F1,1B1", "1B1,1F1"), 1, 2, "1B1 is before 1F1, see row 1, column 3"),
    (GOOD.replace("0B1", "0B0"), 0, 3, "0B0 appears twice, see row 0, column 2"),
    (GOOD.replace(",0B1", ""), 0, 1, "both 0B1 and 0I1 are missing"),
    (GOOD.replace("0F1,", ""), 0, 2, "0F1 is missing"),
    (GOOD.replace("1B0", "1I0"), 1, 1, "1I0 is not followed by 1W0"),
    (GOOD.replace("1B0", "1B0,1W0"), 1, 2, "1W0 is part of 1B0, see row 1, column 1"),
    (GOOD.replace("1B0", "1W0,1I0"), 1, 1, "1W0 is before 1I0"),
    (GOOD.replace("1", "2").replace("F2", "F1").replace("B2", "B1"), 1, 0, "but no stage 1"),
    (GOOD + "1F2,1B2\n", 2, 0, "1F2: stage 1 is on another rank, see row 1, column 0"),
    ("", 0, 0, "the plan contains no computations"),
    (MESSAGES.replace(",0SEND_F0", ""), 1, 0, "1RECV_F0 has no 0SEND_F0 on rank 0"),
    (MESSAGES.replace("1RECV_F0,", ""), 0, 1, "0SEND_F0 has no 1RECV_F0 on rank 1"),
    (MESSAGES.replace("0RECV_B0,0B0", "0B0,0RECV_B0"), 0, 3, "0RECV_B0 is after 0B0"),
    (MESSAGES.replace("0F0,0SEND_F0", "0SEND_F0,0F0"), 0, 0, "0SEND_F0 is before 0F0"),
    (MESSAGES.replace("1SEND_B0", "1SEND_B0,1SEND_F0"), 1, 4, "1SEND_F0: no message is sent"),
    ("0UNSHARD,0F0,0RESHARD,0B0\n", 0, 3, "0B0 runs while stage 0 is sharded"),
    # Each rank's own order is right, and still they wait for each other.
    (
        "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", 0, 1,
        "deadlock: 0B0 waits for the input gradient of stage 1, micro-batch 0, from rank 1; row 1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "row", "column", "said"), MISTAKES)
def test_a_mistake_is_told_with_its_place(text, row, column, said):
    with pytest.raises(PlanError) as caught:
        check_plan(Plan.from_csv(text))
    assert said in str(caught.value)
    assert (caught.value.row, caught.value.column) == (row, column)
    assert f"row {row}, column {column}" in str(caught.value)


def test_a_deadlock_names_every_rank_of_the_ring():
    text, row, column, _ = MISTAKES[-1]
    with pytest.raises(PlanError) as caught:
        check_plan(Plan.from_csv(text))
    assert str(caught.value) == (
        f"row {row}, column {column}: deadlock: 0B0 waits for the input gradient of stage 1, "
        "micro-batch 0, from rank 1; row 1, column 0: 1F1 waits for the output of stage 0, "
        "micro-batch 1, from rank 0"
    )


@pytest.mark.parametrize("text", [GOOD, MESSAGES, "0F0,0I0,0W0\n", ("0F0,1F0,(0F1;1B0)OVERLAP_F_B,"
                                  "0B0,1F1,1B1,0B1\n")])  # fmt: skip
def test_what_people_may_write_passes(text):
    check_plan(Plan.from_csv(text))


def test_blocking_sends_can_deadlock_and_ours_do_not():
    """The order of pytorch#172668: both ranks send before they receive."""
    swapped = Plan.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    check_plan(swapped)
    stuck = find_deadlock(swapped, rendezvous=True)
    assert stuck is not None
    assert "row 0, column 3" in str(stuck)
    assert "0SEND_F1 waits for 1RECV_F1 of rank 1; row 1, column 3: 1SEND_B0 waits for" in str(
        stuck
    )


def test_lowering_leaves_alone_what_somebody_wrote_down():
    plan = Plan.from_csv(MESSAGES)
    assert add_messages(plan).rows == plan.rows
    sharded = add_sharding(plan)
    assert add_sharding(sharded).rows == sharded.rows


def test_sharded_stages_are_gathered_ahead_and_reduced_once():
    row = [str(action) for action in add_sharding(schedule("looped_bfs", 1, 2, 2), keep=0).rows[0]]
    assert row == [
        "0UNSHARD", "0F0", "1UNSHARD", "0F1", "0RESHARD", "1F0", "1F1", "1B0", "0UNSHARD", "1B1",
        "1RESHARD", "1REDUCE_GRAD", "0B0", "0B1", "0RESHARD", "0REDUCE_GRAD",
    ]  # fmt: skip
