"""Emulate a link whose frames pass through this process, which delays or drops them.

Many machines lack the kernel's own delay (netem). One thread reads and writes two tap devices, one
in each network namespace. The frames are complete: for a tap device, the kernel fills in checksums
and splits large frames.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536
_DEVICE = Path("/dev/net/tun")


def may_be_made() -> str:
    """Return why a wire cannot be created on this machine, or "" if it can."""
    return "" if os.access(_DEVICE, os.R_OK | os.W_OK) else f"{_DEVICE} cannot be opened"


class Wire:
    """A wire between two tap devices, each given as (namespace, device name).

    The owner may set `delay_s` (per direction) and `loss` (the fraction of frames to drop, chosen
    by a seeded generator) at any time. Frames keep their order.
    """

    def __init__(self, near: tuple[str, str], far: tuple[str, str]) -> None:
        self.delay_s = 0.0
        self.loss = 0.0
        self.num_delayed = 0
        self.num_lost = 0
        self._dice = random.Random(1)
        self._ends = [_open_tap(*near), _open_tap(*far)]
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="wire")
        self._thread.start()

    def close(self) -> None:
        """Disconnect the wire, and remove both devices."""
        os.close(self._stop_write)
        self._thread.join()
        for fd in (*self._ends, self._stop_read):
            os.close(fd)

    def _carry(self) -> None:
        waiting: deque[tuple[float, int, bytes]] = deque()
        near, far = self._ends
        while True:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([near, far, self._stop_read], [], [], timeout_s)
            if self._stop_read in ready:
                return
            now_s = time.monotonic()
            for end, other in ((near, far), (far, near)):
                if end in ready:
                    frame = os.read(end, _FRAME_BYTES)
                    if self._dice.random() < self.loss:
                        self.num_lost += 1
                        continue
                    self.num_delayed += self.delay_s > 0
                    waiting.append((now_s + self.delay_s, other, frame))
            while waiting and waiting[0][0] <= now_s:
                _, end, frame = waiting.popleft()
                _write(end, frame)


def _write(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:
        return  # the device is down: the frame is lost, as on a real wire


def _open_tap(namespace: str, name: str) -> int:
    """Create a tap device in a namespace, using a temporary thread that enters the namespace.

    Returns the device's file descriptor.
    """
    opened: list[int] = []
    errors: list[OSError] = []

    def go() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", namespace).open() as there:
            if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
                errors.append(OSError(ctypes.get_errno(), f"cannot enter {namespace}"))
                return
        fd = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            request = struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI)
            fcntl.ioctl(fd, _TUNSETIFF, request)
        except OSError as err:
            os.close(fd)
            errors.append(err)
            return
        opened.append(fd)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return opened[0]
