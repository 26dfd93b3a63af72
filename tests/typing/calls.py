"""What a type checker makes of the calls of a group; read by mypy in `make check`, never run."""

from typing import Any

from typing_extensions import assert_type

import echelon
import echelon.dist as dist
from echelon.dist import ProcessGroup, Work
from echelon.dist.mesh import DeviceMesh


def collectives(world: ProcessGroup, x: Any, later: bool) -> None:
    assert_type(world.all_reduce(x), None)
    assert_type(world.all_reduce(x, "max", timeout_s=1.0), None)
    assert_type(world.all_reduce(x, async_op=True), Work)
    assert_type(world.all_reduce(x, async_op=later), Work | None)
    assert_type(world.reduce(x, 0), None)
    assert_type(world.reduce(x, 0, async_op=True, timeout_s=1.0), Work)
    assert_type(world.all_gather(x, x), None)
    assert_type(world.all_gather(x, x, async_op=True), Work)
    assert_type(world.all_gather(x, x, output_splits=[1]), None)
    assert_type(world.all_gather(x, x, async_op=True, output_splits=[1]), Work)
    assert_type(world.reduce_scatter(x, x, input_splits=[1], async_op=True), Work)
    assert_type(world.reduce_scatter(x, x, async_op=False), None)
    assert_type(world.reduce_scatter(x, x, async_op=True), Work)
    assert_type(world.broadcast(x, 0), None)
    assert_type(world.broadcast(x, 0, async_op=True), Work)
    assert_type(world.all_to_all(x, x, [1], [1]), None)
    assert_type(world.all_to_all(x, x, async_op=True), Work)
    assert_type(world.gather(None, x, 0), None)
    assert_type(world.gather(None, x, 0, async_op=True), Work)
    assert_type(world.scatter(x, None, 0), None)
    assert_type(world.scatter(x, None, 0, async_op=True), Work)
    assert_type(world.barrier(), None)
    assert_type(world.barrier(async_op=True), Work)
    world.all_reduce(x, async_op=True).wait()  # no check for None is needed


def messages(world: ProcessGroup, x: Any) -> None:
    assert_type(world.send(x, 1), None)
    assert_type(world.send(x, 1, async_op=True), Work)
    assert_type(world.recv(x, 1), int)
    assert_type(world.recv(x, None, tag=3), int)
    work = world.recv(x, async_op=True)
    assert_type(work, Work)
    assert_type(work.source, int)
    assert_type(work.is_completed(), bool)
    assert_type(work.exception(), BaseException | None)


def groups(mesh: DeviceMesh) -> None:
    assert_type(mesh["dp"], DeviceMesh)
    assert_type(mesh.group("dp"), ProcessGroup)
    assert_type(mesh.get_group(), ProcessGroup)
    assert_type(dist.is_initialized(), bool)
    assert_type(dist.new_group([0]), ProcessGroup | None)
    assert_type(echelon.dist.world(), ProcessGroup)
