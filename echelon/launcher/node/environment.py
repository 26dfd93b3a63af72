"""Build a worker's environment: torchrun's variables, and the location of the worker's black box.

A worker inherits the launcher's own environment, with these variables set:

| variable | meaning |
|---|---|
| RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE
  ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_* TORCH_NCCL_ASYNC_ERROR_HANDLING
  | as torchrun sets them |
| CUDA_VISIBLE_DEVICES | with --virtual-local-rank: this worker's GPU; LOCAL_RANK is then 0 |
| OMP_NUM_THREADS | 1 with several workers, unless the user has set it |
| ECHELON_RANK_DIR | RUN/rank_<r>/attempt_<n>: ring, stacks and logs of this worker |
| ECHELON_ATTEMPT | n |
| ECHELON_JOB_ID | the job's name |
| ECHELON_JOB_FILE | RUN/job.json (0600): endpoint and secret |
| ECHELON_RECORDER_SIZE | how many operations the black box stores |
| ECHELON_RESUME | the job's newest committed checkpoint, if any |
| ECHELON_ATTEMPTS | JSON file: how the attempts before this one ended |
| ECHELON_ON_LOSS | "shrink" or "replace", if --on-loss has this value |
| ECHELON_MODULES_FILE | with --standby: where to list the modules that this worker has imported |
| ECHELON_TORCH_BACKEND | with --torch-backend: see `echelon_torch_autoload` |
| TORCH_FR_DUMP_TEMP_FILE and others | see torch_dumps.py |
| ECHELON_TERMINAL_COLUMNS | the terminal's width, set only if the launcher prints to a
  terminal; a line that ends in a carriage return is then shown as a live line |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from echelon.host.accelerators import visible_to

MODULES = "modules.json"  # in the worker's folder
_OURS_ALONE = (
    "ECHELON_TERMINAL_COLUMNS",
    "ECHELON_SECRET",
    "ECHELON_TORCH_BACKEND",
    "ECHELON_ON_LOSS",
    "ECHELON_JOIN_AFTER",
    "ECHELON_LIFE",
    "ECHELON_MODULES_FILE",
    "ECHELON_STANDBY",
    "ECHELON_STANDBY_FD",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The properties of an attempt that this node's workers learn from their environments."""

    number: int  # in the names of its folders: RUN/rank_<r>/attempt_<number>
    restart: int  # within this job
    max_restarts: int
    job_id: str
    role: str
    world_size: int
    first_rank: int  # of this node
    num_workers: int  # on this node
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    job_file: Path
    recorder_size: int
    terminal_columns: int | None
    virtual_local_rank: bool = False
    torch_backend: str = ""
    resume: str = ""  # the newest committed checkpoint
    on_loss: str = "end"
    join_after: int = -1  # the newest epoch, for processes in the places of lost ranks
    lives: Mapping[int, int] = field(default_factory=dict)  # of these ranks: processes before
    lists_modules: bool = False  # for the standbys of later attempts

    @property
    def ranks(self) -> range:
        """This node's ranks."""
        return range(self.first_rank, self.first_rank + self.num_workers)


def worker_environment(
    base: Mapping[str, str], attempt: Attempt, rank: int, rank_dir: Path
) -> dict[str, str]:
    """Return the complete environment of a worker.

    Raises:
        ValueError: a virtual local rank was requested, but there is no GPU for the worker.
    """
    env = dict(base)
    env.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank - attempt.first_rank),
        GROUP_RANK=str(attempt.node_rank),
        ROLE_RANK=str(rank),
        ROLE_NAME=attempt.role,
        WORLD_SIZE=str(attempt.world_size),
        LOCAL_WORLD_SIZE=str(attempt.num_workers),
        GROUP_WORLD_SIZE=str(attempt.num_nodes),
        ROLE_WORLD_SIZE=str(attempt.world_size),
        MASTER_ADDR=attempt.master_addr,
        MASTER_PORT=str(attempt.master_port),
        TORCHELASTIC_RESTART_COUNT=str(attempt.restart),
        TORCHELASTIC_MAX_RESTARTS=str(attempt.max_restarts),
        TORCHELASTIC_RUN_ID=attempt.job_id,
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=str(rank_dir / "error.json"),
        ECHELON_RANK_DIR=str(rank_dir),
        ECHELON_ATTEMPT=str(attempt.number),
        ECHELON_JOB_ID=attempt.job_id,
        ECHELON_JOB_FILE=str(attempt.job_file),
        ECHELON_ATTEMPTS=str(rank_dir / "attempts.json"),
        ECHELON_RECORDER_SIZE=str(attempt.recorder_size),
    )
    if attempt.resume:
        env["ECHELON_RESUME"] = attempt.resume
    if attempt.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = visible_to(rank - attempt.first_rank, base)
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if attempt.num_workers > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    for name in _OURS_ALONE:
        env.pop(name, None)
    if attempt.on_loss != "end":
        env["ECHELON_ON_LOSS"] = attempt.on_loss
    if attempt.join_after >= 0:
        env["ECHELON_JOIN_AFTER"] = str(attempt.join_after)
        env["ECHELON_LIFE"] = str(attempt.lives.get(rank, 0))
    if attempt.lists_modules:
        env["ECHELON_MODULES_FILE"] = str(rank_dir / MODULES)
    if attempt.torch_backend:
        env["ECHELON_TORCH_BACKEND"] = attempt.torch_backend
    if attempt.terminal_columns is not None:
        env["ECHELON_TERMINAL_COLUMNS"] = str(attempt.terminal_columns)
    return env
