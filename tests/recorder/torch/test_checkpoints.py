"""Checkpoints of torch programs lie in spans, however the program imported what writes them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from echelon.recorder.torch import spans
from tests.support.ranks import run_echelon

_SAVE = """
import os, sys
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemWriter, save
dist.init_process_group("gloo")
pipe, folder, how = sys.argv[1:]
class Writer(FileSystemWriter):
    def write_data(self, plan, planner):
        if dist.get_rank() == 1:
            os.open(pipe, os.O_WRONLY)
        return super().write_data(plan, planner)
if how == "safetensors":
    if dist.get_rank() == 1:
        load_file(pipe)
    dist.barrier()
else:
    (dcp.save if how == "attribute" else save)(
        {"x": torch.ones(3)}, storage_writer=Writer(folder)
    )
"""


def test_a_copy_of_a_function_that_a_program_imported_before_is_replaced(monkeypatch):
    writer, program, other = (ModuleType(name) for name in ("a_writer", "a_program", "another"))
    for module in (writer, program, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    writer.save_it = program.save_it = lambda: "saved"
    own = other.save_it = lambda: "its own"
    spans.mark_function("save_it", writer)
    assert program.save_it is writer.save_it
    assert writer.save_it._echelon_records
    assert writer.save_it() == "saved"
    assert other.save_it is own
    spans.mark_function("save_it", writer)
    spans.mark_function("not_there", writer)
    assert program.save_it is writer.save_it


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("how", ["attribute", "name", "safetensors"])
def test_a_hang_in_a_checkpoint_has_its_span_and_line(tmp_path, how):
    """DCP and safetensors, imported at the top as programs do, on a pipe that none reads."""
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    script, pipe = tmp_path / "train.py", tmp_path / "pipe"
    script.write_text(_SAVE)
    os.mkfifo(pipe)
    done = run_echelon(
        "run", "--standalone", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"),
        "--stall-timeout", "4", "--on-stall", "stop",
        str(script), str(pipe), str(tmp_path / "saved"), how,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 3, done.stdout + done.stderr
    (path,) = Path(tmp_path / "run").glob("dump/incident_0/verdict.json")
    report = json.loads(path.read_text())
    verdict = report.get("verdict", report)
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("storage_stall", [1]), done.stderr
    assert any("span 'checkpoint' is open" in line for line in verdict["evidence"]), done.stderr
    assert "train.py" in verdict["summary"]
