"""Which host and which process this is, as facts that other ranks can compare."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.dist.membership.peers import Process, namespace, start_ticks


def host_identity() -> dict[str, Any]:
    """Return which host this is: ranks may share memory only if "boot" and "net" are equal."""
    return {
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "net": _inode("/proc/self/ns/net"),
        "pids": namespace(),
    }


def process_identity() -> dict[str, Any]:
    """Return which process of which host this is."""
    return host_identity() | {"pid": os.getpid(), "start": start_ticks(os.getpid()) or 0}


def is_same_host(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two ranks may share memory."""
    return all(one.get(key) == other.get(key) for key in ("boot", "net"))


def processes_here(facts: list[dict[str, Any]], rank: int) -> dict[int, Process]:
    """Return the other ranks' processes on the host of `rank`."""
    return {
        other: process_of(fact)
        for other, fact in enumerate(facts)
        if other != rank and is_same_host(facts[rank], fact)
    }


def process_of(fact: Mapping[str, Any]) -> Process:
    """Return the process that a rank's identity is about."""
    return (fact.get("pids", 0), fact.get("pid", 0), fact.get("start", 0))


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another; "" if there is no route."""
    try:
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(target)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _inode(path: str) -> int:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return 0
