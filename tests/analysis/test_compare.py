"""`fr-analyze --compare`: where two runs part."""

from __future__ import annotations

import json

import pytest

from echelon.analysis.cli import main


def _line(step, number, rank, loss="0x1p+0", **gradients):
    prints = {"first.weight": "aa", "last.weight": "bb"} | gradients
    return {"step": step, "number": number, "rank": rank, "loss": loss, "gradients": prints}


def _write(folder, lines):
    (folder / "fingerprints").mkdir(parents=True)
    for line in lines:
        with (folder / "fingerprints" / f"rank_{line['rank']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    return str(folder)


def _run(size=2, steps=3, changed=None):
    """Lines of a run of 4 micro-batches per step; `changed` replaces some by (step, number)."""
    lines = []
    for step in range(steps):
        for number in range(4):
            rank = number * size // 4
            lines.append((changed or {}).get((step, number), _line(step, number, rank)))
        lines += [{"step": step, "rank": rank, "norm": "0x1p+1"} for rank in range(size)]
    return lines


def _compare(tmp_path, one, two, capsys):
    code = main(["--compare", _write(tmp_path / "1", one), _write(tmp_path / "2", two)])
    ends = capsys.readouterr()
    return code, ends.out + ends.err


def test_equal_runs_on_other_numbers_of_ranks_are_equal(tmp_path, capsys):
    code, text = _compare(tmp_path, _run(size=1), _run(size=4), capsys)
    assert (code, text) == (0, "the same bits in 12 micro-batches of steps 0 to 2\n")


def test_the_first_gradient_that_differs_is_named_with_step_number_and_ranks(tmp_path, capsys):
    later = {
        (1, 2): _line(1, 2, 2, **{"last.weight": "cc"}),
        (2, 0): _line(2, 0, 0, loss="0x1p+3"),
    }
    code, text = _compare(tmp_path, _run(size=1), _run(size=4, changed=later), capsys)
    assert code == 1
    assert text == (
        "the runs diverge at step 1, micro-batch 2: the loss is the same, and 1 of 2 gradients "
        "differ, first in the model's order: 'last.weight' (rank 0 in the first run, rank 2 in the "
        "second)\n"
        "the forward agrees, so the backward differs\n"
    )


def test_a_loss_that_differs_points_at_the_forward(tmp_path, capsys):
    changed = {(2, 3): _line(2, 3, 1, loss="0x1p+3", **{"first.weight": "cc"})}
    code, text = _compare(tmp_path, _run(), _run(changed=changed), capsys)
    assert code == 1
    assert "step 2, micro-batch 3: the loss, and 1 of 2 gradients differ" in text
    assert "the forward differs" in text


def test_a_norm_that_differs_points_at_the_reduction_and_the_rank(tmp_path, capsys):
    other = _run()
    other[-1]["norm"] = "0x1p+2"
    code, text = _compare(tmp_path, _run(), other, capsys)
    assert code == 1
    assert "step 2: every micro-batch agrees" in text
    assert "(rank 1 of the second run)" in text


def test_another_number_of_micro_batches_and_another_parameter_are_named(tmp_path, capsys):
    fewer = [one for one in _run() if (one["step"], one.get("number")) != (1, 3)]
    text = _compare(tmp_path / "a", _run(), fewer, capsys)[1]
    assert "step 1: 4 micro-batches in the first run, 3 in" in text
    more = {(0, 1): _line(0, 1, 0, bias="dd")}
    text = _compare(tmp_path / "b", _run(), _run(changed=more), capsys)[1]
    assert "step 0, micro-batch 1: only one has a gradient of 'bias'" in text


def test_of_a_repeated_step_the_last_counts_and_torn_lines_are_left_out(tmp_path, capsys):
    one = _write(tmp_path / "1", [_line(0, 0, 0, loss="0x1p+9"), _line(0, 0, 0)])
    two = _write(tmp_path / "2", [_line(0, 0, 0)])
    with (tmp_path / "2" / "fingerprints" / "rank_0.jsonl").open("a") as file:
        file.write('{"step": 1, "numb\n[]\n{"step": 3}\n')
    assert main(["--compare", one, two]) == 0
    out = capsys.readouterr().out
    assert out == (
        "the same bits in 1 micro-batch of steps 0 to 0\n"
        "3 lines could not be read and were left out\n"
    )


@pytest.mark.parametrize("lines", [[], [_line(7, 0, 0)]])
def test_runs_that_cannot_be_compared_are_one_line_and_exit_code_2(lines, tmp_path, capsys):
    one = _write(tmp_path / "1", [_line(0, 0, 0)])
    two = _write(tmp_path / "2", lines)
    assert main(["--compare", one, two]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--compare", one, two, "--watch"]) == 2


def _staged(lines):
    """The same lines as two stages on two ranks write them."""
    found = []
    for line in lines:
        if "norm" in line:
            found.append(line)
            continue
        key = {"step": line["step"], "number": line["number"]}
        prints = line["gradients"]
        found += [
            key | {"stage": 1, "rank": 1, "gradients": {"last.weight": prints["last.weight"]}},
            key | {"stage": 0, "rank": 2, "gradients": {"first.weight": prints["first.weight"]}},
            key | {"rank": 1, "loss": line["loss"], "gradients": {}},
        ]
    return found


def test_stages_of_a_pipeline_are_compared_with_a_whole_model(tmp_path, capsys):
    code, text = _compare(tmp_path, _run(size=1), _staged(_run(size=1)), capsys)
    assert (code, text) == (0, "the same bits in 12 micro-batches of steps 0 to 2\n")


def test_the_rank_of_the_stage_that_differs_is_named(tmp_path, capsys):
    changed = {(1, 2): _line(1, 2, 0, **{"first.weight": "cc", "last.weight": "dd"})}
    code, text = _compare(tmp_path, _run(size=1), _staged(_run(size=1, changed=changed)), capsys)
    assert code == 1
    assert (
        "step 1, micro-batch 2: the loss is the same, and 2 of 2 gradients differ, first in the "
        "model's order: 'first.weight' (rank 0 in the first run, rank 2 in the second)"
    ) in text


def test_of_a_repeated_step_the_later_lines_count_whichever_rank_wrote_them(tmp_path, capsys):
    repeated = [{**line, "wall_ns": 2} for line in _run(size=2)]
    before_the_loss = {**_line(1, 2, 3, loss="0x1p+5"), "wall_ns": 1}
    code, text = _compare(tmp_path, _run(size=1), [before_the_loss, *repeated], capsys)
    assert (code, text) == (0, "the same bits in 12 micro-batches of steps 0 to 2\n")
