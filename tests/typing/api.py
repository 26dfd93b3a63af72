"""What a type checker says of programs that use the public names; `make check` runs it.

Nothing here is executed. Each `assert_type` states what a user's checker infers. Each
`type: ignore` states that a mistake is found: where the mistake is accepted, the comment is
unused, and mypy reports that as an error.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from typing_extensions import assert_type

import echelon.dist as dist
from echelon import recorder
from echelon.analysis import Cause, Report, analyze
from echelon.dist import Array, ProcessGroup, Work
from echelon.store import MemoryStore, PrefixStore


def arrays(group: ProcessGroup, x: np.ndarray, tensor: torch.Tensor, other: Array) -> None:
    """NumPy arrays, torch tensors and every other DLPack array are accepted; the rest is not."""
    group.all_reduce(x)
    group.all_reduce(tensor)
    group.all_reduce(other, "avg")
    group.all_gather(tensor, x)
    group.all_reduce([1.0, 2.0])  # type: ignore[call-overload]
    group.all_reduce(None)  # type: ignore[call-overload]
    group.broadcast(3.5, root=0)  # type: ignore[call-overload]
    group.reduce(x)  # type: ignore[call-overload]


def asynchronous(group: ProcessGroup, x: torch.Tensor, is_async: bool) -> None:
    """The type of a result follows `async_op`."""
    assert_type(group.all_reduce(x, async_op=True), Work)
    assert_type(group.all_reduce(x, async_op=is_async), Work | None)
    assert_type(group.all_gather(x, x, async_op=True), Work)
    assert_type(group.reduce_scatter(x, x, async_op=True), Work)
    assert_type(group.all_to_all(x, x, async_op=True), Work)
    assert_type(group.broadcast(x, 0, async_op=True), Work)
    assert_type(group.gather(None, x, 0, async_op=True), Work)
    assert_type(group.scatter(x, None, 0, async_op=True), Work)
    assert_type(group.barrier(async_op=True), Work)
    assert_type(group.send(x, 1, async_op=True), Work)
    assert_type(group.recv(x), int)
    assert_type(group.recv(x, 1, async_op=True), Work)
    group.all_reduce(x).wait()  # type: ignore[attr-defined]


def groups() -> None:
    """Calls that leave ranks out return None for them; the others return a group."""
    world = dist.init()
    assert_type(world, ProcessGroup)
    assert_type(dist.world(), ProcessGroup)
    assert_type(dist.new_group([0, 1]), ProcessGroup | None)
    assert_type(world.split(0), ProcessGroup)
    assert_type(world.split(None), ProcessGroup | None)
    assert_type(world.ranks, tuple[int, ...])
    assert_type(world.size, int)
    world.rank = 3  # type: ignore[misc]


def marks(batches: list[bytes]) -> None:
    """What `watch` yields keeps its type."""
    with recorder.span("data_wait"):
        pass
    for batch in recorder.watch(batches):
        assert_type(batch, bytes)
    assert_type(recorder.last_step(), int | None)


def stores() -> None:
    """Stores return bytes."""
    store = PrefixStore("job", MemoryStore())
    assert_type(store.get("key"), bytes)
    assert_type(store.add("key", 1), int)


def verdicts(folder: Path) -> None:
    """A report's findings have causes that a checker knows."""
    report = analyze(folder)
    assert_type(report, Report)
    assert_type(report.findings[0].cause, Cause)
