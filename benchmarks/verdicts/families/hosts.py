"""Families in which a rank's host program hangs or dies."""

from __future__ import annotations

from benchmarks.verdicts.engine import Call, Die, Hang, Instruction
from benchmarks.verdicts.families.scene import Scene, Truth
from benchmarks.verdicts.layouts import RANKS_PER_HOST

_HOST = ("host_hang", "data_starvation", "storage_stall", "compile_stall", "gil_hang", "unknown")
_DEAD = ("dead_process", "out_of_memory", "frozen_process", "host_hang")


def _stop_before(scene: Scene, rank: int, step: int, stop: Instruction, **which: bool) -> Call:
    places = scene.calls(rank, step, lambda call: _is_small(scene, call) or not which.get("small"))
    index = scene.random.choice(places)
    call = scene.call(rank, step, index)
    scene.change(rank, step, index, stop, call)
    return call


def _is_small(scene: Scene, call: Call) -> bool:
    return len(call.group.ranks) < scene.world_size


def host_hang(scene: Scene) -> Truth:
    """Make one rank hang before one of its calls."""
    rank = scene.rank()
    _stop_before(scene, rank, scene.step(), Hang())
    return Truth(causes=_HOST, culprits=((rank,),))


def host_hang_subgroup(scene: Scene) -> Truth:
    """Make one rank hang before a call in a group smaller than the world."""
    rank = scene.rank()
    _stop_before(scene, rank, scene.step(), Hang(), small=True)
    return Truth(causes=_HOST, culprits=((rank,),))


def host_hang_first_use(scene: Scene) -> Truth:
    """Make one rank hang before its very first operation."""
    rank = scene.rank()
    scene.programs[rank][0].insert(0, Hang())
    return Truth(causes=_HOST, culprits=((rank,),))


def host_hang_data(scene: Scene) -> Truth:
    """Make one rank hang at the beginning of a step, in its data loader."""
    rank = scene.rank()
    scene.programs[rank][scene.step()].insert(0, Hang())
    return Truth(causes=_HOST, culprits=((rank,),))


def two_host_hangs(scene: Scene) -> Truth:
    """Make two ranks hang at the beginning of the same step."""
    ranks = sorted(scene.random.sample(range(scene.world_size), 2))
    step = scene.step()
    for rank in ranks:
        scene.programs[rank][step].insert(0, Hang())
    return Truth(causes=_HOST, culprits=(tuple(ranks),))


def dead_rank(scene: Scene) -> Truth:
    """Make one rank die without leaving a dump."""
    rank = scene.rank()
    _stop_before(scene, rank, scene.step(), Die())
    return Truth(causes=_DEAD, culprits=((rank,),), lost=(rank,))


def dead_host(scene: Scene) -> Truth:
    """Make all ranks of one host die in the same step."""
    hosts = scene.world_size // RANKS_PER_HOST
    if hosts < 2:
        return dead_rank(scene)
    host = scene.random.randrange(hosts)
    ranks = tuple(range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST))
    step = scene.step()
    for rank in ranks:
        scene.programs[rank][step].insert(0, Die())
    return Truth(causes=_DEAD, culprits=(ranks,), lost=ranks)


def hang_and_lost_dump(scene: Scene) -> Truth:
    """Make one rank hang, and omit the dump of another rank that only waits."""
    rank, lost = scene.random.sample(range(scene.world_size), 2)
    scene.programs[rank][scene.step()].insert(0, Hang())
    return Truth(causes=_HOST, culprits=((rank,), tuple(sorted((rank, lost)))), lost=(lost,))
