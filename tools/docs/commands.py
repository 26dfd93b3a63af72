"""Run the commands of the how-to pages: `python -m tools.docs.commands FOLDER [PAGE ...]`.

Each command of these pages is either in `RUN`, with its expected exit code, or in `LEFT`, with the
reason why it cannot run on one machine without preparation. A command that is in neither table is
an error, so new commands must be classified. Commands run exactly as written, in FOLDER, which
contains the files that `prepare` creates: a small training script, a checkpoint, a config and the
logs of other jobs. The duration of each command is printed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "howto").glob("*.md")))
LIMIT_S = 1800  # a shared machine may be ten times slower than a quiet one
_PROGRAMS = "echelon|fr-analyze|python|torchrun|srun|mpirun|sbatch|kubectl|scp|ssh|pip"
_COMMAND = re.compile(
    rf"^(?:[A-Z_]+=\S+ )*(?:{_PROGRAMS}) [\w./-](?!.*[:;] (?!-)).*$|^export \w+=.*$"
)

# The beginning of a command -> the exit code that it must have.
RUN = {
    "echelon plan --model layers=12,": 0,
    "echelon plan --model llama-8b ": 0,
    "echelon plan --model path/to/config.json ": 0,
    "echelon report ": 0,
    "echelon run --nproc-per-node 4 --max-restarts 3 --standby 4 train.py": 0,
    "echelon run --nproc-per-node 4 --on-loss shrink train.py": 0,
    "echelon run --nproc-per-node 4 --on-loss shrink --on-stall replace train.py": 0,
    "echelon run --nproc-per-node 4 --standby 1 --on-loss replace train.py": 0,
    "echelon run --nproc-per-node 4 -m echelon.planner.measure ": 0,
    "echelon run --nproc-per-node 8 --torch-backend echelon train.py": 0,
    "echelon run --nproc-per-node 8 train.py": 0,
    "export ECHELON_SECRET=": 0,
    "fr-analyze runs/torchrun-logs/": 1,  # the logs show a failure
    "fr-analyze slurm-": 1,
    "python -m echelon.dist.checkpoint export runs/gpt ": 0,
    "python -m echelon.dist.checkpoint show runs/gpt": 0,
    "python -m echelon.dist.checkpoint verify runs/gpt": 0,
    "python -m echelon.dist.pipeline check mine.csv": 0,
    "python -m echelon.dist.pipeline search ": 0,
    "python -m echelon.dist.pipeline show ": 0,
}
_NODES = "needs several nodes; the netns tests run such jobs"
_NETWORK = "downloads from the network"
LEFT = {
    "OTEL_EXPORTER_OTLP_ENDPOINT=": "needs a collector; tests/launcher/notices run one",
    "echelon plot ": "needs matplotlib; tests/train/figures draw where it is installed",
    "echelon prepare ": _NETWORK,
    "echelon run --notify ": "sends mail; tests/launcher/notices send to a command and a URL",
    "echelon run --nnodes ": _NODES,
    "echelon run --nproc-per-node 2 --stall-timeout 5": "hangs on purpose; the tutorials run it",
    "echelon run --nproc-per-node 2 benchmarks/": "a benchmark, run by hand",
    "echelon run --nproc-per-node 4 --max-restarts 9 examples/": "trains for hours",
    "echelon run --nproc-per-node 4 --stall-timeout 5": "hangs on purpose; the tutorials run it",
    "echelon run --otlp ": "needs a collector; tests/launcher/notices run one",
    "echelon run --rdzv-endpoint ": _NODES,
    "echelon run --run-dir ": "runs below srun; tests/launcher/options read Slurm's variables",
    "echelon witness ": _NODES,
    "fr-analyze --attach": "needs a running job; tests/launcher/attach look at one",
    "mpirun ": _NODES,
    "pip install expecttest": _NETWORK,
    "python -m echelon.train.models ": "needs the weights of a published model",
    "python tools/torch_suite.py ": "runs torch's own test suite for an hour",
    "scp ": _NODES,
    "srun ": _NODES,
    "ssh ": _NODES,
}

_TRAIN = """\
import torch
import torch.distributed as dist

dist.init_process_group("echelon")
x = torch.ones(4)
dist.all_reduce(x)
assert x[0] == dist.get_world_size()
dist.destroy_process_group()
"""
_SAVE = """\
import torch
from echelon.dist.checkpoint import save

save("runs/gpt", {"model": torch.nn.Linear(2, 2), "step": 7})
"""
_JOB = "runs/20261122-235800-c9cff307"  # the job in docs/goodput.md
_FAILED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    step(batch)
  File "/home/me/train.py", line 7, in step
    raise ValueError("a batch of length 0")
ValueError: a batch of length 0
"""


def commands(page: str) -> Iterator[str]:
    """Yield the commands in the code blocks of a page, without prompts and comments."""
    is_code = False
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
            continue
        if not is_code and not line.startswith("    "):
            continue
        text = re.sub(r"\s{2,}#.*$", "", line.strip().removeprefix("$ ")).strip()
        if _COMMAND.match(text):
            yield text


def classified(command: str) -> tuple[int | None, str]:
    """Return a command's expected exit code and "", or None and the reason that it is not run.

    Raises:
        LookupError: the command is in neither table.
    """
    for beginning, code in RUN.items():
        if command.startswith(beginning):
            return code, ""
    for beginning, reason in LEFT.items():
        if command.startswith(beginning):
            return None, reason
    raise LookupError(f"not in RUN or LEFT of tools/docs/commands.py: {command}")


def prepare(folder: Path) -> None:
    """Create the files that the commands use."""
    (folder / "train.py").write_text(_TRAIN)
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 2, "vocab_size": 256, "intermediate_size": 128}
    config |= {"max_position_embeddings": 128, "num_key_value_heads": 4}
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "config.json").write_text(json.dumps(config))
    (folder / "mine.csv").write_text("0F0,,,0B0\n,1F0,1B0,\n")
    _run(f"{sys.executable} -c '{_SAVE}'", folder, 0)
    _write_logs(folder)
    _run(f"echelon run --nproc-per-node 2 --run-dir {_JOB} train.py", folder, 0)
    _run("echelon run --nproc-per-node 4 -m echelon.planner.measure --out links.json", folder, 0)


def _write_logs(folder: Path) -> None:
    """Write the logs of two ranks, of which rank 1 failed, in the layouts of torchrun and srun."""
    for rank, text in enumerate(("waiting\n", _FAILED)):
        logs = folder / "runs" / "torchrun-logs" / "attempt_0" / str(rank)
        logs.mkdir(parents=True)
        (logs / "stderr.log").write_text(text)
    labeled = "".join(f"1: {line}\n" for line in _FAILED.splitlines())
    (folder / "slurm-4711.out").write_text(f"0: waiting\n{labeled}")


def _run(command: str, folder: Path, code: int) -> None:
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": paths},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode != code:
        raise RuntimeError(
            f"{command}: exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}"
        )


def main() -> int:
    """Run the commands in the folder that the command line names; return the exit code."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    for page in [Path(name) for name in sys.argv[2:]] or PAGES:
        for command in commands(page.read_text()):
            code, reason = classified(command)
            started_s = time.monotonic()
            if code is not None:
                _run(command, folder, code)
                reason = f"ran, {time.monotonic() - started_s:.0f} s"
            print(f"{page.name}: {command}: {reason}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
