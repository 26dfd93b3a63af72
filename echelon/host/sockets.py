"""Read another process's TCP sockets: queue sizes, retransmissions and bytes transferred.

If possible, sockets are read through sock_diag, which reports retransmissions and byte counts.
Otherwise, they are read from /proc/<pid>/net/tcp, which shows only the queue sizes. A socket
belongs to each process that has a file descriptor with the socket's inode.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

from echelon.host import tcp_table
from echelon.host.facts import Socket
from echelon.host.procfs import read_text

MAX_SOCKETS = 256
_STATES = (
    "", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE",
    "CLOSE_WAIT", "LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV",
)  # fmt: skip
_LISTEN = "LISTEN"

# linux/sock_diag.h, linux/inet_diag.h, linux/tcp.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48s")
_MESSAGE = struct.Struct("=BBBB4s16s16sI8sIIIII")
_INODE = struct.Struct("=I")  # the message's last field
_PORTS = struct.Struct("!HH")
_ATTRIBUTE = struct.Struct("=HH")
_TOTAL_RETRANS_OFFSET, _BYTES_OFFSET = 100, 120
_REPLY_BYTES = 1 << 18
_TIMEOUT_S = 1.0


def sockets(pid: int, denied: list[str]) -> tuple[Socket, ...]:
    """Return the TCP sockets of a process; append the names of unreadable files to `denied`."""
    inodes = _inodes(pid, denied)
    if not inodes:
        return ()
    try:
        found = dict(_from_kernel(inodes))
    except PermissionError:
        denied.append("sock_diag")
        found = {}
    except (OSError, struct.error):
        found = {}  # this kernel lacks sock_diag, or uses another format
    if not found:  # this includes a process in another network namespace
        found = dict(_from_files(pid, inodes, denied))
    return tuple(found[inode] for inode in sorted(found))[:MAX_SOCKETS]


def moved(before: tuple[Socket, ...], after: tuple[Socket, ...]) -> tuple[Socket, ...]:
    """Return the sockets in `after`, each with the number of bytes transferred since `before`.

    The number is -1 (unknown) if a socket is not in `before` or has no byte counts.
    """
    earlier = {(one.local, one.peer): one for one in before}
    return tuple(_moved(earlier.get((one.local, one.peer)), one) for one in after)


def _moved(before: Socket | None, after: Socket) -> Socket:
    if before is None or before.sent_bytes < 0 or after.sent_bytes < 0:
        return after
    carried = after.sent_bytes + after.received_bytes - before.sent_bytes - before.received_bytes
    return replace(after, moved_bytes=max(carried, 0))


def _inodes(pid: int, denied: list[str]) -> set[int]:
    inodes = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 -- names, not paths
            target = _link(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    except PermissionError:
        denied.append("fd")
    except OSError:
        pass
    return inodes


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 -- no path, a label
    except FileNotFoundError:
        return ""  # closed in the meantime


def _from_kernel(inodes: set[int]) -> Iterator[tuple[int, Socket]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_TIMEOUT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = 1 << (_INET_DIAG_INFO - 1)
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, wanted, 0, 0xFFFFFFFF, bytes(48))
            size = _HEADER.size + len(body)
            head = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
            netlink.sendto(head + body, (0, 0))
            for message in _messages(netlink):
                (inode,) = _INODE.unpack_from(message, _MESSAGE.size - _INODE.size)
                if inode in inodes:  # a few of a busy host's hundred thousand
                    yield inode, _parsed(message)


def _messages(netlink: socket.socket) -> Iterator[bytes]:
    while True:
        data = netlink.recv(_REPLY_BYTES)
        while data:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            if kind == _NLMSG_DONE or length < _HEADER.size:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", data, _HEADER.size)[0]
                raise OSError(code, os.strerror(code))
            yield data[_HEADER.size : length]
            data = data[-(-length // 4) * 4 :]


def _parsed(message: bytes) -> Socket:
    family, state, _, again, ports, source, target, _, _, _, unread, unsent, _, _ = (
        _MESSAGE.unpack_from(message)
    )
    local_port, peer_port = _PORTS.unpack(ports)
    size = 4 if family == socket.AF_INET else 16
    retransmits, sent, received = again, -1, -1
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            break
        info = message[at + _ATTRIBUTE.size : at + length]
        if kind == _INET_DIAG_INFO and len(info) >= _BYTES_OFFSET + 16:
            (retransmits,) = struct.unpack_from("=I", info, _TOTAL_RETRANS_OFFSET)
            sent, received = struct.unpack_from("=QQ", info, _BYTES_OFFSET)
        at += -(-length // 4) * 4
    name = _state(state)
    # The queues of a listening socket count waiting connections, not bytes.
    unread, unsent = (0, 0) if name == _LISTEN else (unread, unsent)
    return Socket(
        local=_endpoint(source[:size], local_port),
        peer=_endpoint(target[:size], peer_port),
        state=name,
        unread_bytes=unread,
        unsent_bytes=unsent,
        retransmits=retransmits,
        sent_bytes=sent,
        received_bytes=received,
    )


def _state(number: int) -> str:
    return _STATES[number] if number < len(_STATES) else str(number)


def _from_files(pid: int, inodes: set[int], denied: list[str]) -> Iterator[tuple[int, Socket]]:
    for name in ("net/tcp", "net/tcp6"):
        for row in tcp_table.rows(read_text(f"/proc/{pid}/{name}", "net/tcp", denied)):
            if row.inode not in inodes:
                continue
            state = _state(int(row.state, 16))
            listens = state == _LISTEN
            yield (
                row.inode,
                Socket(
                    local=_endpoint(*tcp_table.unspell(row.local)),
                    peer=_endpoint(*tcp_table.unspell(row.peer)),
                    state=state,
                    unread_bytes=0 if listens else row.unread_bytes,
                    unsent_bytes=0 if listens else row.unsent_bytes,
                ),
            )


def _endpoint(packed: bytes, port: int) -> str:
    address = ipaddress.ip_address(packed)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
