"""The benchmarks' common ground: fair rounds, kept results, tables that come from them alone."""

from __future__ import annotations

import argparse
import json
import os

import pytest

from benchmarks.runner import machine, options, rounds
from benchmarks.runner.table import Table
from tools.docs import bench

PAGE = """# Page

## Some rows, 2 of them

| a | b |
|---|---:|
| 1 | |
| | x \\| y |

End.
"""


def cases(taken):
    def side(name):
        return lambda number: taken.append((number, name)) or float(number)

    return [
        rounds.Case(name="one", sides={"ours": side("one ours"), "peer": side("one peer")}),
        rounds.Case(
            name="two",
            sides={"ours": side("two ours"), "peer": side("two peer")},
            rounds=2,
            side_rounds={"peer": 1},
        ),
    ]


def test_every_side_has_its_turn_in_each_round_and_no_more_than_it_should():
    taken: list[tuple[int, str]] = []
    found = rounds.measure(cases(taken), 3, seed=1)
    assert found == {
        "one": {"ours": [0.0, 1.0, 2.0], "peer": [0.0, 1.0, 2.0]},
        "two": {"ours": [0.0, 1.0], "peer": [0.0]},
    }
    assert [number for number, _ in taken] == [0] * 4 + [1] * 3 + [2] * 2


def test_the_order_is_drawn_for_each_round_and_repeats_with_its_seed():
    orders = []
    for seed in (1, 1, 2):
        taken: list[tuple[int, str]] = []
        rounds.measure(cases(taken), 8, seed=seed)
        orders.append([name for _, name in taken])
    assert orders[0] == orders[1] != orders[2]
    taken = []
    rounds.measure(cases(taken)[:1], 40, seed=1)
    firsts = {taken[place][1] for place in range(0, len(taken), 2)}
    assert firsts == {"one ours", "one peer"}


def test_a_side_may_yield_several_figures():
    case = rounds.Case(name="one", sides={"ours": lambda _: {"": 2.0, "cpu": 1.0}})
    assert rounds.measure([case], 2) == {"one": {"ours": [2.0, 2.0], "ours cpu": [1.0, 1.0]}}


def test_no_round_begins_after_the_limit_once_enough_are_done():
    case = rounds.Case(name="one", sides={"ours": lambda _: 1.0})
    assert rounds.measure([case], 9, limit_s=0.0, least_rounds=3) == {"one": {"ours": [1.0] * 3}}


def test_a_ratio_above_one_is_in_our_favor():
    assert rounds.ratio([4.0], [2.0], higher_is_better=True) == 2.0
    assert rounds.ratio([4.0], [2.0], higher_is_better=False) == 0.5
    assert rounds.spread([1.0, 2.0, 3.0]) == "2.00 (1.00 to 3.00)"


def test_a_result_is_kept_with_its_conditions_and_read_back(tmp_path, capsys):
    path = tmp_path / "kept.json"
    asked = argparse.Namespace(json=path, markdown=tmp_path / "table.md", keep=None)
    conditions = machine.Conditions(("numpy", "no_such_package"))
    columns = (("case", "left"), ("ours", "right"))
    samples = {"one": {"ours": [1.5, float("inf")]}}
    options.finish(asked, conditions, columns, [["one", "1.5"]], samples)
    kept = json.loads(path.read_text())
    assert kept["samples"] == {"one": {"ours": [1.5, None]}}
    assert list(kept["conditions"]["peers"]) == ["numpy"]
    table = Table.from_json(path.read_text())
    assert table.markdown() == "| case | ours |\n|---|---:|\n| one | 1.5 |"
    assert table.markdown() in capsys.readouterr().out
    assert Table.from_json(table.to_json()) == table


def test_this_process_can_be_pinned():
    before = os.sched_getaffinity(0)
    try:
        machine.pin(0, machine.CORES[:1])
        assert os.sched_getaffinity(0) == set(machine.CORES[:1])
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "PAGES", tmp_path / "docs")
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    return page


def test_a_table_written_by_hand_is_found_kept_and_written_again(page):
    (fault,) = bench.stale()
    assert "written by hand" in fault
    page.write_text(bench.transcribe(page))
    assert bench.stale() == []
    kept = page.parents[1] / "results" / "page" / "some-rows-2-of-them.json"
    assert Table.from_json(kept.read_text()).rows == [["1", ""], ["", "x \\| y"]]
    assert bench.written(page) == page.read_text()
    assert "| 1 | |\n| | x \\| y |" in page.read_text()


def test_another_kept_result_makes_the_page_stale(page):
    page.write_text(bench.transcribe(page))
    Table(["a", "b"], ["left", "right"], [["7", "8"]]).save(
        page.parents[1] / "results" / "page" / "some-rows-2-of-them.json"
    )
    (fault,) = bench.stale()
    assert "make bench-docs" in fault
    page.write_text(bench.written(page))
    assert "| 7 | 8 |" in page.read_text()
    assert bench.stale() == []


def test_a_damaged_result_is_refused():
    with pytest.raises(ValueError, match="2 columns"):
        Table.from_json('{"columns": ["a", "b"], "alignments": ["left", "left"], "rows": [["1"]]}')
    with pytest.raises(ValueError, match="rows"):
        Table.from_json('{"columns": [], "alignments": []}')
