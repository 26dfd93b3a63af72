"""Measure the speed of ranks and links for `echelon plan --links FILE`, as a separate job:

    echelon run --nproc-per-node 4 -m echelon.planner.measure --out links.json

All groups of the same kind communicate at the same time, as they do in training. Inside a node, a
group consists of consecutive ranks. Across nodes, a group consists of ranks with the same local
rank. The compute rate is also measured on all ranks at the same time. Each figure is the median of
repeated measurements, with their 10th and 90th percentiles as its bounds. The compute rate is then
lowered and its bounds are widened, because training also does slower work between its matrix
products.

Arrays are in host memory, and numpy computes the matrix products in fp32. For accelerators, pass
the peak rate to `echelon plan` (`--peak-tflops`), and write the links file by hand from the results
of the vendor's benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.planner.machine import FORMAT

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

_SMALL_NUMBERS, _LARGE_NUMBERS = 64, 1 << 20  # of 4 bytes
_SMALL_CALLS, _LARGE_CALLS = 200, 20
_WIDTH = 512  # of the matrices
_PRODUCTS = 30
_MEMORY_NUMBERS = 1 << 23


def main(argv: Sequence[str] | None = None) -> int:
    """Run the measurements on all ranks, write the results to a file on rank 0, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m echelon.planner.measure")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    from echelon import dist

    world = dist.init()
    found = measure(world)
    if world.rank == 0:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        kinds = len(found["links"])
        print(
            f"{args.out}: link speeds for {kinds} kinds of groups, measured on {world.size} ranks"
        )
    dist.shutdown()
    return 0


def measure(world: ProcessGroup) -> dict[str, Any]:
    """Measure links and processors; return the file's contents on every rank. Collective."""
    product = _make_product()
    flops = _all(world, [2.0 * _WIDTH**3 / seconds for seconds in _timed(product, _PRODUCTS)])
    memory = _all(world, [_MEMORY_NUMBERS * 12 / s for s in _timed(_make_addition(), 10)])
    links = [_link(world, *kind) for kind in _kinds(world)]
    return {
        "echelon_links": FORMAT,
        "ranks": world.size,
        # Between its products, training does slower work too.
        "flops_per_s": _figure(flops, scale=0.8, widened=1.25),
        "bytes_per_s": _figure(memory),
        "overlap": _overlap(world, product),
        "links": links,
    }


def _kinds(world: ProcessGroup) -> Iterator[tuple[int, int]]:
    """Yield the (size, rank stride) of each kind of group to measure, smallest stride first."""
    per_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", world.size)), world.size)
    for size in range(2, per_node + 1):
        if per_node % size == 0:
            yield size, 1
    num_nodes = world.size // per_node
    for size in range(2, num_nodes + 1):
        if num_nodes % size == 0 and num_nodes * per_node == world.size:
            yield size, per_node


def _link(world: ProcessGroup, size: int, distance: int) -> dict[str, Any]:
    """Time small and then large all_reduces, with all groups of one kind active at the same time.

    Collective.
    """
    block = world.rank // (size * distance)
    group = world.split(block * distance + world.rank % distance, key=world.rank)
    latency, bandwidth = time_link(world, group)
    group.close()
    return {
        "size": size,
        "is_across": distance > 1,
        "latency_s": _figure(_all(world, latency)),
        "bytes_per_s": _figure(_all(world, bandwidth)),
    }


def time_link(
    world: ProcessGroup,
    group: ProcessGroup,
    num_small: int = _SMALL_CALLS,
    num_large: int = _LARGE_CALLS,
) -> tuple[list[float], list[float]]:
    """Return the latencies (s) per ring step and the bandwidths (bytes/s) of all_reduces.

    All groups of `world` measure at the same time. `group` is this rank's group, which has at least
    two ranks.
    """
    small, large = (np.ones(n, np.float32) for n in (_SMALL_NUMBERS, _LARGE_NUMBERS))
    short_s = _calls(world, group, small, num_small)
    long_s = _calls(world, group, large, num_large)
    steps = 2 * (group.size - 1)
    latency = [seconds / steps for seconds in short_s]
    middle = float(np.median(short_s))
    sent = steps / group.size * large.nbytes
    bandwidth = [sent / max(seconds - middle, seconds / 10) for seconds in long_s]
    return latency, bandwidth


def _calls(world: ProcessGroup, group: ProcessGroup, x: Any, number: int) -> list[float]:
    group.all_reduce(x, op="avg")
    world.barrier()
    return _timed(lambda: group.all_reduce(x, op="avg"), number)


def _overlap(world: ProcessGroup, product: Callable[[], object]) -> dict[str, float]:
    """Return the fraction of a collective's time that computation can hide, with bounds.

    Collective.
    """
    x = np.ones(_LARGE_NUMBERS, np.float32)
    shares = []
    for _ in range(9):
        world.barrier()
        (together_s,) = _timed(lambda: world.all_reduce(x, op="avg"), 1)
        (product_s,) = _timed(product, 1)
        num_products = max(1, round(together_s / product_s))
        world.barrier()
        (alone_s,) = _timed(lambda n=num_products: [product() for _ in range(n)], 1)  # type: ignore[misc]
        world.barrier()
        began_s = time.perf_counter()
        work = world.all_reduce(x, op="avg", async_op=True)
        for _ in range(num_products):
            product()
        work.wait()
        both_s = time.perf_counter() - began_s
        hidden_s = together_s + alone_s - both_s
        shares.append(min(1.0, max(0.0, hidden_s / min(together_s, alone_s))))
    return _figure(_all(world, shares))


def _make_product() -> Callable[[], object]:
    matrix, out = np.ones((2, _WIDTH, _WIDTH), np.float32)
    return lambda: np.matmul(matrix, matrix, out=out)


def _make_addition() -> Callable[[], object]:
    left, right = np.ones((2, _MEMORY_NUMBERS), np.float32)
    return lambda: np.add(left, right, out=left)


def _timed(call: Callable[[], object], number: int) -> list[float]:
    took = []
    for _ in range(number):
        began_s = time.perf_counter()
        call()
        took.append(max(time.perf_counter() - began_s, 1e-9))
    return took


def _all(world: ProcessGroup, own: list[float]) -> list[float]:
    """Gather every rank's values into one list, on all ranks. Collective."""
    out = np.empty((world.size, len(own)))
    world.all_gather(out, np.array([own]))
    return [float(value) for value in out.ravel()]


def _figure(values: list[float], *, scale: float = 1.0, widened: float = 1.0) -> dict[str, float]:
    low, likely, high = (scale * float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9))
    return {"likely": likely, "low": low / widened, "high": high * widened}


if __name__ == "__main__":
    sys.exit(main())
