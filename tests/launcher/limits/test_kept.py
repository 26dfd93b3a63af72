"""The learned limits as nodes keep them, and as `echelon status` shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echelon.launcher.limits.kept import MAX_ROWS, as_lines, read_limits, write_limits
from echelon.launcher.limits.node import Row

ROW = Row(name="world", site="train.py:9 step", is_span=False, limit_s=10.0, usual_s=0.2,
          longest_s=0.4, num=600)  # fmt: skip


def test_what_nodes_keep_is_joined_and_shown_with_its_limit(tmp_path: Path) -> None:
    for number, row in enumerate([ROW, replace(ROW, limit_s=24.0, longest_s=8.0)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_limits(folder, [row, replace(ROW, site="evaluate.py:3", limit_s=None)])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/limits.json").write_text('{"rows": [{"name": 1}]}')
    folders = [tmp_path / name for name in ("0", "1", "broken", "absent")]
    watched, others = as_lines(read_limits(folders))
    assert watched.startswith("watched at 24 s: train.py:9 step in group 'world' ")
    assert watched.endswith("(99.9 % of 1200 took at most 0.2 s, the longest 8 s)")
    assert others == "watched at --stall-timeout alone: 1 other call sites and phases"
    assert as_lines([]) == []


def test_a_call_site_without_a_limit_on_one_node_has_none(tmp_path: Path) -> None:
    for number, limit_s in enumerate((10.0, None)):
        (tmp_path / str(number)).mkdir()
        write_limits(tmp_path / str(number), [replace(ROW, limit_s=limit_s)])
    (row,) = read_limits(tmp_path / name for name in ("0", "1"))
    assert row.limit_s is None


def test_files_are_bounded_and_a_folder_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    write_limits(tmp_path, [replace(ROW, site=f"train.py:{n}") for n in range(5 * MAX_ROWS)])
    assert len(read_limits([tmp_path])) == MAX_ROWS
    write_limits(tmp_path / "gone", [ROW])
