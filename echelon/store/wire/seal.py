"""Seal the stream after the handshake, in records that only the two ends can make.

[Note: why the stream is sealed] A handshake proves who began a connection, not who continues it. A
false server that relays the proofs to the real server could take over a member's connection by
dropping the client. So both ends derive one key per direction from the secret and both nonces, and
after the proof every byte is sent in a record: u32 length, 16 bytes of keyed BLAKE2b over the
record's number and its bytes, the bytes. A relay can then only forward or cut the stream. Including
the addresses in the proof was rejected, because this would fail at every NAT, service address and
port forward, and would still trust the network afterwards. Nothing is encrypted, so anyone who sees
the traffic can read it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

from echelon.errors import StoreProtocolError

MAC_BYTES: Final = 16
RECORD_BYTES: Final = 64 << 10  # most bytes in one record: what a receiver holds unproved
HEADER_BYTES: Final = 4 + MAC_BYTES

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")


def stream_keys(secret: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """Return the two keys of a connection, for the client's stream and for the server's.

    Args:
        secret: the job's secret.
        transcript: both nonces and everything else that the handshake agreed on.
    """
    to_server = hmac.digest(secret, b"echelon store stream 2 to server" + transcript, "sha256")
    to_client = hmac.digest(secret, b"echelon store stream 2 to client" + transcript, "sha256")
    return to_server, to_client


def _mac(key: bytes, number: int, data: bytes) -> bytes:
    return hashlib.blake2b(_NUMBER.pack(number) + data, key=key, digest_size=MAC_BYTES).digest()


class Sealer:
    """Makes the records of one direction."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, data: bytes) -> bytes:
        """Return the records that carry `data`.

        The records must be sent in the order of the calls.
        """
        if len(data) <= RECORD_BYTES:
            return self._record(data)
        return b"".join(
            self._record(data[at : at + RECORD_BYTES]) for at in range(0, len(data), RECORD_BYTES)
        )

    def _record(self, data: bytes) -> bytes:
        mac = _mac(self._key, self._number, data)
        self._number += 1
        return _LENGTH.pack(len(data)) + mac + data


class Opener:
    """A reader of the records of one direction, which may arrive in any pieces."""

    __slots__ = ("_held", "_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._held = b""

    @property
    def is_inside_record(self) -> bool:
        """Whether a record has begun but is not complete."""
        return bool(self._held)

    def open(self, data: bytes) -> bytes:
        """Process received bytes; return the data of the records that they complete.

        Raises:
            StoreProtocolError: a record was not made by the other end, or is out of place.
        """
        if self._held:
            data = self._held + data
        position, size = 0, len(data)
        pieces: list[bytes] = []
        while position + HEADER_BYTES <= size:
            (length,) = _LENGTH.unpack_from(data, position)
            if length > RECORD_BYTES:
                raise StoreProtocolError(
                    f"the record has {length} bytes, but the limit is {RECORD_BYTES}"
                )
            start = position + HEADER_BYTES
            end = start + length
            if end > size:
                break
            piece = data[start:end]
            mac = _mac(self._key, self._number, piece)
            if not hmac.compare_digest(mac, data[position + 4 : start]):
                raise StoreProtocolError(
                    f"record {self._number} was changed in transit, or was not sent by the peer"
                )
            self._number += 1
            pieces.append(piece)
            position = end
        self._held = data[position:]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
