"""Find the address at which other hosts reach this host."""

from __future__ import annotations

import socket


def own_address(endpoint: str) -> str:
    """Return the local address that this host uses to reach the store.

    Args:
        endpoint: "host:port" of the store that the members use. For a store without a network
            address, such as a `FileStore`, this host's name is resolved instead; if this fails, the
            result is "127.0.0.1".

    Raises:
        OSError: the store's host name cannot be resolved, or no route to the store's host exists.
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
