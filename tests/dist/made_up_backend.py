"""Backends of the made-up device, as plug-ins would bring them."""

from __future__ import annotations

import torch

from echelon.dist.backends.device.engines.stream import StreamEngine
from echelon.dist.backends.device.library import DeviceLibrary
from echelon.dist.backends.device.own_device import with_own_device
from echelon.dist.backends.device.runtime import DeviceRuntime
from tests.dist import made_up_library
from tests.dist.made_up_device import accelerator


class MadeUpRuntime(DeviceRuntime):
    """The made-up device in place of torch's."""

    def find_accelerator(self):
        return accelerator

    def as_tensor(self, owner, index):
        return owner.tensor

    def identity(self, index):
        return f"device {index}"

    def run(self, stream, job):
        stream.put(job)

    def empty_like(self, tensor, length, stream):
        return tensor.new_empty(length)

    def copy(self, tensor, callers):
        made = torch.empty_like(tensor)
        for stream in callers[1:]:
            callers[0].wait_stream(stream)
        callers[0].put(lambda: made.copy_(tensor))
        return made

    def on_device(self, tensor, index):
        return tensor

    def relaxed(self):
        return accelerator.relaxed()

    def pinned(self, num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy_over(self, target, source, stream):
        stream.put(lambda: target.copy_(source))


class MadeUpLibrary(MadeUpRuntime, DeviceLibrary):
    """The made-up device's library."""

    name = "made-up"
    device = "cuda"
    dtypes = frozenset({"float32", "float64", "int64", "uint8"})
    reduce_ops = frozenset({"sum", "avg", "min", "max", "prod"})

    def unique_id(self):
        return made_up_library.unique_id()

    def open(self, size, rank, unique_id, index, *, is_lane):
        return made_up_library.Communicator(size, rank, unique_id, index)

    def group(self):
        return made_up_library.group()


def create(members, store, timeout_s):
    return StreamEngine(MadeUpLibrary(), with_own_device(members, accelerator), store, timeout_s)


create.device = "cuda"
create.runtime = MadeUpRuntime
create.needs_own_device = lambda: True
