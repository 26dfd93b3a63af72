"""Define the statistics of a store server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from echelon.errors import StoreProtocolError


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """The statistics of a server at one moment.

    Attributes:
        num_keys: the number of keys with a value.
        num_queues: the number of queues that are not empty.
        num_connections: the number of open connections, including those whose peers have not become
            members yet.
        num_waiters: the number of calls waiting for keys, items, barriers or gathers.
        num_watched_keys: the number of keys whose changes are pushed to a client.
        num_presences: the number of keys with a lease.
        num_refused: the number of connections that the server has closed so far because it refused
            the peer.
        value_bytes: the total size of all values and queued items, in bytes.
        waiting: the number of waiters for each key.
        missing_ranks: for each open barrier or gather, the first 64 missing ranks; empty if an
            arrival did not specify a rank.
    """

    num_keys: int
    num_queues: int
    num_connections: int
    num_waiters: int
    num_watched_keys: int
    num_presences: int
    num_refused: int
    value_bytes: int
    waiting: Mapping[str, int] = field(default_factory=dict)
    missing_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Encode the statistics for the wire."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps(plain, default=dict).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoreStatistics:
        """Decode a server's statistics; unknown fields are ignored.

        Raises:
            StoreProtocolError: the data is not a valid statistics record.
        """
        try:
            plain = json.loads(text)
            known = {f.name: plain[f.name] for f in fields(cls)}
            known["waiting"] = MappingProxyType(dict(known["waiting"]))
            ranks = {key: tuple(value) for key, value in known["missing_ranks"].items()}
            known["missing_ranks"] = MappingProxyType(ranks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreProtocolError(f"the server's statistics cannot be read: {error}") from None
        return cls(**known)
