"""The kernel's tables of TCP sockets, /proc/net/tcp and tcp6: their rows and how they spell ends.

A row is kept as text, because a busy host has a hundred thousand of them and a caller wants a few:
spell what is looked for, and compare.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ESTABLISHED = "01"

# Far address and port, near address and port, as the near end sees them.
Ends = tuple[str, int, str, int]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOOKS = 3  # the kernel may skip a line of a table that changes while it is read


class Row(NamedTuple):
    """One socket of a table.

    Attributes:
        local, peer: its ends, as the table spells them.
        state: two hexadecimal digits.
        unsent_bytes, unread_bytes: of a listening socket, connections.
        uid: who opened it; 0 once no process has it any more.
        inode: 0 once no process has it any more.
    """

    local: str
    peer: str
    state: str
    unsent_bytes: int
    unread_bytes: int
    uid: int
    inode: int


def rows(table: str) -> Iterator[Row]:
    """Read the text of a table."""
    for line in table.splitlines()[1:]:
        fields = line.split(None, 10)
        if len(fields) < 10:
            continue
        _, local, peer, state, queues, _, _, uid, _, inode = fields[:10]
        unsent, _, unread = queues.partition(":")
        yield Row(local, peer, state, int(unsent, 16), int(unread, 16), int(uid), int(inode))


def plain_address(host: str) -> str:
    """Return a numeric address in one spelling: no scope, IPv4 in IPv6 as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def spellings(host: str, port: int) -> list[str]:
    """Return how the tables may spell an end: hexadecimal words in machine order.

    An IPv4 address is in the table of IPv6 too, mapped, if its socket is of that family.
    """
    address = ipaddress.ip_address(plain_address(host))
    packed = [address.packed]
    if address.version == 4:
        packed.append(bytes(10) + b"\xff\xff" + address.packed)
    return [f"{_words(raw)}:{port:04X}" for raw in packed]


def unspell(end: str) -> tuple[bytes, int]:
    """Return the packed address and the port of an end of a row."""
    words, _, port = end.partition(":")
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return raw, int(port, 16)


def _words(raw: bytes) -> str:
    return "".join(
        f"{int.from_bytes(raw[i : i + 4], sys.byteorder):08X}" for i in range(0, len(raw), 4)
    )


def owner_uids(connections: Iterable[Ends]) -> dict[Ends, int]:
    """Return the uid at the far end of each local connection that is still established.

    Reads both tables once for all connections, again for those that were not found. A connection
    that the far end has closed is left out: its row says uid 0, whichever user opened it. So is
    one that the tables do not have, and every one on a system without them. Takes a few
    microseconds per socket of the machine: not for an event loop.
    """
    wanted = {
        (left, right): ends
        for ends in connections
        for left, right in zip(spellings(*ends[:2]), spellings(*ends[2:]), strict=False)
    }
    found: dict[Ends, int] = {}
    for _ in range(_LOOKS):
        for table in _TABLES:
            found.update(_owners(table, wanted))
        if len(found) == len(set(wanted.values())):
            break
    return found


def _owners(table: Path, wanted: Mapping[tuple[str, str], Ends]) -> dict[Ends, int]:
    """Return the uids of the established connections of one table."""
    try:
        text = table.read_text(encoding="ascii")
    except OSError:
        return {}
    return {
        wanted[row.local, row.peer]: row.uid
        for row in rows(text)
        if row.state == ESTABLISHED and row.inode and (row.local, row.peer) in wanted
    }
