"""Random faults, some of them once and one of them at each try: what is restarted, and how often.

Each job of four ranks trains to its last step, resumes from what ECHELON_RESUME names, and has
faults at random steps. A job whose faults all pass has to succeed: else it was stopped wrongly. A
fault that comes back each time has to end it, after no more restarts than its row of the table
grants: any more are wasted.
"""

from __future__ import annotations

import json
import random
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

_JOB = """
import ctypes, json, os, signal, sys, time
from pathlib import Path
import numpy as np
import echelon.dist as dist
from echelon import recorder
from echelon.recorder.checkpoints import note_checkpoint

folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
world = dist.init(timeout_s=60)
x = np.ones(4, np.float32)
resumed = os.environ.get("ECHELON_RESUME")
first = int(resumed.rpartition("_")[2]) if resumed else 0

def strike(kind):
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "segfault":
        ctypes.string_at(8)
    elif kind == "exit":
        os._exit(3)
    elif kind == "exception":
        raise ValueError("a corrupt batch")
    elif kind == "connection":
        raise ConnectionResetError(104, "Connection reset by peer")
    elif kind == "memory":
        raise MemoryError("cannot allocate")
    elif kind == "hang":
        time.sleep(600)
    elif kind == "mismatch":
        world.all_reduce(np.ones(5, np.float32))

for step in range(first, 60):
    recorder.step(step)
    for number, (kind, at, rank, always) in enumerate(plan):
        struck = folder / f"struck_{number}"
        if step == at and rank == world.rank and (always or not struck.exists()):
            struck.touch()
            strike(kind)
    world.all_reduce(x)
    time.sleep(0.01)
    if step % 10 == 9 and world.rank == 0:
        saved = folder / f"step_{step + 1}"
        (saved / "000001").mkdir(parents=True, exist_ok=True)
        (saved / "000001" / "commit").touch()
        note_checkpoint(saved, step)
dist.shutdown()
"""

_ONCE = ("kill", "segfault", "exit", "exception", "connection", "memory", "hang")
_GRANTED = {"exception": 1, "memory": 1, "mismatch": 0, "exit": 2}  # restarts of one that stays
_STOPS = ("--stall-timeout", "4", "--on-stall", "restart", "--max-restarts", "30")


def _plan(seed: int) -> list[tuple[str, int, int, bool]]:
    """Return faults as (kind, step, rank, whether it comes back)."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(2, 50), 4))
    faults = [(rng.choice(_ONCE), step, rng.randrange(4), False) for step in steps[:3]]
    if seed % 2:
        faults.append((rng.choice(sorted(_GRANTED)), steps[3], rng.randrange(4), True))
    return faults


@pytest.mark.parametrize("seed", range(16))
def test_what_passes_is_restarted_and_what_stays_is_not(tmp_path: Path, seed: int):
    plan = _plan(seed)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_JOB))
    done = run_echelon(
        "run", "--nproc-per-node", "4", *_STOPS, "--run-dir", str(tmp_path / "run"), str(script),
        str(tmp_path), json.dumps(plan), timeout_s=600,
    )  # fmt: skip
    report = read_json(tmp_path / "run" / "report.json")
    told = [(one["action"], one["cause"], one["last_step"]) for one in report["decisions"]]
    assert all((tmp_path / f"struck_{number}").exists() for number in range(len(plan))), told
    restarts = [one for one in told if one[0] == "restart"]
    passing = sum(not always for *_, always in plan)
    if passing == len(plan):
        assert done.returncode == 0, f"wrong stop: {plan}: {told}\n{done.stderr[-4000:]}"
        assert len(restarts) == passing, f"{plan}: {told}"
        return
    assert told[-1][0] == "stop", f"{plan}: {told}"
    wasted = len(restarts) - passing - _GRANTED[plan[-1][0]]
    assert wasted <= 0, f"{wasted} wasted restarts: {plan}: {told}"
