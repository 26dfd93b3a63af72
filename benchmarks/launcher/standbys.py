"""Time a rank's kill to the next attempt's first step, without and with `--standby`.

    python -m benchmarks.launcher.standbys --rounds 5 --keep launcher/standbys

Jobs of two ranks on one node take steps of 20 ms. Rank 1 is killed 5 s after both ranks have taken
two steps and any standbys are ready. One program imports torch and echelon, the other one NumPy and
echelon. The variants run in turn.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.runner.machine import Conditions
from benchmarks.runner.options import finish, parser
from benchmarks.runner.place import ROOT
from benchmarks.runner.rounds import Case, Samples, measure, spread

_LIMIT_S = 600.0
_CALM_S = 5.0  # of steps before the kill, on either side
_COLUMNS = (
    ("from the kill to", "left"),
    ("without", "right"),
    ("with `--standby 2`", "right"),
)
_PROGRAM = """
import os, sys, time
import numpy as np
{imports}
import echelon.dist as dist
from echelon import recorder

folder, attempt = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]

def note(what):
    path = os.path.join(folder, f"{{what}}_{{attempt}}_{{os.environ['RANK']}}")
    with open(path + ".part", "w") as file:
        file.write(f"{{time.monotonic()}} {{os.getpid()}}")
    os.replace(path + ".part", path)

note("imported")
world = dist.init(timeout_s=600)
x = np.ones(1000, np.float32)
for step in range(1_000_000):
    recorder.step(step)
    world.all_reduce(x)
    x /= world.size
    if step == 1:
        note("stepped")
        if attempt == "1":
            break
    time.sleep(0.02)
dist.shutdown()
"""
_IMPORTS = {"torch": "import torch", "NumPy": ""}


def restart(imports: str, num_standbys: int) -> Mapping[str, float]:
    """Kill a rank of a job; return the seconds until each event of the next attempt."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "train.py").write_text(_PROGRAM.format(imports=imports))
        command = [
            sys.executable, "-m", "echelon", "run", "--nproc-per-node", "2", "--max-restarts", "1",
            "--restart-policy", "always", "--standby", str(num_standbys),
            "--run-dir", str(folder / "run"), str(folder / "train.py"), name,
        ]  # fmt: skip
        log = stack.enter_context((folder / "log").open("w+"))
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ
        )
        stack.callback(_end, job)
        stepped = [_wait(folder / f"stepped_0_{rank}", job) for rank in range(2)]
        figures = {}
        if num_standbys:
            told = _wait_for_line(folder / "log", r"standbys are ready; (\d+) MiB", job)
            figures = {"ready after": time.monotonic() - stepped[0][0], "MiB": float(told)}
        time.sleep(_CALM_S)
        killed_s = time.monotonic()
        os.kill(stepped[1][1], signal.SIGKILL)
        for what in ("imported", "stepped"):
            at_s = max(_wait(folder / f"{what}_1_{rank}", job)[0] for rank in range(2))
            figures[what] = at_s - killed_s
        code = job.wait(_LIMIT_S)
        text = (folder / "log").read_text()
        if code != 0 or ("from standbys: 2 of 2" in text) != bool(num_standbys):
            raise RuntimeError(f"exit code {code}:\n{text}")
        return figures


def _wait(path: Path, job: subprocess.Popen[bytes]) -> tuple[float, int]:
    _until(path.exists, job)
    at_s, pid = path.read_text().split()
    return float(at_s), int(pid)


def _wait_for_line(log: Path, pattern: str, job: subprocess.Popen[bytes]) -> str:
    _until(lambda: re.search(pattern, log.read_text()) is not None, job)
    found = re.search(pattern, log.read_text())
    assert found is not None
    return found[1]


def _until(is_so, job: subprocess.Popen[bytes]) -> None:  # noqa: ANN001
    due_s = time.monotonic() + _LIMIT_S
    while not is_so():
        if job.poll() is not None or time.monotonic() > due_s:
            raise RuntimeError(f"the job does not get there: exit code {job.poll()}")
        time.sleep(0.02)


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.kill()
    job.wait()


def rows(found: Mapping[str, Samples]) -> list[list[str]]:
    """Return the table's rows."""
    made = []
    for case, samples in found.items():
        for what, text in (("imported", "libraries are imported"), ("stepped", "the first step")):
            sides = [spread(samples[f"{side} {what}"]) + " s" for side in ("without", "with")]
            made.append([f"{case}: {text}", *sides])
        made.append(
            [f"{case}: ready after the first step", "", spread(samples["with ready after"]) + " s"]
        )
        made.append(
            [f"{case}: private memory of a standby", "", spread(samples["with MiB"], 0) + " MiB"]
        )
    return made


def main() -> None:
    """Run the command line."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--only", choices=tuple(_IMPORTS), help="measure one program")
    options = made.parse_args()
    conditions = Conditions(["torch", "numpy"])
    cases = [
        Case(
            name=name,
            sides={
                "without": lambda _, imports=imports: restart(imports, 0),
                "with": lambda _, imports=imports: restart(imports, 2),
            },
        )
        for name, imports in _IMPORTS.items()
        if options.only in (None, name)
    ]
    found = measure(cases, options.rounds, seed=options.seed)
    finish(options, conditions, _COLUMNS, rows(found), {**found})


if __name__ == "__main__":
    main()
