"""Who may use a store: the shared secret, and what the kernel says about a local peer.

Our clients prove that they know the secret by HMAC-SHA256 over both sides' fresh nonces, and the
server proves it first, so neither a recorded exchange nor a false server gains anything. torch's
clients cannot do that; `owner_uids` tells whose process is at the other end of a loopback
connection, so that only our own user's are let in.

What this does not do: it authenticates the start of a connection, it neither encrypts nor signs
what follows. A network on which others can inject packets needs a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

NONCE_BYTES = 32

_SERVER = b"echelon store server 1"
_CLIENT = b"echelon store client 1"


def new_nonce() -> bytes:
    """Return fresh random bytes for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def secret_bytes(secret: str | bytes | None) -> bytes | None:
    """Return the secret as bytes.

    Raises:
        ValueError: it is empty, which would admit everyone who sends an empty one.
    """
    if secret is None:
        return None
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if not raw:
        raise ValueError("secret is empty; pass None for a store without authentication")
    return raw


def server_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what only a server that knows the secret can answer to this client."""
    return hmac.new(secret, _SERVER + client_nonce + server_nonce, hashlib.sha256).digest()


def client_proof(secret: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what only a client that knows the secret can answer to this server."""
    return hmac.new(secret, _CLIENT + client_nonce + server_nonce, hashlib.sha256).digest()


def is_equal(left: bytes, right: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(left, right)


def plain_address(host: str) -> str:
    """Return a numeric address in one spelling: no scope, IPv4 in IPv6 as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def is_loopback(host: str) -> bool:
    """Whether a numeric address is this machine's loopback."""
    return ipaddress.ip_address(plain_address(host)).is_loopback


Ends = tuple[str, int, str, int]  # far address and port, near address and port, as the near end sees

_ESTABLISHED = "01"
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOOKS = 3  # the kernel may skip a line of a table that changes while it is read


def owner_uids(connections: Iterable[Ends]) -> dict[Ends, int]:
    """Return the uid at the far end of each local connection that is still established.

    Reads /proc/net/tcp and tcp6 once for all, again for those that were not found. A connection
    that the far end has closed is left out: its line says uid 0, whoever opened it. So is one that
    the tables do not have, and every one on a system without them. Takes about 1 us per socket of
    the machine: not for an event loop.
    """
    wanted = {
        (left, right): ends
        for ends in connections
        for left, right in zip(_endpoints(*ends[:2]), _endpoints(*ends[2:]), strict=False)
    }
    found: dict[Ends, int] = {}
    for _ in range(_LOOKS):
        for table in _TABLES:
            found.update(_look(table, wanted))
        if len(found) == len(set(wanted.values())):
            break
    return found


def _look(table: Path, wanted: Mapping[tuple[str, str], Ends]) -> dict[Ends, int]:
    """Return the uids of the established connections of one table."""
    found: dict[Ends, int] = {}
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return found
    for line in lines:
        fields = line.split(None, 10)
        ends = wanted.get((fields[1], fields[2]))
        if ends is not None and fields[3] == _ESTABLISHED and fields[9] != "0":
            found[ends] = int(fields[7])
    return found


def _endpoints(host: str, port: int) -> list[str]:
    """Return how the kernel's tables write an endpoint: hexadecimal words in machine order.

    An IPv4 address is in the table of IPv6 too, mapped, if its socket is of that family.
    """
    address = ipaddress.ip_address(plain_address(host))
    spellings = [address.packed]
    if address.version == 4:
        spellings.append(bytes(10) + b"\xff\xff" + address.packed)
    return [f"{_words(raw)}:{port:04X}" for raw in spellings]


def _words(raw: bytes) -> str:
    return "".join(
        f"{int.from_bytes(raw[i : i + 4], sys.byteorder):08X}" for i in range(0, len(raw), 4)
    )


def own_uid() -> int | None:
    """Return this process's uid, None where another user's could look the same.

    In a user namespace that does not map all users the kernel shows every other one as the
    overflow uid (mostly 65534, "nobody"): a server that runs as that one believes no uid.
    """
    uid = os.getuid()
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = Path("/proc/self/uid_map").read_text().split()
    except (OSError, ValueError):
        overflow, mapped = 65534, []
    is_whole = mapped == ["0", "0", "4294967295"]
    return uid if uid != overflow or is_whole else None
