"""Provide memory that can be released and allocated again behind the same tensor.

Autograd holds views of a unit's gathered parameters from forward to backward, so the tensor must
not be replaced when its memory is released. On the CPU, the memory is an anonymous mapping whose
pages are returned to the operating system. On a device, the memory is a tensor storage that is
resized to zero and back.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import torch

from echelon.dist.fsdp.memory.pages import Pages
from echelon.dist.fsdp.memory.releases import Releases

PAGE_BYTES = mmap.PAGESIZE
_HUGE_BYTES = 2 << 20


class Memory:
    """The memory that the units of one group share and reuse.

    Args:
        limit: a function that returns a limit in bytes. On the host, the limit applies to idle
            memory; on a device, it applies to released memory that might still be in use.

    Attributes:
        pages: the idle memory on the host.
        pool: the buffers for reductions.
        releases: the limit on device memory that was released but might still be in use.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.pages = Pages(limit)
        self.pool = Pool()
        self.releases = Releases(limit)

    def make_storage(self, numel: int, dtype: torch.dtype, device: torch.device) -> Storage:
        """Return a storage for `numel` elements, without allocating its memory."""
        if device.type == "cpu":
            return HostStorage(numel, dtype, self.pages)
        return DeviceStorage(numel, dtype, device, self.releases)


class Storage:
    """A flat tensor, `tensor` [numel], whose memory can be released and allocated again."""

    tensor: torch.Tensor

    def take(self) -> None:
        """Allocate the tensor's memory, with undefined contents."""

    def release(self, keep: list[tuple[int, int]]) -> None:
        """Release the memory, except for the ranges in `keep`.

        Args:
            keep: ranges of elements to retain, as (first, last) pairs in ascending order. Supported
                only on the host.
        """
        raise NotImplementedError


class HostStorage(Storage):
    """A storage in an anonymous private mapping of host memory.

    Args:
        pages: the pool of idle memory that this storage shares with others; None if the storage
            never releases its memory.

    Attributes:
        address, num_bytes: the address and size of the mapping's aligned part.
        payload_bytes: the size of the tensor.
    """

    def __init__(self, numel: int, dtype: torch.dtype, pages: Pages | None = None) -> None:
        self._itemsize = dtype.itemsize
        self.payload_bytes = numel * dtype.itemsize
        num_bytes = max(1, self.payload_bytes)
        huge = pages is not None and num_bytes >= _HUGE_BYTES
        grain = _HUGE_BYTES if huge else PAGE_BYTES
        self.num_bytes = -(-num_bytes // grain) * grain
        spare = grain if huge else 0  # the system aligns to small pages only
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, self.num_bytes + spare, flags=flags)
        raw = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start = -raw.data_ptr() % grain
        self.address = raw.data_ptr() + self._start
        self.tensor = raw[self._start : self._start + numel * dtype.itemsize].view(dtype)
        self._pages = pages if huge else None
        self._has_memory = False
        if huge:
            with contextlib.suppress(OSError):  # a kernel without them
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start, self.num_bytes)
        if self._pages is not None:
            self._pages.join(self)

    def take(self) -> None:
        """Take over the memory of an idle storage.

        If no idle storage has suitable memory, pages are allocated on first access.
        """
        if not self._has_memory and self._pages is not None:
            self._pages.supply(self)
        self._has_memory = True

    def release(self, keep: list[tuple[int, int]]) -> None:
        """Retain the memory for other storages or, if none can use it, return it to the system."""
        if not self._has_memory:
            return
        self._has_memory = bool(keep)
        if keep or self._pages is None or not self._pages.keep(self):
            self.give_back(keep)

    def give_back(self, keep: Sequence[tuple[int, int]] = ()) -> None:
        """Return the pages to the system, except those that hold elements of the ranges `keep`."""
        position = 0
        for first, last in [*keep, (self.num_bytes // self._itemsize,) * 2]:
            start = -(-position * self._itemsize // PAGE_BYTES) * PAGE_BYTES
            stop = first * self._itemsize // PAGE_BYTES * PAGE_BYTES
            if stop > start:
                self._map.madvise(mmap.MADV_DONTNEED, self._start + start, stop - start)
            position = last


class DeviceStorage(Storage):
    """A storage for a tensor on a device; resizing the storage to zero releases its memory.

    Args:
        releases: the limit on released memory that might still be in use; None means unlimited.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        releases: Releases | None = None,
    ) -> None:
        self._releases = releases
        self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._num_bytes = numel * dtype.itemsize
        self.tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """Allocate the memory with the device's caching allocator if it is not allocated yet."""
        storage = self.tensor.untyped_storage()
        if storage.size() == self._num_bytes:
            return
        if self._releases is not None:
            self._releases.make_room(self._num_bytes)
        storage.resize_(self._num_bytes)

    def release(self, keep: list[tuple[int, int]]) -> None:  # noqa: ARG002
        """Release all of the memory."""
        storage = self.tensor.untyped_storage()
        if self._releases is not None and storage.size():
            self._releases.add(self._num_bytes, self.tensor.device)
        storage.resize_(0)


class Pool:
    """Flat buffers that are reused, so that addresses stay fixed and memory is not fragmented.

    The pool is not thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # each [num_bytes], uint8
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def acquire(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of `numel` elements with undefined contents; see `give_back`."""
        num_bytes = numel * dtype.itemsize
        fitting = [
            index
            for index, raw in enumerate(self._free)
            if raw.numel() >= num_bytes and raw.device == device
        ]
        if fitting:
            best = min(fitting, key=lambda index: self._free[index].numel())
            raw = self._free.pop(best)
        else:
            if self._free:  # too small: replaced, so that there are never more than were needed
                del self._free[min(range(len(self._free)), key=lambda i: self._free[i].numel())]
            raw = _raw(num_bytes, device)
        buffer = raw[:num_bytes].view(dtype)
        self._lent[buffer.data_ptr()] = raw
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Give back to the pool a tensor that was obtained from `acquire`."""
        raw = self._lent.pop(buffer.data_ptr(), None)
        if raw is not None:  # else lent before `clear`
            self._free.append(raw)

    def clear(self) -> None:
        """Drop all unused buffers. A later `give_back` of a buffer now in use has no effect."""
        self._free.clear()
        self._lent.clear()

    @property
    def num_bytes(self) -> int:
        """The number of bytes in unused buffers."""
        return sum(raw.numel() for raw in self._free)


def _raw(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return HostStorage(num_bytes, torch.uint8, Pages()).tensor
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
