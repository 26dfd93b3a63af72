"""Detect peers whose hosts have failed.

The kernel closes the connections of a dead process, but a host that loses power cannot close its
connections. Therefore both endpoints send keepalive probes to an idle peer, and consider the peer
dead after about half a minute of silence. The kernel does not send probes while data is
unacknowledged, so the age of unacknowledged data is also limited. This limit can also disconnect a
peer that has stopped reading.
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
    """Enable keepalive probes on a socket.

    Sockets accepted by a listening socket inherit the setting.
    """
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS.items():
        option = getattr(socket, name, None)
        if option is not None:
            end.setsockopt(socket.IPPROTO_TCP, option, value)
