"""Actions and their text: ours, and that it is PyTorch's."""

import pytest

from echelon.dist.pipeline import Action, Plan, PlanError, schedule
from echelon.dist.pipeline.plan.action import Kind
from echelon.dist.pipeline.plan.catalog import NAMES
from echelon.dist.pipeline.plan.lower import add_messages, add_sharding

TEXTS = [
    "2F0", "13B7", "0I1", "4W10", "1SEND_F3", "2RECV_F3", "2SEND_B3", "1RECV_B3",
    "0UNSHARD", "0RESHARD", "3REDUCE_GRAD", "(0F4;3B1)OVERLAP_F_B",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_reads_back_as_the_same_action(text):
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "0UNSHARD1", "2F0x", "(0F1;1B0)", "(0SEND_F1)OVERLAP_F_B", "2F0 2F1"],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ValueError, match=r"action|micro-batch|computation"):
        Action.parse(text)


@pytest.mark.parametrize("name", NAMES)
def test_torch_reads_our_csv_and_we_read_torchs(name, tmp_path):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    plan = add_sharding(add_messages(schedule(name, 4, 8)))
    for row in plan.rows:
        for action in row:
            theirs = schedules._Action.from_str(str(action))
            assert str(theirs) == str(action)
            assert Action.parse(str(theirs)) == action
    reader = schedules.PipelineScheduleMulti.__new__(schedules.PipelineScheduleMulti)
    reader.pipeline_order = {}
    reader._n_microbatches = 8
    reader._num_stages = plan.num_stages
    reader._validate_and_set_stage_mapping = lambda _: None
    compute = schedule(name, 4, 8)
    compute.save(tmp_path / "ours.csv")
    reader._load_csv(str(tmp_path / "ours.csv"))
    assert {r: [str(a) for a in row] for r, row in reader.pipeline_order.items()} == {
        r: [str(a) for a in row] for r, row in enumerate(compute.rows)
    }
    for row in reader.pipeline_order.values():
        row.insert(1, None)  # an idle slot, as torch writes it
    reader._dump_csv(str(tmp_path / "theirs.csv"))
    assert Plan.load(tmp_path / "theirs.csv").rows == compute.rows


def test_torchs_own_zero_bubble_schedule_can_be_read_and_checked(tmp_path):
    """Its CSV holds idle slots; a place in an error counts them, as the file does."""
    text = "0F0,,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    path = tmp_path / "torch.csv"
    path.write_text(text)
    assert Plan.load(path).num_microbatches == 2
    path.write_text(text.replace("1F1,1B1", "1B1,1F1"))
    with pytest.raises(PlanError, match=r"row 1, column 3: 1B1 is before 1F1") as caught:
        Plan.load(path)
    assert (caught.value.row, caught.value.column) == (1, 3)


def test_overlaps_show_their_parts():
    action = Action.parse("(0F4;3B1)OVERLAP_F_B")
    assert [part.kind for part in action.computations] == [Kind.FORWARD, Kind.BACKWARD]
    assert action.is_compute
