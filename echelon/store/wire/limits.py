"""The limits that a server imposes on a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits whose violation makes a server refuse a peer.

    Attributes:
        key_bytes: longest key, with its leading "/" and every prefix (torch's limit).
        value_bytes: longest value (torch's limit).
        num_command_keys: most keys in one command (torch's limit).
        command_bytes: most bytes in one command, all its strings together.
        untrusted_bytes: most bytes in one command before the peer is admitted.
        num_keys: most keys and queues that a server holds.
        num_connections: most connections; one more is closed at once.
        num_strangers: most connections that have not become members.
        num_waiters: most open waits of one connection.
        num_presences: most presences of one client; each of its heartbeats renews all of them.
        num_watched_keys: most keys that one connection may watch, counted once per watch.
        unread_bytes: most unread reply bytes before the server stops reading from that connection;
            one more reply may be added.
        reply_bytes: longest single reply.
        handshake_s: time within which a connection must become a member.
        command_s: time within which a started command must be complete, plus the same time for
            every 64 KiB received of it.
    """

    key_bytes: int = 8192
    value_bytes: int = 8 << 20
    num_command_keys: int = 131072
    command_bytes: int = 256 << 20
    untrusted_bytes: int = 4096
    num_keys: int = 4_000_000
    num_connections: int = 16384
    num_strangers: int = 8192
    num_waiters: int = 1024
    num_presences: int = 1024
    num_watched_keys: int = 131072
    unread_bytes: int = 1 << 20
    reply_bytes: int = 256 << 20
    handshake_s: float = 15.0
    command_s: float = 30.0
