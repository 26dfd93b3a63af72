"""Let other machines detect, through a listening socket, whether a launcher is alive.

The kernel accepts connections even while the process is stopped or starved of CPU time. Once the
process has exited, the kernel refuses them. A killed node is therefore detected quickly, while a
node on a busy machine gets more time to reconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from echelon.launcher.control.endpoint import split

_ANSWER_S = 1.0
_BACKLOG = 16


class LifeSign:
    """A listening socket on the local address from which this machine reaches an endpoint.

    Attributes:
        port: the port of the socket; 0 if no socket could be opened.
    """

    def __init__(self, endpoint: str) -> None:
        self.port = 0
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._socket = _listen(_own_addresses(endpoint))
            self._socket.setblocking(False)
            self.port = self._socket.getsockname()[1]

    def clear(self) -> None:
        """Accept and close all pending connections, so that the backlog does not fill up."""
        with contextlib.suppress(OSError):
            while self._socket is not None:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def is_gone(address: str, port: int) -> bool:
    """Return whether a launcher has exited, judging by whether its machine refuses connections.

    Takes at most 1 s. Returns False if the machine does not answer, or if `port` is 0, which means
    that the launcher could not open a `LifeSign`.
    """
    if port == 0:
        return False
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _ANSWER_S)
    except ConnectionRefusedError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    return False


def _own_addresses(endpoint: str) -> set[str]:
    """Return the local addresses from which this machine reaches an endpoint. Sends no data.

    Raises:
        OSError: the endpoint's name cannot be resolved.
    """
    host, port = split(endpoint)
    found = set()
    for family, kind, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
            probe.connect(place)
            found.add(str(probe.getsockname()[0]))
    return found


def _listen(addresses: set[str]) -> socket.socket:
    """If exactly one address is given, listen on it; otherwise listen on all local addresses.

    Raises:
        OSError: the address cannot be bound.
    """
    if len(addresses) == 1:
        (address,) = addresses
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
