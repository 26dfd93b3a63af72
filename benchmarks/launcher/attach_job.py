"""A plain DDP program on Gloo that hangs because of a fault; it does not import echelon.

torchrun --standalone --nproc-per-node 2 benchmarks/launcher/attach_job.py FAULT

The fault occurs on rank 1 at step 5. Each faulty line ends with a comment that names its fault.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

fault = sys.argv[1]
me = int(os.environ["RANK"])
STEP = 5


class Rows(Dataset):
    """A dataset of ones, with the faults that occur in a data loader."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, row: int) -> torch.Tensor:
        if me == 1 and row == 2 * STEP and fault in ("loader", "loader_worker"):
            time.sleep(3600)  # loader, loader_worker
        return torch.ones(8)


def batches() -> DataLoader:
    """Return the data loader for the requested fault."""
    return DataLoader(Rows(), batch_size=2, num_workers=2 if fault == "loader_worker" else 0)


def save(model: torch.nn.Module) -> None:
    """Write a checkpoint to storage that hangs: a pipe that no process reads."""
    path = Path(tempfile.mkdtemp()) / "checkpoint"
    os.mkfifo(path)
    os.open(path, os.O_RDWR)
    torch.save({"model": model.state_dict(), "pad": torch.ones(1 << 20)}, path)  # checkpoint


def compile_it() -> None:
    """Compile with a backend that never returns."""

    def backend(*_: object) -> object:
        time.sleep(3600)  # compile

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))


def stop(model: torch.nn.Module) -> None:
    """Inject the fault between two steps."""
    if fault == "user":
        time.sleep(3600)  # user
    elif fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # lock
    elif fault == "spin":
        while True:  # spin
            pass  # spin
    elif fault == "child":
        subprocess.run(["sleep", "3600"], check=False)  # child
    elif fault == "file_lock":
        with Path(__file__).open() as first, Path(__file__).open() as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            fcntl.flock(second, fcntl.LOCK_EX)  # file_lock
    elif fault == "checkpoint":
        save(model)
    elif fault == "compile":
        compile_it()
    elif fault == "store":
        dist.distributed_c10d._get_default_store().get("never written")  # store
    elif fault == "gil":
        ctypes.PyDLL(None).sleep(3600)  # gil
    elif fault == "frozen":
        os.kill(os.getpid(), 19)


def main() -> None:
    """Train until the fault occurs."""
    if fault == "never_comes" and me == 1:
        time.sleep(3600)  # never_comes
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step, batch in enumerate(batches()):
        if me == 1 and step == STEP:
            stop(model)
            if fault == "uneven":
                break
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if fault == "healthy":
            time.sleep(0.01 * (1 + me))  # uneven work
        if step == STEP - 2:
            print("near", flush=True)
    dist.barrier()  # uneven


main()
