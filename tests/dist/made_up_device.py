"""A device that is made up: streams are threads, its memory is the host's, its library is shm.

Work on a stream runs later and in order, as on a real device, so whoever forgets to order two
streams reads the wrong numbers here too.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import types

import torch

from echelon.dist.backends.device.stream import StreamBackend
from echelon.dist.backends.shm import backend as shm
from echelon.dist.operation.operation import Operation, encode_call
from echelon.errors import EchelonError
from echelon.store import PrefixStore

LAG_S = 0.002  # how much later than the host the device runs each piece of work


class Stream:
    def __init__(self):
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def put(self, job):
        self._work.put(job)

    def _serve(self):
        while True:
            threading.Event().wait(LAG_S)
            self._work.get()()

    def wait_event(self, event):
        self.put(event.happened.wait)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def synchronize(self):
        event = Event()
        event.record(self)
        assert event.happened.wait(30)


class Event:
    def __init__(self):
        self.happened = threading.Event()

    def record(self, stream):
        stream.put(self.happened.set)

    def query(self):
        return self.happened.is_set()


class Accelerator:
    """What `torch.cuda` is for CUDA."""

    Stream, Event = Stream, Event

    def __init__(self):
        self._here = threading.local()
        self.default = Stream()

    def current_device(self):
        return 0

    def current_stream(self):
        return getattr(self._here, "stream", self.default)

    def device(self, index):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stream(self, stream):
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before


accelerator = Accelerator()


class DeviceArray:
    """An array that claims to be CUDA's; its content is a tensor of the host."""

    def __init__(self, values, index=0):
        self.tensor = torch.as_tensor(values).clone()
        self.device = types.SimpleNamespace(id=index)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": tuple(self.tensor.shape), "strides": None, "version": 3,
            "typestr": self.tensor.numpy().dtype.str, "data": (self.tensor.data_ptr(), False),
        }  # fmt: skip

    def compute(self, job):
        """Let the caller's stream work on it."""
        accelerator.current_stream().put(lambda: job(self.tensor))

    def read(self):
        accelerator.current_stream().synchronize()
        return self.tensor


class MadeUpBackend(StreamBackend):
    """The streams' logic over a library that is our own shm."""

    name = "made-up"
    device = "cuda"
    own_dtypes = frozenset({"float32", "float64", "int64", "uint8"})
    own_ops = frozenset({"sum", "avg", "min", "max", "prod"})

    def __init__(self, members, store, timeout_s):
        self._own_store, self._limit_s = PrefixStore("library", store), timeout_s
        self._library = None
        self._num_collectives = 0
        self.reported = ""  # an error that the library has found
        self._ended = threading.Event()
        super().__init__(members, store, timeout_s)

    def _find_accelerator(self):
        return accelerator

    def _as_tensor(self, owner):
        return owner.tensor

    def _draw_id(self):
        return b"an id"

    def _open(self, unique_id):
        assert unique_id == b"an id"
        self._library = shm.create(self._members, self._own_store, self._limit_s)

    def _launch(self, kind, source, target, reduce_op, peer):
        is_message = kind in ("send", "recv")
        self._num_collectives += not is_message
        flat = [None if x is None else x.numpy() for x in (source, target)]
        shown = flat[1] if flat[0] is None else flat[0]
        rooted = kind in ("reduce", "broadcast")
        if kind == "broadcast" and self._members.rank == peer:
            flat[1] = None
        elif kind == "broadcast":
            flat[0] = None
        operation = Operation(
            kind=kind, sequence=self._num_collectives, dtype=shown.dtype.name, reduce_op=reduce_op,
            root=peer if rooted else -1, peer=peer if is_message else -1,
            source=flat[0], target=flat[1], timeout_s=600.0,  # a device waits for ever
            call=encode_call(kind, reduce_op, shown.dtype.name, peer if rooted else -1, None),
        )  # fmt: skip

        def run():
            try:
                self._library.execute(operation)
            except EchelonError:
                self._ended.wait()  # a kernel whose peer is gone spins until it is aborted

        if is_message and self._group is not None:
            self._group.append(operation)  # all of a group at once: nobody waits for an order
        else:
            self._put(run)

    def _put(self, job):
        self.stream.put(job)
        if self._ordered:  # torch's own kernels follow, which here run at once
            self.stream.synchronize()

    _group = None

    @contextlib.contextmanager
    def _together(self):
        if self._group is not None:
            yield
            return
        self._group = []
        try:
            yield
        finally:
            group, self._group = self._group, None
            self._put(lambda: self._run_group(group))

    def _run_group(self, group):
        try:
            for pending in [self._library.submit(operation) for operation in group]:
                pending.wait(self._limit_s)
        except EchelonError:
            self._ended.wait()

    def _failure(self):
        return self.reported

    def _abort(self):
        self._ended.set()
        if self._library is not None:
            self._library.abort()

    def _close(self):
        self._ended.set()
        self._library.close()


def create(members, store, timeout_s):
    return MadeUpBackend(members, store, timeout_s)


create.device = "cuda"
