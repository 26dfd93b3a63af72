"""Faults for the examples in this folder: `--fault NAME --rank R --step S`.

Each fault does what its name says, in plain code. Neither this file nor the examples refer to the
runtime that explains the consequences.
`evaluation`, `compile_pause`, `saves` and `uneven_work` are healthy: every rank does something that
takes long, and then continues.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

BATCH = 4
FEATURES = 8

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--fault", default="none")
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--step", type=int, default=5)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pause", type=float, default=8.0)
parser.add_argument("--folder", default="/tmp")
arguments = parser.parse_args()
rank = int(os.environ.get("RANK", "0"))
workers = int(arguments.fault.startswith("worker"))


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A dataset of numbers; reading a row may hang, in this process or in a worker."""

    def __init__(self, num_rows: int | None = None) -> None:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.num_rows = num_rows or arguments.steps * BATCH * world_size
        self.num_read = 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_read += 1
        if self.num_read == arguments.step * BATCH and is_due("loader", "worker"):
            wait_for_the_disk()
        if self.num_read == arguments.step * BATCH and is_due("worker_exception"):
            raise ValueError(f"row {index} is corrupt")  # culprit: worker_exception
        x = torch.linspace(0, 1, FEATURES) + index % 7
        return x, x.sum().reshape(1)


def is_due(*names: str) -> bool:
    """Return whether one of these faults was requested for this rank, and print it if so."""
    due = arguments.fault in names and rank == arguments.rank
    if due:
        print(f"fault {arguments.fault} on rank {rank}", flush=True)
    return due


def wait_for_the_disk() -> None:
    """Hang while reading a row."""
    time.sleep(3600)  # culprit: loader, worker


def work(step: int) -> None:
    """Do the work between two training steps; on one rank, the requested fault may occur."""
    if arguments.fault == "uneven_work":
        _compute(0.1 * rank)
    if step != arguments.step:
        return
    if arguments.fault == "shape":
        is_due("shape")
        dist.all_reduce(torch.ones(5 if rank == arguments.rank else 3))  # culprit: shape
    if arguments.fault in _PAUSES:
        _PAUSES[arguments.fault]()
    elif arguments.fault in _ACTS and is_due(arguments.fault):
        _ACTS[arguments.fault]()


def has_had_enough(step: int) -> bool:
    """Return whether this rank leaves its loop early, as with a guard against NaN."""
    return step == arguments.step and is_due("leave")


def batches(loader: Iterator) -> Iterator:
    """Iterate over a loader that yields fewer batches on one rank."""
    for step, batch in enumerate(loader):
        if step == arguments.step and is_due("uneven"):
            return
        yield batch


def checkpoint_path() -> Path:
    """Return the path for a checkpoint; with a fault on this rank, a pipe that no process reads."""
    path = Path(arguments.folder) / f"checkpoint_{rank}_{os.getpid()}.pt"
    if is_due("checkpoint"):
        os.mkfifo(path)
    return path


def _user() -> None:
    time.sleep(3600)  # culprit: user


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # culprit: lock


def _gil() -> None:
    ctypes.PyDLL(None).sleep(3600)  # culprit: gil


def _frozen() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # culprit: frozen


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exception() -> None:
    raise ValueError("a bad batch")  # culprit: exception


def _spin() -> None:
    all(True for _ in iter(int, 1))  # culprit: spin


def _store() -> None:
    dist.distributed_c10d._get_default_store().get("a-key-that-no-rank-sets")  # culprit: store


def _compile() -> None:
    def backend(*_: object) -> object:
        time.sleep(3600)  # culprit: compile

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))


def _compute(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        torch.ones(64, 64).matmul(torch.ones(64, 64))


def _evaluation() -> None:
    _compute(arguments.pause)
    dist.barrier()


def _compile_pause() -> None:
    def backend(graph: torch.fx.GraphModule, _: object) -> Callable:
        _compute(arguments.pause)
        return graph.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))


def _saves() -> None:
    for turn in range(8):
        torch.save(torch.ones(1_000_000), Path(arguments.folder) / f"big_{rank}_{turn}.pt")


_PAUSES: dict[str, Callable[[], None]] = {
    "evaluation": _evaluation,
    "compile_pause": _compile_pause,
    "saves": _saves,
}
_ACTS: dict[str, Callable[[], None]] = {
    "user": _user,
    "lock": _lock,
    "gil": _gil,
    "frozen": _frozen,
    "kill": _kill,
    "exception": _exception,
    "spin": _spin,
    "store": _store,
    "compile": _compile,
}
