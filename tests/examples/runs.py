"""Run the examples as a user does: as a command, in processes of its own."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.store import StoreServer
from tests.support.programs import run_programs

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
LIMIT_S = 300  # far above what a run takes; a hang fails the test instead of the whole suite
INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "ECHELON_", "PET_")

# Texts are prepared here, not among the user's: this process and its children inherit it.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="echelon-tests-")


@atexit.register
def _remove_cache(folder: str = os.environ["XDG_CACHE_HOME"], owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # a forked child runs this, too
        shutil.rmtree(folder, ignore_errors=True)


SMALL_MODEL = (
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--context=32",
    "--batch=8",
    "--eval-windows=8",
    "--warmup=5",
    "--lr=0.01",
)


# A script that was found as Python finds it, in a process that loaded torch before OMP_NUM_THREADS
# was set; each rank has a record of its own.
_SCRIPT = """
import os, runpy, sys, torch
torch.set_num_threads(1)
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
os.environ["ECHELON_RANK_DIR"] = os.environ["RANK_DIRS"].format(rank=os.environ["RANK"])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def explain(self) -> str:
        """Return all that it said, for a failed assertion."""
        return f"exit code {self.code}\n--- stdout ---\n{self.out}\n--- stderr ---\n{self.err}"


def run(*arguments: str | Path, environ: Mapping[str, str] | None = None) -> Ended:
    """Run Python with these arguments, free of any job that the tests run in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**kept, **(environ or {})},
        timeout=LIMIT_S,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def launch(
    num_ranks: int, run_dir: Path, script: str, *arguments: str | Path, stall_timeout_s: int = 60
) -> Ended:
    """Run an example under `echelon run`.

    Args:
        stall_timeout_s: 5 where a stall is expected, which costs that long; otherwise longer than a
            busy machine needs for any step.
    """
    command = ("-m", "echelon", "run", "--nproc-per-node", str(num_ranks), "--run-dir", run_dir)
    on_stall = ("--stall-timeout", str(stall_timeout_s), "--on-stall", "stop")
    return run(*command, *on_stall, EXAMPLES / script, *arguments)


def run_loaded(num_ranks: int, run_dir: Path, script: str, *arguments: str | Path) -> list[Ended]:
    """Run an example as the ranks of a world, without a launcher; return their ends, by rank.

    The processes have torch loaded, which saves 5 s of processor time a rank. Their records are
    where `launch` leaves them: in `run_dir`.
    """
    world = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK_DIRS": str(run_dir / "rank_{rank}/attempt_0"),
    }
    for rank in range(num_ranks):
        (run_dir / f"rank_{rank}/attempt_0").mkdir(parents=True)
    argv = (str(EXAMPLES / script), *map(str, arguments))
    with StoreServer("127.0.0.1", 0) as server:
        world["MASTER_PORT"] = str(server.port)
        own = [None] * num_ranks
        ends = run_programs(own, _SCRIPT, *argv, environ=world, timeout_s=LIMIT_S)
    return [Ended(end.returncode, end.stdout, end.stderr) for end in ends]


def analyze(run_dir: Path) -> dict[str, Any]:
    """Return what `fr-analyze --json` says about a run."""
    return json.loads(run("-m", "echelon.analysis", run_dir, "--json").out)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read a log of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
