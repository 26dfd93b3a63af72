"""Reserve loopback ports that a test must know before its server listens.

The kernel may assign a free port to any socket that binds port 0 or connects; the test's server
would then fail with "address in use". The ports reserved here are therefore outside the kernel's
ephemeral range, and each is reserved by one test process.
"""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT, _LAST_PORT = 10_000, 65_535


def free_port() -> int:
    """Return a port on which no process listens and which no other test process has reserved.

    The port stays reserved until this process exits.
    """
    ports = sorted(_ports())
    dice = random.SystemRandom()  # tests seed the module's own generator
    drawn = (dice.choice(ports) for _ in ports)
    return next(port for port in drawn if _reserve(port) and _is_free(port))


def _ports() -> set[int]:
    low, high = (int(word) for word in _RANGE.read_text().split())
    return set(range(_FIRST_PORT, _LAST_PORT + 1)) - set(range(low, high + 1))


def _reserve(port: int) -> bool:
    """Reserve a port by binding an abstract socket name until this process exits.

    Returns False if another process has reserved the port.
    """
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
