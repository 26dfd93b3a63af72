"""Read the kernel's tables of TCP sockets, /proc/net/tcp and /proc/net/tcp6.

The tables of a busy host can have a hundred thousand rows, so addresses in rows are not parsed. To
find a row, convert the address to the table's form and compare the text.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ESTABLISHED = "01"

# Remote address and port, then local address and port, as seen from the local end.
Ends = tuple[str, int, str, int]

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LOOKS = 3  # the kernel may skip a line of a table that changes while it is read


class Row(NamedTuple):
    """One row of a table of TCP sockets.

    Attributes:
        local, peer: the addresses of the socket's two ends, in the table's form.
        state: the TCP state, as two hexadecimal digits.
        unsent_bytes, unread_bytes: the sizes of the socket's queues. A listening socket's queues
            count connections.
        uid: the user that opened the socket; 0 if the socket no longer belongs to a process.
        inode: the socket's inode; 0 if the socket no longer belongs to a process.
    """

    local: str
    peer: str
    state: str
    unsent_bytes: int
    unread_bytes: int
    uid: int
    inode: int


def rows(table: str) -> Iterator[Row]:
    """Parse the text of a table and yield its rows."""
    for line in table.splitlines()[1:]:
        fields = line.split(None, 10)
        if len(fields) < 10:
            continue
        _, local, peer, state, queues, _, _, uid, _, inode = fields[:10]
        unsent, _, unread = queues.partition(":")
        yield Row(local, peer, state, int(unsent, 16), int(unread, 16), int(uid), int(inode))


def plain_address(host: str) -> str:
    """Strip the scope ID from a numeric address, and convert IPv4-mapped IPv6 to IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def spellings(host: str, port: int) -> list[str]:
    """Return the forms in which the tables can show an address: hexadecimal words, then the port.

    The words are in host byte order. If an IPv6 socket uses an IPv4 address, the IPv6 table shows
    the IPv4-mapped form.
    """
    address = ipaddress.ip_address(plain_address(host))
    packed = [address.packed]
    if address.version == 4:
        packed.append(bytes(10) + b"\xff\xff" + address.packed)
    return [f"{_words(raw)}:{port:04X}" for raw in packed]


def unspell(end: str) -> tuple[bytes, int]:
    """Parse an address from a row; return the packed address and the port."""
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
    """Map each connection within this host to the uid of the user that owns its remote socket.

    Connections that are no longer established or are in neither table are omitted. Reading a table
    takes a few microseconds per socket on the host, so do not call this function in an event loop.
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
    """Look up connections in one table; return the uids that own their remote sockets.

    Connections that are not established are omitted.

    Args:
        wanted: the connections, keyed by the addresses of both ends in the table's form.
    """
    try:
        text = table.read_text(encoding="ascii")
    except OSError:
        return {}
    return {
        wanted[row.local, row.peer]: row.uid
        for row in rows(text)
        if row.state == ESTABLISHED and row.inode and (row.local, row.peer) in wanted
    }
