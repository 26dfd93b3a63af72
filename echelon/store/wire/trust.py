"""Authenticate peers by a shared secret or, for local peers, by the user who runs the process.

Server and client prove to each other that they hold the secret. Each proof is an HMAC-SHA256 over
fresh nonces from both sides; the server's proof comes first. The stream after the handshake is
sealed (see `seal`).

torch's clients cannot prove that they hold the secret. They are admitted only over a connection
within the host from a process of the server's own user (see `host.tcp_table`), or from an address
that was admitted explicitly (see `StoreServer.admit`).

An attacker who receives the server's proof could use it to test guesses of the secret. Therefore
short secrets are refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
from pathlib import Path

from echelon.host.tcp_table import plain_address

NONCE_BYTES = 32
SESSION_BYTES = 16

MIN_SECRET_BYTES = 16

_SERVER = b"echelon store server 2"
_CLIENT = b"echelon store client 2"


def new_nonce() -> bytes:
    """Return fresh random bytes for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def new_session() -> bytes:
    """Return random bytes that identify one client across its connections."""
    return secrets.token_bytes(SESSION_BYTES)


def secret_bytes(secret: str | bytes | None) -> bytes | None:
    """Check the length of the secret, and return it as bytes.

    Raises:
        ValueError: the secret is too short to withstand guessing.
    """
    if secret is None:
        return None
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if not raw:
        raise ValueError("the secret is empty; pass None for a store without authentication")
    if len(raw) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the secret has {len(raw)} bytes, but at least {MIN_SECRET_BYTES} are needed "
            "(create one with `openssl rand -hex 32`)"
        )
    return raw


def transcript(client_nonce: bytes, server_nonce: bytes, session: bytes, instance: bytes) -> bytes:
    """Return the bytes from which both proofs and the stream's keys are computed.

    Raises:
        ValueError: a nonce or the session ID has the wrong length.
    """
    if (len(client_nonce), len(server_nonce), len(session)) != (
        NONCE_BYTES,
        NONCE_BYTES,
        SESSION_BYTES,
    ):
        raise ValueError("a nonce or the session ID has the wrong length")
    return client_nonce + server_nonce + session + instance


def server_proof(secret: bytes, transcript: bytes) -> bytes:
    """Return the proof that the server holds the secret."""
    return hmac.digest(secret, _SERVER + transcript, "sha256")


def client_proof(secret: bytes, transcript: bytes) -> bytes:
    """Return the proof that the client holds the secret."""
    return hmac.digest(secret, _CLIENT + transcript, "sha256")


def is_equal(left: bytes, right: bytes) -> bool:
    """Compare two proofs in constant time."""
    return hmac.compare_digest(left, right)


def is_loopback(host: str) -> bool:
    """Return whether a numeric address is a loopback address."""
    return ipaddress.ip_address(plain_address(host)).is_loopback


def own_uid() -> int | None:
    """Return this process's uid, or None if other users could appear under the same uid.

    In a user namespace, the kernel reports every unmapped user as the overflow uid. A server that
    runs under this uid cannot trust any uid.
    """
    uid = os.getuid()
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
        mapped = Path("/proc/self/uid_map").read_text().split()
    except (OSError, ValueError):
        overflow, mapped = 65534, []
    is_whole = mapped == ["0", "0", "4294967295"]
    return uid if uid != overflow or is_whole else None
