"""A library of collectives for the made-up device, with the edges that NCCL has.

* The first call of each kind connects, on the host, inside the call: it returns once all members
  that take part have made the same call.
* A kernel holds its stream until its peers' kernels run: a send until the receive is posted.
* The device runs so many kernels at once and no more.
* A communicator is entered by one thread at a time, with its device current; what breaks that, or
  uses, aborts or destroys a communicator that was freed, is a *violation*: it is kept for the test.
* A group belongs to the calling thread and holds back the calls of all its communicators.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time

import numpy as np

from tests.dist.made_up_device import accelerator

violations = []  # of this process
_HEAD = struct.Struct("<IiQ")
_SLICE_S = 0.02
_here = threading.local()


class LibraryError(RuntimeError):
    """What the library raises."""


class Faults:
    """What a test lets go wrong in this process."""

    launch = ""  # raised by the next launch
    reported = ""  # found by the library later
    can_revoke = True
    byte_s = 0.0  # how long a send of one byte keeps its stream before it begins
    slots = threading.Semaphore(16)  # kernels that the device runs at once


def _violate(what):
    violations.append(what)
    raise LibraryError(what)


# ---- connections between the ranks ----


class Wires:
    """Ordered bytes between this rank and the others, under numbered planes."""

    def __init__(self, size, rank, root_name):
        self.rank, self.size = rank, size
        self.ended = threading.Event()
        self._boxes = {}
        self._making = threading.Lock()
        self._sending = threading.Lock()
        self._sockets = {}
        listener = _listen()
        names = self._meet(root_name, listener.getsockname().decode())
        for other in range(rank):
            self._sockets[other] = _connect(names[other])
            self._sockets[other].sendall(struct.pack("<I", rank))
        for _ in range(rank + 1, size):
            one, _ = listener.accept()
            self._sockets[struct.unpack("<I", _exactly(one, 4))[0]] = one
        listener.close()
        for other, one in self._sockets.items():
            threading.Thread(target=self._read, args=(other, one), daemon=True).start()

    def _meet(self, root_name, mine):
        if self.rank == 0:
            root = _roots.pop(root_name)
            joined = {0: (None, mine)}
            while len(joined) < self.size:
                one, _ = root.accept()
                rank, name = _exactly(one, 64).rstrip().decode().split(" ")
                joined[int(rank)] = (one, name)
            names = [joined[rank][1] for rank in range(self.size)]
            for one, _ in joined.values():
                if one is not None:
                    one.sendall(" ".join(names).ljust(64 * self.size).encode())
            root.close()
            return names
        one = _connect(root_name)
        one.sendall(f"{self.rank} {mine}".ljust(64).encode())
        return _exactly(one, 64 * self.size).decode().split()

    def send(self, to, plane, data):
        with self._sending, contextlib.suppress(OSError):
            self._sockets[to].sendall(_HEAD.pack(plane, self.rank, len(data)) + bytes(data))

    def receive(self, source, plane):
        """Return what a rank sent, or None if the communicator was ended meanwhile."""
        box = self._box(source, plane)
        while not self.ended.is_set():
            with contextlib.suppress(queue.Empty):
                return box.get(timeout=_SLICE_S)
        return None

    def close(self):
        self.ended.set()
        for one in self._sockets.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _box(self, source, plane):
        with self._making:
            return self._boxes.setdefault((source, plane), queue.SimpleQueue())

    def _read(self, source, one):
        with contextlib.suppress(OSError, EOFError):
            while True:
                plane, _, size = _HEAD.unpack(_exactly(one, _HEAD.size))
                self._box(source, plane).put(_exactly(one, size))


_roots = {}
_HOST_PLANE, _POSTED_PLANE, _DATA_PLANE, _END_PLANE = range(4)


def _listen():
    one = socket.socket(socket.AF_UNIX)
    one.bind(f"\0made-up-{os.getpid()}-{os.urandom(6).hex()}")
    one.listen(64)
    return one


def _connect(name):
    one = socket.socket(socket.AF_UNIX)
    one.connect(name)
    return one


def _exactly(one, size):
    data = b""
    while len(data) < size:
        part = one.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# ---- the library ----


def unique_id():
    listener = _listen()
    name = listener.getsockname().decode()
    _roots[name] = listener
    return name.encode().ljust(64)


@contextlib.contextmanager
def group():
    """Hold back this thread's calls, of all communicators, until the outermost group ends."""
    depth = getattr(_here, "depth", 0)
    if depth == 0:
        _here.held = []
    _here.depth = depth + 1
    try:
        yield
    finally:
        _here.depth = depth
        if depth == 0:
            held, _here.held = _here.held, None
            by_stream = {}
            for communicator, call in held:
                by_stream.setdefault((communicator, call.stream), []).append(call)
            for (communicator, _), calls in by_stream.items():
                communicator._launch_all(calls)


class _Call:
    def __init__(self, kind, source, target, reduce_op, peer, stream):
        self.kind, self.reduce_op, self.peer, self.stream = kind, reduce_op, peer, stream
        self.source, self.target = (None if x is None else x.numpy() for x in (source, target))

    def contact(self):
        """With whom the first call of its kind connects, as a plane of its own."""
        return f"{self.kind}/{self.reduce_op}/{self.peer}".encode()


