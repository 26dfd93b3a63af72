"""Faults of the fault matrix in plain torch programs over Gloo.

    echelon run --nproc-per-node 4 benchmarks/analysis/faulty_torch.py Hang 2 --timeout 6

runs 30 steps of three all_reduces; rank 2 hangs in step 10. It does not import echelon: torch's own
timeout ends operations that are pending for too long. `faults.py --torch` runs all faults and
judges the verdicts.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

AT_STEP = 10
STEPS = 30


def hang() -> None:
    """Sleep for an hour, longer than any case runs."""
    time.sleep(3600)


def spin() -> None:
    """Compute indefinitely."""
    total = 0
    while True:
        total += 1


def go_wrong(fault: str) -> None:
    """Inject the fault with the given name."""
    if fault == "Hang":
        hang()
    elif fault == "Spin":
        spin()
    elif fault == "Raise":
        raise ValueError("batch 10 is corrupt")
    elif fault == "Kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "Exit":
        os._exit(7)
    elif fault == "Freeze":
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> int:
    """Train with constants as gradients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault")
    parser.add_argument("culprit", type=int)
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    gradients = [torch.ones(1000 * (bucket + 1)) for bucket in range(3)]
    for step in range(STEPS):
        if step == AT_STEP and dist.get_rank() == options.culprit:
            go_wrong(options.fault)
        for gradient in gradients:
            dist.all_reduce(gradient, op=dist.ReduceOp.MAX)
        time.sleep(0.01)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
