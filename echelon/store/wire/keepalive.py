"""Noticing that a peer's machine is gone.

A process that dies closes its connections; a machine that loses power or its network does not, and
what it waited for or arrived at would stay. Both ends therefore let the kernel probe an idle peer,
which takes it for dead after about half a minute of silence. While data is on its way there are no
probes, and the kernel would send it again for a quarter of an hour: a limit on unacknowledged data
closes that hole. It also ends the connection of a peer that reads nothing for that long while
more than its buffers hold is on its way.
"""

from __future__ import annotations

import socket

# Seconds, seconds, times; milliseconds.
_OPTIONS = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 30_000,
}


def keep_alive(end: socket.socket) -> None:
    """Switch the probes on; on a listening socket, for all that it accepts."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        option = getattr(socket, name, None)
        if option is not None:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
