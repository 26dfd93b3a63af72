"""Families in which the arguments or kinds of the ranks' calls differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.verdicts.engine import Call
from benchmarks.verdicts.families.scene import Scene, Truth


def plain(call: Call) -> bool:
    """Return whether a call is a collective without a root, and not a barrier."""
    return not call.parts and call.root < 0 and call.operation != "all_reduce_barrier"


def with_majority(scene: Scene) -> tuple[int, int, int, Call]:
    """Draw a rank, a step and a plain call in it, if possible in a group of more than two."""
    rank, step = scene.rank(), scene.step()
    places = scene.calls(rank, step, plain)
    voted = [i for i in places if len(scene.call(rank, step, i).group.ranks) > 2] or places
    index = scene.random.choice(voted)
    return rank, step, index, scene.call(rank, step, index)


def _odd_call(scene: Scene, cause: str, **changes: object) -> Truth:
    rank, step, index, call = with_majority(scene)
    scene.change(rank, step, index, replace(call, **changes))  # type: ignore[arg-type]
    return Truth(causes=(cause,), culprits=((rank,),))


def op_mismatch(scene: Scene) -> Truth:
    """Make one rank call a different collective."""
    rank, step, index, call = with_majority(scene)
    other = "all_gather" if call.operation != "all_gather" else "all_reduce"
    scene.change(rank, step, index, replace(call, operation=other, line=call.line + 3))
    return Truth(causes=("op_mismatch",), culprits=((rank,),))


def shape_mismatch(scene: Scene) -> Truth:
    """Make one rank pass tensors of twice the size."""
    rank, step, index, call = with_majority(scene)
    odd = replace(call, inputs=_grown(call.inputs), outputs=_grown(call.outputs))
    scene.change(rank, step, index, odd)
    return Truth(causes=("shape_mismatch", "split_mismatch"), culprits=((rank,),))


def _grown(sizes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple((size[0] * 2, *size[1:]) for size in sizes)


def dtype_mismatch(scene: Scene) -> Truth:
    """Make one rank pass a different dtype."""
    return _odd_call(scene, "dtype_mismatch", dtype="BFloat16")


def all_alike(scene: Scene) -> Truth:
    """Make all ranks of a group pass an output whose size does not match their input."""
    rank, step = scene.rank(), scene.step()
    gathers = ("_all_gather_base", "_reduce_scatter_base")
    index = scene.random.choice(scene.calls(rank, step, lambda call: call.operation in gathers))
    group = scene.call(rank, step, index).group
    for member in group.ranks:
        call = scene.call(member, step, index)
        wrong = ((call.outputs[0][0] + 1,),)
        scene.change(member, step, index, replace(call, outputs=wrong, broken=True))
    return Truth(causes=("shape_mismatch",), culprits=(group.ranks, ()))


def even_splits(scene: Scene) -> Truth:
    """Make one rank send one more token to one peer than that peer expects."""
    rank, step = scene.rank(), scene.step()
    index = scene.random.choice(scene.calls(rank, step, lambda call: bool(call.sends)))
    call = scene.call(rank, step, index)
    sends = (call.sends[0] + 1, *call.sends[1:])
    odd = replace(call, sends=sends, inputs=((sum(sends), *call.inputs[0][1:]),))
    scene.change(rank, step, index, odd)
    return Truth(causes=("split_mismatch", "shape_mismatch"), culprits=((rank,),))
