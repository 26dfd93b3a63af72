"""The examples that know nothing of us: each fault is named with cause, rank and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import unmodified
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
    done = launch(2, tmp_path / "run", f"unmodified/{script}.py", f"--folder={tmp_path}")
    assert done.code == 0, done.explain()
    assert "loss " in done.out
    assert "stall" not in done.out + done.err


def test_the_examples_know_nothing_of_us():
    for path in _FOLDER.glob("*.py"):
        text = path.read_text().replace("knows of echelon", "")
        assert "echelon" not in text, path


def test_the_table_of_the_matrix_is_written_between_its_marks(tmp_path):
    case = {
        "script": "ddp",
        "fault": "user",
        "ranks": 2,
        "right": True,
        "alarm": True,
        "line": True,
    }
    wrong = {**case, "ranks": 4, "right": False, "cause": "unknown", "culprits": [1, 2]}
    quiet = {**case, "fault": "saves", "alarm": False, "line": None}
    ended = {**wrong, "attach": True, "ended": True}
    results = tmp_path / "cases.jsonl"
    results.write_text("".join(f"{json.dumps(one)}\n" for one in (case, wrong, quiet, ended)))
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{unmodified.BEGIN}\nan older table\n{unmodified.END}\nafter\n")
    unmodified.write_table(results, page)
    text = page.read_text()
    assert "| user | 1 of 2, line 2 of 2 (x4: unknown [1, 2]) | - |" in text
    assert "right: 1 of 2. Line named: 2 of 2. Healthy runs: 1, with an alarm: 0." in text
    assert "right: 0 of 0." in text
    assert "not counted: 1." in text
    assert "older" not in text
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="lacks the two marks"):
        unmodified.write_table(results, page)
