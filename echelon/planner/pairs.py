"""Measure the links between pairs of ranks on a backend, for `echelon doctor --pairwise`.

    echelon run --nproc-per-node 2 -m echelon.planner.pairs FILE '[[[0, 1]]]' [BACKEND]

The measurement runs as a separate job and takes a few seconds. It times an all_reduce over all
ranks, and then over each of the given pairs, in rounds. In a round, each rank belongs to at most
one pair. The first rank of each host writes the results to FILE on that host.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.planner.measure import time_link

if TYPE_CHECKING:
    from echelon.dist.group import ProcessGroup

Pair = tuple[int, int]

_TIMEOUT_S = 30.0
_NUM_SMALL, _NUM_LARGE = 50, 5


def main() -> None:
    """Measure latency and bandwidth, across all ranks and for each pair; write them to a file."""
    from echelon import dist

    path, rounds = sys.argv[1], json.loads(sys.argv[2])
    backend = sys.argv[3] if len(sys.argv) > 3 else None
    world = dist.init(backend, timeout_s=_TIMEOUT_S)
    found = measure(world, rounds)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).write_text(json.dumps(found), encoding="utf-8")
    dist.shutdown()


def measure(world: ProcessGroup, rounds: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """Measure the links; return the results on every rank. Collective.

    The results contain a row for each pair: [rank, rank, latency in s, bandwidth in bytes/s]."""
    if world.size == 1:
        return {"error": "a single rank has no links: start more ranks with --nproc-per-node"}
    latency_s, bytes_per_s = _middles(world, world)
    return {
        "backend": world.backend,
        "ranks": world.size,
        "latency_s": latency_s,
        "bytes_per_s": bytes_per_s,
        "pairs": sorted(row for pairs in rounds for row in _round(world, pairs)),
    }


def _round(world: ProcessGroup, pairs: Sequence[Pair]) -> list[list[float]]:
    places = {rank: place for place, pair in enumerate(pairs) for rank in pair}
    place = places.get(world.rank)
    group = world.split(place, key=world.rank)
    own = np.zeros(2)
    if group is not None:
        own[:] = _middles(world, group)
        group.close()
    else:  # it pauses, but still takes part in the collectives
        for _ in range(2):
            world.barrier()
    table = np.empty((world.size, 2))
    world.all_gather(table, own[None])
    return [[a, b, float(table[a, 0]), float(table[a, 1])] for a, b in pairs]


def _middles(world: ProcessGroup, group: ProcessGroup) -> tuple[float, float]:
    """Return the median latency and bandwidth that this rank measured."""
    latency, bandwidth = time_link(world, group, _NUM_SMALL, _NUM_LARGE)
    return float(np.median(latency)), float(np.median(bandwidth))


if __name__ == "__main__":
    main()
