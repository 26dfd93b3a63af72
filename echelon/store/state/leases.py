"""Manage presences, which are keys with a lease that a session renews.

A connection does not prove that a process is alive. A forked child can keep a connection open, and
a brief network failure can close a connection. A presence therefore belongs to a session, which
identifies a client across reconnections. The presence ends when it is released or its lease
expires. When the session's connection closes, the session's leases are shortened to a grace period
during which a live client can reconnect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.store.state.state import StoreState

GRACE_S = 2.0


@dataclass(slots=True)
class _Lease:
    session: bytes
    lease_s: float
    ends: float


class Leases:
    """The presences on one server. This object must be used only on the server's event loop."""

    def __init__(self, state: StoreState, now: Callable[[], float]) -> None:
        self._state = state
        self._now = now
        self._leases: dict[bytes, _Lease] = {}
        self._keys_of: dict[bytes, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def num_of(self, session: bytes) -> int:
        """Return the number of presences that belong to a session."""
        return len(self._keys_of.get(session, ()))

    def take(self, session: bytes, key: bytes, value: bytes, lease_s: float) -> None:
        """Store a key that is deleted when its lease ends.

        If the key's value is replaced before then, the key is not deleted.

        Raises:
            ValueError: the server has reached its limit on the number of keys.
        """
        lease = _Lease(session, lease_s, self._now() + lease_s)
        self._state.set_presence(lease, key, value)
        self._drop(key)
        self._leases[key] = lease
        self._keys_of.setdefault(session, set()).add(key)

    def renew(self, session: bytes) -> int:
        """Renew all leases of a session and return their number."""
        now = self._now()
        keys = self._keys_of.get(session, ())
        for key in keys:
            lease = self._leases[key]
            lease.ends = now + lease.lease_s
        return len(keys)

    def release(self, session: bytes, key: bytes) -> None:
        """End one of a session's presences immediately, without waiting for its lease to expire."""
        lease = self._leases.get(key)
        if lease is not None and lease.session == session:
            self._end(key, lease)

    def has_closed(self, session: bytes) -> None:
        """Limit a session's leases to the grace period, because its last connection has closed."""
        ends = self._now() + GRACE_S
        for key in self._keys_of.get(session, ()):
            self._leases[key].ends = min(self._leases[key].ends, ends)

    def expire(self) -> None:
        """End the presences whose leases have expired."""
        now = self._now()
        for key, lease in [(key, lease) for key, lease in self._leases.items() if lease.ends < now]:
            self._end(key, lease)

    def _end(self, key: bytes, lease: _Lease) -> None:
        self._drop(key)
        self._state.end_presence(lease, key)

    def _drop(self, key: bytes) -> None:
        lease = self._leases.pop(key, None)
        if lease is not None:
            keys = self._keys_of[lease.session]
            keys.discard(key)
            if not keys:
                del self._keys_of[lease.session]
