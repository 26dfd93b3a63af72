"""`echelon plot`: series as they are drawn, and files that can be opened."""

from __future__ import annotations

import json
import math
import sys

import pytest

from echelon.cli import main
from echelon.train.figures.series import Run, smoothed, width_for

NAN = math.nan


def write(path, lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_series_is_in_order_and_the_last_value_of_a_step_counts(tmp_path):
    lines = [
        {"step": 3, "loss": 1.0}, {"step": 1, "loss": 3.0}, {"step": 2, "note": 1.0},
        {"step": 3, "loss": 0.5}, {"step": 4, "loss": None, "not_finite": ["loss"]},
        {"step": 5, "loss": "x"},
    ]  # fmt: skip
    steps, values = Run("a", tmp_path, lines).series("loss")
    assert steps == [1, 3, 4]
    assert values[:2] == [3.0, 0.5]
    assert math.isnan(values[2])


def test_smoothing_drops_single_outliers_and_keeps_gaps_and_the_beginning():
    assert smoothed([9.0, 1.0, 50.0, 1.0, 1.0], 3) == [9.0, 9.0, 1.0, 1.0, 1.0]
    assert [math.isnan(v) for v in smoothed([1.0, NAN, 1.0], 3)] == [False, True, False]
    assert smoothed([3.0, 1.0], 1) == [3.0, 1.0]
    assert [width_for(n) for n in (1, 49, 50, 1000)] == [1, 1, 3, 41]


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_runs_are_drawn_over_each_other(tmp_path, capsys, ending):
    pytest.importorskip("matplotlib", reason="matplotlib: not there")
    names = ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "mfu", "data_wait")
    for run in ("one", "two"):
        lines = [{"step": s, **dict.fromkeys(names, s * 1.5)} for s in range(1, 80)]
        write(tmp_path / run / "figures.jsonl", [*lines, {"step": 79, "validation_loss": 3.0}])
    out = tmp_path / f"plot.{ending}"
    assert main(["plot", str(tmp_path / "one"), f"b={tmp_path / 'two'}", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    content = out.read_bytes()
    beginning = {"png": b"\x89PNG", "svg": b"<?xml", "html": b"<!doctype html>"}[ending]
    assert content.startswith(beginning)
    if ending == "svg":
        for text in (
            b"Gradient norm",
            b"MFU, % of the peak",
            b"validation 3",
            b"one 118",
            b"b 118",
        ):
            assert text in content
        assert b"Peak memory" not in content


@pytest.mark.parametrize(
    "lines",
    [
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": None, "not_finite": ["loss"]}, {"step": 2, "loss": 2.0}],
        [{"step": s, "loss": 0.0, "gradient_norm": 0.0} for s in range(60)],
        [{"step": s, "gradient_norm": 10.0**s} for s in range(-9, 9)],
    ],
)
def test_runs_at_the_limits_are_drawn(tmp_path, lines):
    pytest.importorskip("matplotlib", reason="matplotlib: not there")
    log = write(tmp_path / "run" / "log.jsonl", lines)
    assert main(["plot", str(log)]) == 0
    assert (tmp_path / "run" / "log.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        ([], [], "is empty"),
        ([{"step": 1}], [], "contains none of"),
        ([{"step": 1, "loss": None}], [], "contains none of"),
        ([{"step": 1, "loss": 1.0}], ["--out", "plot.doc"], "must end in"),
        ([{"step": 1, "loss": 1.0}], ["--out", "/nowhere/a.png"], "No such file"),
        ([{"loss": 1.0}], [], "no line contains a step number"),
    ],
)
def test_bad_usage_is_exit_code_2(tmp_path, capsys, lines, more, said):
    pytest.importorskip("matplotlib", reason="matplotlib: not there")
    log = write(tmp_path / "run" / "log", lines)
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(log), *more])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    log = write(tmp_path / "run" / "log", [{"step": 1, "loss": 1.0}])
    with pytest.raises(SystemExit):
        main(["plot", str(log)])
    assert "pip install 'echelon[figures]'" in capsys.readouterr().err
