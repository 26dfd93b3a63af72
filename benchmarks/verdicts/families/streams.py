"""Families in which the order or the number of calls differs between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.verdicts.engine import Call
from benchmarks.verdicts.families.calls import plain, with_majority
from benchmarks.verdicts.families.scene import Scene, Truth

# With several groups, a rank that left a call out and waits in the next group cannot be told from
# one that makes the two calls in the other order.
_SLIP = ("skipped_collective", "op_mismatch", "shape_mismatch")
_SLIP_OR_ORDER = (*_SLIP, "order_desync")


def _slip_causes(scene: Scene) -> tuple[str, ...]:
    return _SLIP_OR_ORDER if len(scene.shape.layout.axes) > 1 else _SLIP


def skipped(scene: Scene) -> Truth:
    """Make one rank skip a collective."""
    rank, step, index, _ = with_majority(scene)
    call = scene.call(rank, step, index)
    rest = [one for one in scene.programs[rank][step] if one is not call]
    waits = [one for one in rest if getattr(one, "tag", None) != call.tag or not call.tag]
    scene.programs[rank][step] = waits
    return Truth(causes=_slip_causes(scene), culprits=((rank,),))


def extra(scene: Scene) -> Truth:
    """Make one rank call a collective twice."""
    rank, step, index, call = with_majority(scene)
    again = replace(call, tag="", line=call.line + 5, function="evaluate", blocking=True)
    scene.change(rank, step, index, call, again)
    return Truth(causes=_slip_causes(scene), culprits=((rank,),))


def uneven_inputs(scene: Scene) -> Truth:
    """Give one rank fewer batches, so that it leaves the loop and enters the final barrier."""
    rank, step = scene.rank(), scene.step()
    world = scene.shape.layout.group("world", rank)
    scene.programs[rank][step:] = [
        [
            Call(
                group=world,
                operation="all_reduce_barrier",
                inputs=((1,),),
                outputs=((1,),),
                line=200,
                function="main",
            )
        ]
    ]
    causes = ("skipped_collective", "op_mismatch", "order_desync", "host_hang", "shape_mismatch")
    return Truth(causes=causes, culprits=((rank,),))


def order_desync(scene: Scene) -> Truth:
    """Make one rank call two adjacent operations of different groups in reverse order."""
    random = scene.random
    step = scene.step()
    rank = scene.rank()
    places = [
        (i, j)
        for i, j in _neighbors(scene.calls(rank, step, plain))
        if scene.call(rank, step, i).group != scene.call(rank, step, j).group
    ]
    first, second = random.choice(places)
    a, b = scene.call(rank, step, first), scene.call(rank, step, second)
    peer = next(r for r in a.group.ranks if r != rank)
    program = scene.programs[rank][step]
    program[first], program[second] = replace(b, blocking=True), replace(a, blocking=True)
    _block(scene, step, first, second)
    shared = set(a.group.ranks) & set(b.group.ranks)
    both = tuple(sorted(shared))
    return Truth(
        causes=("order_desync",),
        culprits=((rank,), both, tuple(sorted({*a.group.ranks, *b.group.ranks}))),
        note=f"rank {rank} against {peer}",
    )


def _neighbors(places: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(places))


def _block(scene: Scene, step: int, *indices: int) -> None:
    """Make the calls at some indices blocking on all ranks, so that their order matters."""
    for steps in scene.programs:
        for index in indices:
            one = steps[step][index]
            if isinstance(one, Call):
                steps[step][index] = replace(one, blocking=True)
