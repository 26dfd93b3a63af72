"""Define the limits that a server imposes on a peer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that a peer must not exceed; all lengths and sizes are in bytes.

    Attributes:
        key_bytes: the maximum length of a key, including all prefixes (torch's limit).
        value_bytes: the maximum length of a value (torch's limit).
        num_command_keys: the maximum number of keys in one command (torch's limit).
        command_bytes: the maximum total size of all strings in one command.
        untrusted_bytes: the maximum size of one command before the peer is admitted.
        num_keys: the maximum number of keys and queues on a server.
        num_connections: the maximum number of connections.
        num_strangers: the maximum number of connections that are not members yet.
        num_waiters: the maximum number of open waits per connection.
        num_presences: the maximum number of presences per client.
        num_watched_keys: the maximum number of watched keys per connection, counted once per watch.
        unread_bytes: the maximum number of unread reply bytes before the server stops reading from
            the connection.
        reply_bytes: the maximum length of one reply.
        handshake_s: the time within which a connection must become a member.
        command_s: the time within which a started command must be completed, extended by the same
            amount for every 64 KiB received.
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
