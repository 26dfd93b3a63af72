"""The examples that know nothing of us: each fault is named with cause, rank and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.runner.table import Table
from benchmarks.unmodified import tables
from tests.examples.runs import EXAMPLES, launch

pytestmark = pytest.mark.ranks

_FOLDER = EXAMPLES / "unmodified"
_SCRIPTS = {
    "ddp": "torch",
    "fsdp2": "torch",
    "accelerate_loop": "accelerate",
    "lightning_fit": "lightning",
    "trainer": "transformers",
    "deepspeed_zero": "deepspeed",
}
_FAULTS = {
    "worker": "data_starvation",
    "user": "host_hang",
    "checkpoint": "storage_stall",
    "compile": "compile_stall",
    "gil": "gil_hang",
    "store": "store_wait",
    "exception": "exception",
    "kill": "dead_process",
}


def _verdict(tmp_path: Path, script: str, fault: str) -> dict:
    pytest.importorskip(_SCRIPTS[script], reason=f"{script}.py needs it: pip install .[clients]")
    run_dir = tmp_path / "run"
    arguments = (f"--fault={fault}", "--rank=1", f"--folder={tmp_path}")
    done = launch(2, run_dir, f"unmodified/{script}.py", *arguments, stall_timeout_s=5)
    assert done.code != 0, done.explain()
    report = json.loads((run_dir / "report.json").read_text())
    folder = run_dir / report["incidents"][0]["folder"]
    return json.loads((folder / "verdict.json").read_text())["verdict"]


def _line(fault: str) -> int:
    texts = (_FOLDER / "faults.py").read_text().splitlines()
    return next(n for n, text in enumerate(texts, 1) if text.endswith(f"# culprit: {fault}"))


def test_a_loader_that_hangs_is_named_with_the_line_of_the_data_set(tmp_path):
    verdict = _verdict(tmp_path, "ddp", "loader")
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("data_starvation", [1]), verdict
    assert f"faults.py:{_line('loader, worker')}" in json.dumps(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("script", _SCRIPTS)
def test_an_unmodified_program_is_explained(tmp_path, script, fault):
    verdict = _verdict(tmp_path, script, fault)
    assert (verdict["cause"], verdict["culprit_ranks"]) == (_FAULTS[fault], [1]), verdict


@pytest.mark.slow
@pytest.mark.parametrize("script", _SCRIPTS)
def test_a_healthy_program_trains_without_an_alarm(tmp_path, script):
    pytest.importorskip(_SCRIPTS[script], reason=f"{script}.py needs it: pip install .[clients]")
    arguments = (f"unmodified/{script}.py", f"--folder={tmp_path}")
    done = launch(2, tmp_path / "run", *arguments, stall_timeout_s=5)
    assert done.code == 0, done.explain()
    assert "loss " in done.out
    assert "stall" not in done.out + done.err


def test_the_examples_know_nothing_of_us():
    for path in _FOLDER.glob("*.py"):
        text = path.read_text().replace("knows of echelon", "")
        assert "echelon" not in text, path


def test_the_tables_of_the_matrix_are_saved_from_its_cases(tmp_path):
    case = {
        "script": "ddp",
        "fault": "user",
        "ranks": 2,
        "right": True,
        "alarm": True,
        "line": True,
    }
    once_wrong = {**case, "right": False, "cause": "unknown", "culprits": [0, 1], "load": 7.5}
    no_line = {**case, "fault": "gil", "line": False}
    quiet = {**case, "fault": "saves", "alarm": False, "line": None}
    ended = {**once_wrong, "fault": "lock", "attach": True, "ended": True}
    tables.save([once_wrong, case, no_line, quiet, ended], tmp_path)
    faults = Table.from_json((tmp_path / "two-ranks.json").read_text())
    rows = {row[0]: row[1:] for row in faults.rows}
    assert rows["user"] == ["right", *["-"] * 5]
    assert rows["gil"][0] == "right, no line"
    assert rows["right of those run: 2 of 2"] == ["2 of 2", *["-"] * 5]
    assert faults.about == {"num_lines": 2, "num_lines_named": 1}
    attached = Table.from_json((tmp_path / "attached.json").read_text())
    assert ["lock", "ended", *["-"] * 5] in attached.rows
    assert "kill" not in [row[0] for row in attached.rows]
    healthy = Table.from_json((tmp_path / "healthy.json").read_text())
    assert healthy.rows[-1] == ["all: 0 in 1", "0 in 1", *["-"] * 5]
    wrong = Table.from_json((tmp_path / "wrong.json").read_text())
    words = ["ddp, user, 2 ranks", "echelon run", "unknown [0, 1]", "7.5", "right"]
    assert wrong.rows == [words]
