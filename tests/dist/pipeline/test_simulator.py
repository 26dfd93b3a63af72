"""What a simulation says beyond the closed forms: links, memory, the critical path, pictures."""

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from echelon.dist.pipeline import Costs, PlanError, schedule, simulate
from echelon.dist.pipeline.plan.plan import Plan
from echelon.dist.pipeline.simulation.grid import draw_grid, draw_summary
from echelon.dist.pipeline.simulation.picture import draw_svg
from echelon.dist.pipeline.simulation.search import Load, search
from echelon.dist.pipeline.simulation.trace import draw_trace


def test_latency_is_paid_on_the_way_there_and_back():
    plan = schedule("gpipe", 3, 1)
    assert simulate(plan).makespan == 9
    assert simulate(plan, costs=Costs(latency=0.5)).makespan == 9 + 4 * 0.5


def test_messages_of_one_link_share_its_bandwidth():
    """Two outputs of 10 bytes over a link of 1 byte a unit: the second waits for the first."""
    plan = schedule("gpipe", 2, 2)
    costs = Costs(bandwidth=1.0, message_bytes=(10, 0))
    starts = [slot.start for slot in simulate(plan, costs=costs).slots[1]]
    assert starts[:2] == [1 + 10, 1 + 10 + 10]


def test_stages_may_cost_differently():
    plan = schedule("1f1b", 2, 4)
    uneven = simulate(plan, forward=[1, 3], input_grad=[1, 3], weight_grad=[1, 3])
    assert uneven.makespan == 4 * 9 + 1 + 2  # the slow stage never idles, between the ramps
    with pytest.raises(ValueError, match="forward has 3 numbers, but there are 2 stages"):
        simulate(plan, forward=[1, 2, 3])
    with pytest.raises(ValueError, match="must not be negative"):
        simulate(plan, forward=-1.0)


def test_memory_is_counted_in_bytes_of_each_stage():
    plan = schedule("1f1b", 2, 4)
    found = simulate(plan, costs=Costs(activation_bytes=(100, 7)))
    assert found.peak_activations == [2, 1]
    assert found.peak_bytes == [200, 7]


def test_the_critical_path_is_as_long_as_the_makespan():
    for name in ("1f1b", "zbv", "interleaved_1f1b"):
        found = simulate(schedule(name, 4, 8), costs=Costs(forward=2, latency=0.25))
        path = found.critical_path
        assert path[0].start == 0
        assert path[-1].end == found.makespan
        for one, other in itertools.pairwise(path):
            assert other.start - one.end in (0, 0.25)  # it waited for exactly that


def test_a_plan_that_stops_has_no_makespan():
    with pytest.raises(PlanError, match="deadlock"):
        simulate(Plan.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))


def test_a_grid_shows_each_step_of_each_rank():
    assert draw_grid(simulate(schedule("1f1b", 2, 2), 1, 0.5, 0.5)).splitlines() == [
        "   rank 0 rank 1",
        "0  0F0    .",
        "1  0F1    1F0",
        "2  .      1B0",
        "3  0B0    1F1",
        "4  .      1B1",
        "5  0B1    .",
    ]
    assert "makespan 6, bubble 33.3%" in draw_summary(simulate(schedule("1f1b", 2, 2), 1, 0.5, 0.5))
    with pytest.raises(ValueError, match="too long"):
        draw_grid(simulate(schedule("1f1b", 2, 2)), step=0.001)


@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_pictures_and_traces_are_whole(name):
    found = simulate(schedule(name, 4, 8))
    root = ElementTree.fromstring(draw_svg(found))
    num_computations = sum(len(s.action.computations) for row in found.slots for s in row)
    titles = [element for element in root.iter() if element.tag.endswith("title")]
    assert len(titles) == num_computations
    events = json.loads(draw_trace(found))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == sum(len(row) for row in found.slots)
    assert {event["tid"] for event in spans} == {0, 1, 2, 3}
    assert max(event["ts"] + event["dur"] for event in spans) == found.makespan * 1000


def test_the_search_prefers_short_and_keeps_to_the_memory():
    load = Load(forward=8, input_grad=8, weight_grad=8, activation_bytes=8)
    free = search(4, [8], load)
    makespans = [found.makespan for found in free]
    assert makespans == pytest.approx(sorted(makespans))
    assert makespans[0] < 25.5  # better than any named schedule of two chunks
    tight = search(4, [8], load, memory_bytes=4)
    assert {found.plan.name for found in tight} < {found.plan.name for found in free}
    assert all(max(found.peak_bytes) <= 4 for found in tight)
    assert tight[0].plan.name == "interleaved_zero_bubble"
    with pytest.raises(ValueError, match="try more micro-batches"):
        search(4, [8], load, memory_bytes=0.1)


def test_the_search_weighs_overhead_against_bubbles():
    """Where every action costs much besides, few large ones win."""
    load = Load(forward=8, input_grad=8, weight_grad=8, overhead=2)
    best = search(4, [8], load)[0]
    assert best.plan.num_chunks == 1


def _command(*arguments):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from echelon.dist.pipeline.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def test_the_commands_work_without_torch(tmp_path):
    plan = tmp_path / "plan.csv"
    files = ["--svg", str(tmp_path / "p.svg"), "--trace", str(tmp_path / "p.json")]
    shown = _command("show", "zbv", "-p", "4", "-m", "8", "--csv", str(plan), "--lowered", *files)
    assert shown.returncode == 0, shown.stderr
    assert "makespan 25.5, bubble 5.9%" in shown.stdout
    assert (tmp_path / "p.svg").stat().st_size > 1000
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert "8 micro-batches" in _command("check", str(plan)).stdout
    plan.write_text("0F0,0B0\n1B0,1F0\n")
    wrong = _command("check", str(plan))
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert "row 1, column 0: 1B0 is before 1F0" in wrong.stderr
    assert _command("search", "-p", "2", "-m", "4").stdout.splitlines()[1].split()[1].isdigit()
