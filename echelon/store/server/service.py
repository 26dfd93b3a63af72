"""Execute a member's commands in order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from echelon.store.server.outbox import FLUSH_BYTES
from echelon.store.server.queries import HANDLERS
from echelon.store.wire import protocol as p
from echelon.store.wire.parser import expand_run

if TYPE_CHECKING:
    from echelon.store.server.peer import Peer

_PACKET_COMMANDS: Final = 131072  # more than one packet can hold


def serve(peer: Peer, messages: Iterator[Any]) -> Iterator[Any]:
    """Execute a member's commands; return the commands that must be deferred.

    Commands are deferred if the connection is closed, if too many replies are unread, or if the
    member's turn is over.
    """
    state, out, turns = peer.state, peer.out, peer.hub.turns
    values, waiting, promised = state.values, state.waiting, state.promised_to
    watched, present_by = state.watched, state.present_by
    room = peer.hub.limits.num_keys - len(values) - len(state.queues)
    is_crowded = room < _PACKET_COMMANDS
    for message in messages:
        query = message[0]
        if query >= p.RUN:  # short: a run is no longer than what is parsed at a time
            if promised and peer in promised:
                state.release_promise(peer)
            if query == p.RUN | p.GET:
                left = _get_run(peer, message)
                if left:
                    return chain(left, messages)
            elif waiting or watched or present_by or is_crowded:
                for key, value in message[1].iter_unpack(message[2]):
                    state.set(key, value)
            else:
                values.update(message[1].iter_unpack(message[2]))
            continue
        if promised and peer in promised:
            release_unless_popped(peer, message)
        if query == p.SET:
            if waiting or watched or present_by or is_crowded:
                state.set(message[1], message[2])
            else:
                values[message[1]] = message[2]
            continue
        if query == p.GET:
            out.put_value(values.get(message[1], b""))
        else:
            HANDLERS[query](peer, *message[1:])
            if not peer.is_executing:
                return messages
        if out.num_bytes > FLUSH_BYTES:
            peer.flush()
            if peer.is_paused:
                return messages
        if turns.is_over:
            peer.put_off()
            return messages

    return messages


def release_unless_popped(peer: Peer, message: p.Message) -> None:
    """Release the item reserved for a peer, unless the given command pops it."""
    state = peer.state
    if message[:2] != (p.QUEUE_POP, state.promised_to[peer]):
        state.release_promise(peer)


def _get_run(peer: Peer, run: Any) -> list[p.Message]:
    """Answer a run of consecutive GETs; return the commands that must be deferred."""
    get, out = peer.state.values.get, peer.out
    found = [get(key, b"") for (key,) in run[1].iter_unpack(run[2])]
    lengths = set(map(len, found))
    longest = max(lengths)
    if longest * len(found) + out.num_bytes <= FLUSH_BYTES:
        header = p.pack_u64(longest)
        is_even = len(lengths) == 1
        out.put(header + header.join(found) if is_even else p.pack_strings(found))
        return []
    for index, value in enumerate(found):
        out.put_value(value)
        if out.num_bytes > FLUSH_BYTES:
            peer.flush()
            if peer.is_paused:
                return expand_run(run)[index + 1 :]
    return []
