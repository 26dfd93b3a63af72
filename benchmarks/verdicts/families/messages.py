"""Families in which sends and receives do not match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.verdicts.engine import Call, Host, Part
from benchmarks.verdicts.families.scene import Scene, Truth


def _p2p_place(scene: Scene) -> tuple[int, int, int, Call]:
    rank, step = scene.rank(), scene.step()
    index = scene.random.choice(scene.calls(rank, step, lambda call: bool(call.parts)))
    return rank, step, index, scene.call(rank, step, index)


def _with_parts(call: Call, parts: Sequence[Part]) -> Call:
    return replace(call, parts=tuple(parts))


_UNMATCHED = ("p2p_unmatched", "skipped_collective", "host_hang", "order_desync")


def p2p_missing(scene: Scene) -> Truth:
    """Make one rank skip one message and continue."""
    rank, step, index, call = _p2p_place(scene)
    gone = scene.random.randrange(len(call.parts))
    peer = call.parts[gone].peer
    left = [part for place, part in enumerate(call.parts) if place != gone]
    scene.change(rank, step, index, *([_with_parts(call, left)] if left else [Host(1e-5)]))
    return Truth(causes=_UNMATCHED, culprits=((rank,), tuple(sorted((rank, peer)))))


def p2p_wrong_peer(scene: Scene) -> Truth:
    """Make one rank send to, or receive from, a rank without a matching call."""
    rank, step, index, call = _p2p_place(scene)
    wrong = scene.random.randrange(len(call.parts))
    part = call.parts[wrong]
    strangers = [r for r in call.group.ranks if r not in (rank, part.peer)]
    odd = replace(part, peer=scene.random.choice(strangers))
    parts = [odd if place == wrong else one for place, one in enumerate(call.parts)]
    scene.change(rank, step, index, _with_parts(call, parts))
    pair = tuple(sorted((rank, part.peer)))
    return Truth(causes=_UNMATCHED, culprits=((rank,), pair))


def p2p_size(scene: Scene) -> Truth:
    """Give one message of a batch a different size from the one that the peer expects."""
    return _odd_part(scene, "shape_mismatch", sizes=(64, 16))


def p2p_dtype(scene: Scene) -> Truth:
    """Give one message of a batch a different dtype from the one that the peer expects."""
    return _odd_part(scene, "dtype_mismatch", dtype="Half")


def _odd_part(scene: Scene, cause: str, **changes: object) -> Truth:
    rank, step, index, call = _p2p_place(scene)
    wrong = scene.random.randrange(len(call.parts))
    peer = call.parts[wrong].peer
    odd = replace(call.parts[wrong], **changes)  # type: ignore[arg-type]
    parts = [odd if place == wrong else one for place, one in enumerate(call.parts)]
    scene.change(rank, step, index, _with_parts(call, parts))
    return Truth(causes=(cause,), culprits=((rank,), tuple(sorted((rank, peer)))))
