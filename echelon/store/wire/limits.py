"""Define the limits that a server imposes on a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on a peer; the server refuses a peer that exceeds one.

    Attributes:
        key_bytes: length of the longest key, with its leading "/" and every prefix (torch's limit).
        value_bytes: length of the longest value (torch's limit).
        num_command_keys: maximum number of keys in one command (torch's limit).
        command_bytes: maximum total size of all strings in one command.
        untrusted_bytes: maximum size of one command before the peer is admitted.
        num_keys: maximum number of keys and queues on a server.
        num_connections: maximum number of connections; any further connection is closed at once.
        num_strangers: maximum number of connections that have not become members.
        num_waiters: maximum number of open waits of one connection.
        num_presences: maximum number of presences of one client; each of its heartbeats renews all
            of them.
        num_watched_keys: maximum number of keys that one connection may watch, counted once per
            watch.
        unread_bytes: maximum number of unread reply bytes before the server stops reading from the
            connection; one more reply may be added.
        reply_bytes: length of the longest single reply.
        handshake_s: time within which a connection must become a member.
        command_s: time within which a command must be complete once it has started, plus as much
            again for every 64 KiB of it received.
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
