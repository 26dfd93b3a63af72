"""Measure a small all_reduce under torch: over echelon, over Gloo, and without torch.

    python -m echelon run --nproc-per-node 2 benchmarks/collectives/torch_dispatch.py   # 20 s

Prints the median and the best time of a blocking call on 8 bytes, in microseconds, for each backend
in turn. Also prints the times in a world of one, where nothing is sent, which are the cost of the
dispatch alone.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as torch_dist

import echelon.dist as dist

_CALLS = 2000
_ROUNDS = 5


def _times(call: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the best time per call over all rounds, in microseconds."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(_CALLS):
            call()
        rounds.append((time.perf_counter() - began) / _CALLS * 1e6)
    return statistics.median(rounds), min(rounds)


def main() -> None:
    """Measure the backends and print their times."""
    torch.set_num_threads(1)
    world = dist.init()
    torch_dist.init_process_group("echelon", timeout=datetime.timedelta(seconds=60))
    over_gloo = torch_dist.new_group(backend="gloo")
    own = [torch_dist.new_group([rank]) for rank in range(world.size)][world.rank]
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    assert alone is not None
    x = torch.zeros(2)
    cases: dict[str, Callable[[], object]] = {
        "echelon, without torch": lambda: world.all_reduce(x),
        "echelon, under torch": lambda: torch_dist.all_reduce(x),
        "echelon, under torch, asynchronous": lambda: torch_dist.all_reduce(
            x, async_op=True
        ).wait(),
        "gloo": lambda: torch_dist.all_reduce(x, group=over_gloo),
        "world of one, without torch": lambda: alone.all_reduce(x),
        "world of one, under torch": lambda: torch_dist.all_reduce(x, group=own),
    }
    for name, call in cases.items():
        call()
        world.barrier()
        median, best = _times(call)
        if world.rank == 0:
            print(f"{name:36} {median:8.1f} us median {best:8.1f} us best", flush=True)
    torch_dist.destroy_process_group()
    dist.shutdown()


if __name__ == "__main__":
    main()
