"""Seal the stream after the handshake, so that only the two endpoints can create its records.

[Note: why the stream is sealed] The handshake does not prove who sends the bytes that follow. A
fake server could relay the proofs to the real server and then take over the client's connection.
Therefore both endpoints derive one key per direction from the secret and the nonces. Every byte
after the proof is sent in a record: a u32 length, a 16-byte keyed BLAKE2b hash of the record's
number and data, and the data itself. A relay can then only forward or truncate the stream. Nothing
is encrypted, so anyone who intercepts the traffic can read it.
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
    """Return a connection's two keys: client to server, then server to client.

    Args:
        secret: the job's secret.
        transcript: the bytes of the handshake (see `trust.transcript`).
    """
    to_server = hmac.digest(secret, b"echelon store stream 2 to server" + transcript, "sha256")
    to_client = hmac.digest(secret, b"echelon store stream 2 to client" + transcript, "sha256")
    return to_server, to_client


def _mac(key: bytes, number: int, data: bytes) -> bytes:
    return hashlib.blake2b(_NUMBER.pack(number) + data, key=key, digest_size=MAC_BYTES).digest()


class Sealer:
    """The sending end of one direction of a sealed stream."""

    __slots__ = ("_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, data: bytes) -> bytes:
        """Return the records that contain `data`; the records must be sent in order."""
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
    """The receiving end of one direction of a sealed stream."""

    __slots__ = ("_held", "_key", "_number")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._held = b""

    @property
    def is_inside_record(self) -> bool:
        """True if the last record is incomplete."""
        return bool(self._held)

    def open(self, data: bytes) -> bytes:
        """Return the data of the records that have now been received in full.

        Raises:
            StoreProtocolError: a record was not created by the peer, or is out of order.
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
