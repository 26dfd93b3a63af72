"""The address under which the other hosts of a job reach this one."""

from __future__ import annotations

import socket


def own_address(endpoint: str) -> str:
    """Return the address from which this host reaches the store: the others can reach it there.

    Args:
        endpoint: "host:port" of the store that the members meet at. For a store without one, a
            file's, the address that this host's own name stands for is taken, as torch does.

    Raises:
        OSError: the store's name cannot be resolved, or there is no route to it.
    """
    host, _, port = endpoint.rpartition(":")
    if host and port.isdigit():
        return _towards(host.strip("[]"), int(port))
    try:
        return _towards(socket.gethostname(), 9)
    except OSError:
        return "127.0.0.1"


def _towards(host: str, port: int) -> str:
    family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(target)  # sends nothing: it only chooses the route
        return str(probe.getsockname()[0])