class Communicator:
    """One communicator of the library."""

    def __init__(self, size, rank, drawn, index):
        if accelerator.current_device() != index:
            _violate(f"made on device {accelerator.current_device()}, for device {index}")
        self.size, self.rank, self.index = size, rank, index
        self.num_launched = 0
        self._wires = Wires(size, rank, drawn.rstrip().decode())
        self._connected = set()
        self._freed = False
        self._revoked = False
        self._inside = threading.Lock()

    @contextlib.contextmanager
    def _entered(self, what):
        if self._freed:
            _violate(f"{what} of a communicator that was freed")
        if not self._inside.acquire(blocking=False):
            _violate(f"{what} while another thread is inside the communicator")
        try:
            yield
        finally:
            self._inside.release()

    def launch(self, kind, source, target, reduce_op, peer, stream):
        if accelerator.current_device() != self.index:
            _violate(f"{kind} with device {accelerator.current_device()} current")
        call = _Call(kind, source, target, reduce_op, peer, stream)
        if getattr(_here, "held", None) is not None:
            with self._entered(kind):
                _here.held.append((self, call))
        else:
            self._launch_all([call])

    def _launch_all(self, calls):
        with self._entered(calls[0].kind):
            if Faults.launch:
                raise LibraryError(Faults.launch)
            for call in calls:
                if call.stream.device != self.index:
                    _violate("launched on the stream of another device")
            self._connect(calls)
            self.num_launched += len(calls)
            calls[0].stream.put(lambda: self._run(calls))

    def _connect(self, calls):
        """Meet whoever takes part, on the host, if this is the first call of the kind."""
        waits = []
        for call in calls:
            peers = [r for r in range(self.size) if r != self.rank]
            what = call.contact()
            if call.kind in ("send", "recv"):
                peers = [call.peer]
                what = b"message"  # both directions connect at once
                if call.peer == self.rank or ("message", call.peer) in self._connected:
                    continue
                self._connected.add(("message", call.peer))
            elif what in self._connected:
                continue
            self._connected.add(what)
            for peer in peers:
                self._wires.send(peer, _HOST_PLANE, what)
                waits.append((peer, what))
        for peer, what in waits:
            said = self._wires.receive(peer, _HOST_PLANE)
            if said is None or self._revoked:
                raise LibraryError("the communicator was revoked")
            if said != what:
                raise LibraryError(f"connects for {what!r}, rank {peer} for {said!r}")

    def _run(self, calls):
        """A kernel: it holds its stream and its place on the device until it ends."""
        while not Faults.slots.acquire(timeout=_SLICE_S):
            if self._wires.ended.is_set():
                return
        try:
            if calls[0].kind in ("send", "recv"):
                threads = [threading.Thread(target=self._move, args=(call,)) for call in calls]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                for call in calls:
                    self._collect(call)
        finally:
            Faults.slots.release()

    def _move(self, call):
        if call.kind == "send":
            if call.source.nbytes == 1:
                time.sleep(Faults.byte_s)
            if self._wires.receive(call.peer, _POSTED_PLANE) is not None:
                self._wires.send(call.peer, _DATA_PLANE, call.source.tobytes())
            return
        self._wires.send(call.peer, _POSTED_PLANE, b"")
        data = self._wires.receive(call.peer, _DATA_PLANE)
        if data is not None:
            into = call.target.view(np.uint8)
            into[:] = np.frombuffer(data, np.uint8)[: into.size]

    def _collect(self, call):
        mine = call.target if call.source is None else call.source
        rows = []
        for rank in range(self.size):
            if rank != self.rank:
                self._wires.send(rank, _DATA_PLANE, mine.tobytes())
        for rank in range(self.size):
            if rank == self.rank:
                rows.append(mine.copy())
                continue
            data = self._wires.receive(rank, _DATA_PLANE)
            if data is None:
                return
            rows.append(np.frombuffer(data, mine.dtype))
        self._finish(call, rows)

    def _finish(self, call, rows):
        into = call.target
        if call.kind == "all_gather":
            into[:] = np.concatenate(rows)
        elif call.kind == "broadcast":
            (call.source if into is None else into)[:] = rows[call.peer]
        else:
            total = _reduced(rows, call.reduce_op)
            if call.kind == "all_reduce" or (call.kind == "reduce" and call.peer == self.rank):
                into[:] = total
            elif call.kind == "reduce_scatter":
                into[:] = np.split(total, self.size)[self.rank]

    # ---- the end ----

    def failure(self):
        if self._freed:
            _violate("get_async_error of a communicator that was freed")
        return Faults.reported

    def revoke(self):
        """End what runs and what waits inside; free nothing. Allowed beside a call."""
        if not Faults.can_revoke:
            return False
        if self._freed:
            _violate("revoke of a communicator that was freed")
        self._revoked = True
        self._wires.ended.set()
        return True

    def abort(self):
        with self._entered("abort"):
            self._freed = True
            self._wires.close()

    def destroy(self):
        """Wait until all members destroy it, or one is gone."""
        with self._entered("destroy"):
            others = [rank for rank in range(self.size) if rank != self.rank]
            for rank in others:
                self._wires.send(rank, _END_PLANE, b"")
            for rank in others:
                self._wires.receive(rank, _END_PLANE)
            self._freed = True
            time.sleep(_SLICE_S)  # what was sent last is read before the connection closes
            self._wires.close()


def _reduced(rows, reduce_op):
    combine = {
        "sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum,
    }[reduce_op]  # fmt: skip
    total = rows[0].copy()
    for row in rows[1:]:
        total = combine(total, row)
    return (total / len(rows)).astype(total.dtype) if reduce_op == "avg" else total
