"""Read the answers to torch's commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from echelon.store.client.channel import Channel
from echelon.store.deadline import Deadline
from echelon.store.wire import protocol as p

Read = Callable[[Channel, Deadline], Any]

CANCEL_S: Final = 2.0  # how long the server may take to answer a cancelled wait


def take_check(channel: Channel, deadline: Deadline) -> bool:
    """Read the answer to CHECK; return whether all keys exist."""
    return channel.take(1, deadline) == p.CHECK_PRESENT


def take_if_present(channel: Channel, deadline: Deadline) -> bytes | None:
    """Read the answers to CHECK and GET; return the value, or None if the key is missing."""
    is_there = channel.take(1, deadline) == p.CHECK_PRESENT
    value = channel.take_string(deadline)
    return value if is_there else None


def take_if_still_present(channel: Channel, deadline: Deadline) -> bytes | None:
    """Read the answers to CHECK, GET and CHECK.

    Returns the value, or None if the key was missing before or after the GET.
    """
    value = take_if_present(channel, deadline)
    return value if take_check(channel, deadline) else None


def take_pong(channel: Channel, deadline: Deadline) -> None:
    """Read the answer to PING."""
    channel.take(4, deadline)


def take_nothing(_: Channel, __: Deadline) -> None:
    """Read nothing, because the command is not answered."""


def take_bool(channel: Channel, deadline: Deadline) -> bool:
    """Read the answer to DELETE_KEY; return whether the key existed."""
    return bool(channel.take_int(deadline))


def take_item(channel: Channel, deadline: Deadline) -> bytes | None:
    """Read the answer to QUEUE_POP; return the item, or None if the queue was empty."""
    count = channel.take_int(deadline)
    return channel.take_string(deadline) if count > 0 else None


def take_wait(channel: Channel, deadline: Deadline) -> bool:
    """Read the answer to WAIT or BARRIER. At the deadline, cancel the wait and return False."""
    try:
        channel.take(1, deadline)
    except TimeoutError:
        grace = Deadline(CANCEL_S)
        channel.send(p.encode(p.CANCEL_WAIT), grace)
        if channel.take(1, grace) == p.WAIT_CANCELLED:
            return False
        channel.take(1, grace)  # it was woken in the meantime; the cancel is answered as well
    return True


STEPS: Final[dict[str, tuple[int, Read]]] = {
    "set": (p.SET, take_nothing),
    "append": (p.APPEND, take_nothing),
    "queue_push": (p.QUEUE_PUSH, take_nothing),
    "add": (p.ADD, Channel.take_int),
    "queue_len": (p.QUEUE_LEN, Channel.take_int),
    "compare_set": (p.COMPARE_SET, Channel.take_string),
    "delete_key": (p.DELETE_KEY, take_bool),
}
