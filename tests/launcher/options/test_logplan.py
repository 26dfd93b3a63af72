"""torchrun's log options, with ranks above 9 and ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launcher.options.logplan import LogPlan, Std, parse_filters, parse_ranks, parse_streams
from echelon.launcher.output.fold import Fold


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {0: 0, 5: 0}),
        ("3", {0: 3, 12: 3}),
        ("0:3,1:2", {0: 3, 1: 2, 2: 0}),
        ("10:3", {1: 0, 10: 3}),
        ("0-7:1,12:2", {0: 1, 7: 1, 8: 0, 12: 2}),
    ],
)
def test_streams_per_rank(text, expected):
    choice = parse_streams(text)
    assert {rank: int(choice.of(rank)) for rank in expected} == expected


@pytest.mark.parametrize("text", ["4", "x", "0:4", "0:3,1", "3-1:1", "-1:2", "0:"])
def test_bad_streams_say_what_is_wrong(text):
    with pytest.raises(ValueError, match=r"expected .*, got "):
        parse_streams(text)


def test_what_is_shown():
    plan = LogPlan(
        redirects=parse_streams("3"), tee=parse_streams("0:1"), shown_ranks=parse_ranks("0-1")
    )
    assert plan.is_shown(0, Std.OUT)
    assert not plan.is_shown(0, Std.ERR)
    assert not plan.is_shown(1, Std.OUT)
    assert not LogPlan(shown_ranks=parse_ranks("0")).is_shown(1, Std.OUT)
    assert LogPlan().is_shown(7, Std.ERR)


def test_log_dir_has_torchruns_layout():
    plan = LogPlan(log_dir=Path("logs"))
    assert plan.folder(Path("r"), "job_x1", 2, 5) == Path("logs/job_x1/attempt_2/5")
    assert LogPlan().folder(Path("r"), "job_x1", 2, 5) == Path("r")


def test_filters_may_hold_commas():
    assert parse_filters("apple,orange") == ("apple", "orange")
    assert parse_filters("a,,b,c") == ("a,b", "c")
    assert parse_filters("") == ()


def test_a_line_of_many_ranks_is_shown_once():
    fold = Fold()
    for rank in (0, 1, 2, 5):
        assert fold.add(rank, b"warning", 1.0 + rank / 100) == []
    assert fold.due(1.1) == []
    assert fold.deadline_s == pytest.approx(1.2)
    assert fold.due(1.2) == [b"0-2,5| warning\n"]
    assert fold.deadline_s is None


def test_lines_of_a_rank_keep_their_order():
    fold = Fold()
    fold.add(0, b"one", 1.0)
    fold.add(1, b"one", 1.01)
    assert fold.add(0, b"two", 1.02) == [b"0-1| one\n"]
    assert fold.add(0, b"two", 1.03) == [b"0| two\n"], "a repeated line is two lines"
    assert fold.flush() == [b"0| two\n"]


def test_a_line_that_another_rank_prints_first_does_not_overtake():
    fold = Fold()
    fold.add(0, b"A", 1.0)
    fold.add(1, b"B", 1.05)
    out = fold.add(1, b"A", 1.1) + fold.flush()
    assert [line for line in out if line.startswith((b"1|", b"0-1|"))] == [b"1| B\n", b"1| A\n"]
