"""Authenticate messages with the job's secret, and reject replayed messages.

Each side sends a fresh nonce. The key for each direction is derived from the secret and both
nonces. A frame consists of a u64 counter, a 32-byte MAC and the body. The MAC is an HMAC-SHA256 of
the counter and the body. The counter must increase by one with each frame.

Frames are authenticated but not encrypted. Use TLS outside a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from echelon.errors import LaunchError

NONCE_BYTES = 32
_COUNTER = struct.Struct("<Q")
_MAC_BYTES = 32


def new_nonce() -> bytes:
    """Return a random nonce for one session."""
    return secrets.token_bytes(NONCE_BYTES)


class Seal:
    """One side's keys and counters for sealing and opening the frames of a session.

    Args:
        secret: the job's secret.
        agent_nonce, host_nonce: the nonces from the two greetings.
        is_host: whether this is the coordinator's side.
    """

    def __init__(
        self, secret: bytes, agent_nonce: bytes, host_nonce: bytes, *, is_host: bool
    ) -> None:
        nonces = agent_nonce + host_nonce
        to_host = hmac.new(secret, b"echelon control 1 to host" + nonces, hashlib.sha256).digest()
        to_agent = hmac.new(secret, b"echelon control 1 to agent" + nonces, hashlib.sha256).digest()
        self._mine, self._theirs = (to_agent, to_host) if is_host else (to_host, to_agent)
        self._sent = 0
        self._received = 0

    def close(self, body: bytes) -> bytes:
        """Seal `body` and return the frame. Send frames in the order in which they were sealed."""
        counter = _COUNTER.pack(self._sent)
        self._sent += 1
        return counter + hmac.new(self._mine, counter + body, hashlib.sha256).digest() + body

    def open(self, frame: bytes) -> bytes:
        """Authenticate a frame and return its body.

        Raises:
            LaunchError: the frame was not sealed by a member of the job, or is out of order.
        """
        counter, mac = frame[: _COUNTER.size], frame[_COUNTER.size : _COUNTER.size + _MAC_BYTES]
        body = frame[_COUNTER.size + _MAC_BYTES :]
        right = hmac.new(self._theirs, counter + body, hashlib.sha256).digest()
        if not hmac.compare_digest(mac, right):
            raise LaunchError("authentication failed: the secret does not match")
        if counter != _COUNTER.pack(self._received):
            raise LaunchError("a frame was lost or replayed")
        self._received += 1
        return body
