"""Detect a peer whose machine has vanished.

The kernel closes the connections of a dead process. But if a machine loses power or its network,
its connections would stay open, and with them its waits and arrivals. So both ends let the kernel
probe an idle peer, and consider the peer dead after about half a minute of silence. While data is
unacknowledged, however, the kernel sends no probes and would retransmit for a quarter of an hour,
so the age of unacknowledged data is limited too. That limit also disconnects a peer that reads
nothing for that long, if more data is in flight than its buffers hold.
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
    """Enable keepalive probes on a socket. Sockets accepted by a listening socket inherit them."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        option = getattr(socket, name, None)
        if option is not None:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
