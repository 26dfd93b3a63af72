"""A rank of a divided model that hangs, or leaves a collective out, is named with its line."""

from __future__ import annotations

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

_JOB = """
import threading
import torch
import torch._dynamo  # before the world is made: the first unit loads it, which takes seconds
import echelon.dist as dist
from echelon.dist.mesh import DeviceMesh
from echelon.dist.parallel import parallelize
from tests.dist.parallel.models import loss_of, make_batch, make_model

world = dist.init(timeout_s=120)
torch.set_num_threads(1)
mesh = DeviceMesh((2, 2), ("shard", "tp"))
parallel = parallelize(make_model("gpt2"), mesh, loss_fn=loss_of)
part, count = parallel.data

def act(module, inputs):
    if world.rank == 2 and step == 3:
        FAULT

parallel.model.blocks[1].mlp.down.register_forward_pre_hook(act)
for step in range(6):
    inputs, targets = (one.chunk(count)[part] for one in make_batch(step))
    parallel.step(inputs, targets)
"""

_FAULTS = {
    "hang": "threading.Event().wait()  # here",
    "skip": "module.forward = lambda x: torch.nn.functional.linear(x, module.weight)  # here",
}


def _line(text):
    return 1 + next(n for n, line in enumerate(_JOB.splitlines()) if text in line)


def _run(tmp_path, fault):
    script = tmp_path / "train.py"
    script.write_text(_JOB.replace("FAULT", _FAULTS[fault]))
    done = run_echelon(
        "run", "--nproc-per-node", "4", "--stall-timeout", "5", "--on-stall", "stop",
        "--run-dir", str(tmp_path / "run"), str(script),
    )  # fmt: skip
    return done, read_json(tmp_path / "run/dump/latest/verdict.json")["verdict"]


def test_a_rank_that_hangs_within_a_divided_layer_is_named(tmp_path):
    done, verdict = _run(tmp_path, "hang")
    assert done.returncode == 3, done.stderr
    assert (verdict["cause"], verdict["culprit_ranks"]) == ("host_hang", [2]), done.stderr
    assert f"train.py:{_line('if world.rank == 2') + 1} in act" in verdict["summary"], verdict


def test_a_rank_that_leaves_a_collective_of_a_layer_out_is_named(tmp_path):
    done, verdict = _run(tmp_path, "skip")
    found = verdict["cause"], verdict["culprit_ranks"], verdict["group"]
    assert found == ("skipped_collective", [2], "tp"), done.stderr
    assert f"train.py:{_line('parallel.step')} " in verdict["summary"], verdict
