"""The benchmark of reference models: what it makes of measurements."""

from __future__ import annotations

import json

import pytest

from benchmarks.reference import run as bench

_OPTIONS = {"device": "cpu", "batch": 1}


def _line(case, number, cpu_s, **more):
    return {
        "case": case, "round": number, "options": _OPTIONS, "cpu_s": cpu_s, "wall_s": cpu_s,
        "first_cpu_s": 9.0 + number, "first_s": 1.0, "flops": 1e9, "peak": 1e9, "graphs": 2, **more,
    }  # fmt: skip


def _write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"case": "torn')


def test_a_ratio_is_taken_to_the_peer_in_the_same_round(tmp_path):
    path = tmp_path / "out.jsonl"
    _write(
        path,
        _line("eager", 0, [1.0, 1.0]), _line("whole, inductor", 0, [0.5, 0.5]),
        _line("eager", 1, [4.0, 4.0]), _line("whole, inductor", 1, [3.0, 3.0]),
        _line("whole, inductor", 2, [1.0, 1.0]) | {"options": {"device": "cpu", "batch": 2}},
    )  # fmt: skip
    results = bench.read(path, _OPTIONS)
    case = next(one for one in bench.CASES if one.name == "whole, inductor")
    row = bench.summary(case, results)
    assert (row["mean_s"], row["num_iterations"]) == (1.75, 4)
    assert row["ratio"] == (0.5 + 0.75) / 2
    assert row["mfu"] == pytest.approx((2 + 1 / 3) / 2)
    assert (row["cold_s"], row["warm_s"]) == (9.0, 10.0)


def test_a_row_that_torch_cannot_run_stands_with_its_error(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    _write(path, {"case": "eager", "round": 0, "options": _OPTIONS, "error": "RuntimeError: a|b"})
    monkeypatch.setattr(bench, "machine", lambda: {"date": "today"})
    text = bench.table(bench.CASES, bench.read(path, _OPTIONS), "cpu")
    assert text.splitlines()[-1] == "| eager | RuntimeError: a/b | | | | | | | |"


def test_an_interrupted_run_measures_only_what_is_missing(tmp_path, monkeypatch):
    asked = []

    def measure(case, *_):
        asked.append(case.name)
        return {"error": "RuntimeError: no kernel"} if "MATH" in case.name else {"cpu_s": [1.0]}

    monkeypatch.setattr(bench, "measure", measure)
    options = dict.fromkeys(("model", "device", "iterations", "batch", "length", "threads", "text"))
    args = bench.argparse.Namespace(
        **options, out=tmp_path / "out.jsonl", rounds=2, seed=0, limit=1.0
    )
    cases = [one for one in bench.CASES if one.name in ("eager", "SDPA MATH")]
    bench.run(cases, args)
    assert sorted(asked) == ["SDPA MATH", "eager", "eager"], "an error is not tried again"
    bench.run(cases, args)
    assert len(asked) == 3


def test_a_row_that_took_too_long_is_measured_again_with_more_time(tmp_path, monkeypatch):
    limits = []

    def measure(case, _, cache, limit_s):
        limits.append(limit_s)
        slow = {"error": "took longer than 1 s", "limit_s": limit_s}
        return slow if limit_s < 5 else {"cpu_s": [1.0]}

    monkeypatch.setattr(bench, "measure", measure)
    options = dict.fromkeys(("model", "device", "iterations", "batch", "length", "threads", "text"))
    settings = {**options, "out": tmp_path / "out.jsonl", "rounds": 2, "seed": 0}
    for limit in (1.0, 1.0, 9.0, 9.0):
        bench.run(bench.chosen("", ["eager"]), bench.argparse.Namespace(**settings, limit=limit))
    assert limits == [1.0, 9.0, 9.0]


def test_rows_are_chosen_by_name_or_by_words():
    assert [one.name for one in bench.chosen("", ["whole, inductor"])] == ["whole, inductor"]
    assert {one.name for one in bench.chosen("never,MATH", ["eager"])} == {
        "eager", "SDPA MATH", "SDPA MATH, bfloat16", "lengths vary, blocks, dynamic never",
    }  # fmt: skip
    assert bench.chosen("", []) == bench.CASES
    assert bench.chosen("nothing", []) == []


def test_every_row_has_a_name_of_its_own_and_a_peer():
    names = [case.name for case in bench.CASES]
    assert len(names) == len(set(names))
    assert {case.peer for case in bench.CASES} <= set(names)
