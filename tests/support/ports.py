"""Ports of loopback that a test names before its own process listens there.

A port that was merely free a moment ago is one that the system may hand out in the meantime, to any
socket that binds port 0 or connects: the test's server then finds its address in use. So these
ports lie outside of what the system hands out, and each belongs to one process of the tests.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LAST_PORT = 10_000, 65_535


def free_port() -> int:
    """Return a port at which no other process listens or, by this function, is about to.

    It stays reserved while this process runs.
    """
    ports = sorted(_ports())
    dice = random.SystemRandom()  # tests seed the module's own generator
    drawn = (dice.choice(ports) for _ in ports)
    return next(port for port in drawn if _reserve(port) and _is_free(port))


def _ports() -> set[int]:
    low, high = (int(word) for word in _RANGE.read_text().split())
    return set(range(_FIRST_PORT, _LAST_PORT + 1)) - set(range(low, high + 1))


def _reserve(port: int) -> bool:
    """Bind a name that stands for the port, until this process ends."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0echelon-tests-port-{port}")
    except OSError:
        name.close()
        return False
    name.detach()
    return True


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False
