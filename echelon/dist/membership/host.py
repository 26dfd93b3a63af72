"""Find the processes of other ranks on this host, and this host's own address."""

from __future__ import annotations

import socket
from typing import Any

from echelon.host.identity import Process, is_same_host, process_of


def processes_here(facts: list[dict[str, Any]], rank: int) -> dict[int, Process]:
    """Return the processes of the other ranks on the same host as `rank`."""
    return {
        other: process_of(fact)
        for other, fact in enumerate(facts)
        if other != rank and is_same_host(facts[rank], fact)
    }


def address_towards(host: str, port: int) -> str:
    """Return the local address used to reach another machine, or "" if there is no route."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""
