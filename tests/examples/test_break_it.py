"""Every fault is recognized: its cause, its rank, and everybody's records."""

from __future__ import annotations

import json
import sys

import break_it
import pytest

import echelon.dist as dist
from tests.examples.runs import analyze, launch, run_loaded

NUM_RANKS = 3  # so that the ranks without the fault are more than the one with it
STALLED = 3
ANY_FAILURE = None  # ranks raise the mismatch; which of them ends first is up to the scheduler
MISMATCHES = [
    ("skip", 1, ANY_FAILURE, "skipped_collective"),
    ("shape", 2, ANY_FAILURE, "shape_mismatch"),
    ("dtype", 0, ANY_FAILURE, "dtype_mismatch"),
    ("op", 2, ANY_FAILURE, "op_mismatch"),
]

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("fault", "culprit", "exit_code", "cause"),
    [
        ("kill", 0, 137, "dead_process"),
        ("exception", 1, 1, "exception"),
        ("hang", 2, STALLED, "host_hang"),
        ("slow-data", 0, STALLED, "data_starvation"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in MISMATCHES),
    ],
)
def test_the_verdict_names_cause_and_culprit(fault, culprit, exit_code, cause, tmp_path):
    options = ("--fault", fault, "--rank", str(culprit), "--at-step", "3")
    stall_timeout_s = 5 if exit_code == STALLED else 60
    ended = launch(NUM_RANKS, tmp_path, "break_it.py", *options, stall_timeout_s=stall_timeout_s)
    assert ended.code != 0, ended.explain()
    assert exit_code in (ANY_FAILURE, ended.code), ended.explain()

    incident = tmp_path / "dump" / "latest"
    records = {file.name for file in incident.iterdir()}
    assert {f"rank_{rank}" for rank in range(NUM_RANKS)} <= records

    expect_verdict(analyze(tmp_path)["verdict"], cause, culprit, ended.explain())


@pytest.mark.parametrize(("fault", "culprit", "exit_code", "cause"), MISMATCHES)
def test_the_records_alone_show_cause_and_culprit(fault, culprit, exit_code, cause, tmp_path):
    """All ranks find a mismatch by themselves, so that this needs no launcher, which costs more."""
    options = ("--fault", fault, "--rank", str(culprit), "--at-step", "3")
    ends = run_loaded(NUM_RANKS, tmp_path, "break_it.py", *options)
    told = "\n".join(end.explain() for end in ends)
    assert [end.code for end in ends] == [1] * NUM_RANKS, told
    assert all("CollectiveMismatchError: " in end.err for end in ends), told
    result = analyze(tmp_path)
    assert result["ranks_present"] == list(range(NUM_RANKS)), told
    expect_verdict(result["verdict"], cause, culprit, told)


def expect_verdict(verdict, cause, culprit, told):
    told = json.dumps(verdict, indent=1) + told
    assert verdict["cause"] == cause, told
    assert verdict["culprit_ranks"] == [culprit], told
    assert f"rank {culprit}" in verdict["summary"], told


def test_without_a_fault_it_trains_and_leaves_no_incident(tmp_path):
    ended = launch(2, tmp_path, "break_it.py", "--steps=30")
    assert ended.code == 0, ended.explain()
    assert "step 30/30" in ended.out
    assert not list(tmp_path.glob("dump/*"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--fault gremlins", "invalid choice: 'gremlins'"),
        ("--fault kill --rank 1", "--rank 1: there are 1 ranks, from 0"),
        ("--fault kill --rank 0 --at-step 200", "training ends after 200 steps"),
        ("--rank -1", "argument --rank: '-1' is not a whole number from 0 up"),
    ],
)
def test_bad_options_get_one_line_and_exit_code_2(options, complaint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["break_it.py", *options.split()])
    with pytest.raises(SystemExit) as ended:
        break_it.main()
    dist.shutdown()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert err.count("\n") == 1
    assert out == ""
