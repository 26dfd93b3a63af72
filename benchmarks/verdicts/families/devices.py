"""Families in which a device or a link fails."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.verdicts.engine import NEVER, Kernel
from benchmarks.verdicts.families.scene import Scene, Truth
from benchmarks.verdicts.layouts import RANKS_PER_HOST


def device_kernel(scene: Scene) -> Truth:
    """Make a compute kernel hang, so that later kernels on its device never start."""
    rank, step = scene.rank(), scene.step()
    kernels = [i for i, one in enumerate(scene.programs[rank][step]) if isinstance(one, Kernel)]
    scene.change(rank, step, scene.random.choice(kernels), Kernel(NEVER))
    scene.wants["timing"] = True
    return Truth(causes=("device_stuck", "host_hang"), culprits=((rank,),), note="kernel")


def device_unnoticed(scene: Scene) -> Truth:
    """Make a device hang in a collective after it has sent its peers all their data."""
    rank, step = scene.rank(), scene.step()
    places = scene.calls(rank, step, lambda call: not call.parts and call.root < 0)
    index = scene.random.choice(places)
    scene.change(rank, step, index, replace(scene.call(rank, step, index), unnoticed=True))
    return Truth(causes=("device_stuck",), culprits=((rank,),))


def network(scene: Scene) -> Truth:
    """Cut the link between two hosts: all ranks are in the operation, and none completes it."""
    random = scene.random
    per_host = max(1, min(RANKS_PER_HOST, scene.world_size // 2))
    a, b = random.sample(range(scene.world_size // per_host), 2)
    left = range(a * per_host, (a + 1) * per_host)
    right = range(b * per_host, (b + 1) * per_host)
    scene.cut_pairs = frozenset(frozenset((x, y)) for x in left for y in right)
    scene.wants["cut"] = True
    return Truth(
        causes=("network", "device_stuck", "unknown"),
        culprits=((), tuple(left), tuple(right), tuple(sorted((*left, *right)))),
    )
