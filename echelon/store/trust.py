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
import secrets
import sys
from collections.abc import Iterable
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


def owner_uids(connections: Iterable[tuple[str, int, str, int]]) -> dict[tuple[int, int], int]:
    """Return the uid at the far end of local connections, by (far port, near port).

    Each connection is (far address, far port, near address, near port) as the near end sees it.
    Reads /proc/net/tcp and tcp6 once for all; a connection that is not found, or a system that
    has no such file, is left out. Blocks on no peer, but takes a while with thousands of sockets:
    not for an event loop.
    """
    wanted = {
        (plain_address(far), far_port, plain_address(near), near_port)
        for far, far_port, near, near_port in connections
    }
    found: dict[tuple[int, int], int] = {}
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local, local_port = _parse_endpoint(fields[1])
            remote, remote_port = _parse_endpoint(fields[2])
            if (local, local_port, remote, remote_port) in wanted:
                found[local_port, remote_port] = int(fields[7])
    return found


def _parse_endpoint(text: str) -> tuple[str, int]:
    """Decode the kernel's "ADDRESS:PORT": hexadecimal 32-bit words in the machine's byte order."""
    words, _, port = text.partition(":")
    raw = b"".join(
        int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8)
    )
    return plain_address(str(ipaddress.ip_address(raw))), int(port, 16)
