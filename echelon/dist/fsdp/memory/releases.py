"""Track device memory that was released while kernels might still be using it.

The host runs ahead of the device. It can release a unit and gather the next units before the first
unit's kernels have run, so that many units occupy memory at the same time. A gather that would
exceed the limit on such memory blocks until the device has completed earlier work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class Releases:
    """A limit on memory that was released but might still be in use.

    Args:
        limit: a function that returns the limit in bytes. Memory for a unit that is larger than
            the limit is still allocated, but only after all earlier work is complete.
        device_module: a function that returns the torch module for a device, such as `torch.cuda`.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        device_module: Callable[[torch.device], Any] = torch.get_device_module,
    ) -> None:
        self._limit = limit
        self._device_module = device_module
        self._pending: deque[tuple[Any, int]] = deque()  # event, bytes

    @property
    def num_bytes(self) -> int:
        """The number of released bytes that might still be in use."""
        return sum(num_bytes for _, num_bytes in self._pending)

    def add(self, num_bytes: int, device: torch.device) -> None:
        """Record the release of memory that work on the current stream might still be using."""
        module = self._device_module(device)
        if self._is_capturing(module):
            return  # a captured graph has memory of its own, and no event of it ever happens
        event = module.Event()
        event.record(module.current_stream(device))
        self._pending.append((event, num_bytes))

    def make_room(self, num_bytes: int) -> None:
        """Block until `num_bytes` fit within the limit, or until no released memory is in use."""
        while self._pending and self.num_bytes + num_bytes > self._limit():
            event, _ = self._pending.popleft()
            event.synchronize()

    @staticmethod
    def _is_capturing(module: Any) -> bool:
        asks = getattr(module, "is_current_stream_capturing", None)
        return bool(asks and asks())
