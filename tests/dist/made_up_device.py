"""A device that is made up: its streams are threads, its memory is the host's.

It is as unkind as a real one. Work on a stream runs later and in order, so code that forgets to
order two streams reads wrong numbers here too. The current device belongs to the thread. Asking an
event during a capture breaks the capture, an event recorded in a capture never happens, and after
an injected fault every question raises.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
import types
import typing
import weakref

import torch

LAG_S = 0.002  # how much later than the host the device runs each piece of work


class DeviceError(RuntimeError):
    """What the device's runtime raises."""


streams = weakref.WeakValueDictionary()  # by what stands for a pointer


class Stream:
    """Runs jobs one after the other, on the device that is current when it is made."""

    def __init__(self):
        self.device = accelerator.current_device()
        streams[id(self)] = self
        self.is_captured = False
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def put(self, job):
        capture = accelerator.capture
        if self.is_captured and capture is not None:
            capture.jobs.append(job)
        else:
            self._work.put(job)

    def _serve(self):
        while True:
            threading.Event().wait(LAG_S)
            self._work.get()()

    def record_event(self, event):
        event.record(self)

    def wait_event(self, event):
        assert event.was_recorded, "a stream waits for an event that was never recorded"
        if event.in_capture != self.is_captured:
            raise DeviceError("an event of a capture is used outside of it, or the other way round")
        happened = event.happened
        self.put(happened.wait)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def query(self):
        event = Event()
        event.record(self)
        return event.happened.wait(10 * LAG_S)

    def synchronize(self):
        event = Event()
        event.record(self)
        assert event.happened.wait(30)


class Event:
    """Happens when its stream comes to it."""

    # Of all events: how often each thread has asked the device.
    asked: typing.ClassVar[collections.Counter[int]] = collections.Counter()

    def __init__(self, enable_timing=False):
        self.happened = threading.Event()
        self.was_recorded = False
        self.in_capture = False
        self._timed = enable_timing
        self._mono_ns = 0

    def record(self, stream=None):
        stream = stream or accelerator.current_stream()
        self.happened = happened = threading.Event()
        self.was_recorded, self.in_capture = True, stream.is_captured

        def happen():
            self._mono_ns = time.monotonic_ns()
            happened.set()

        stream.put(happen)

    def query(self):
        Event.asked[threading.get_ident()] += 1
        if accelerator.fault:
            raise DeviceError(accelerator.fault)
        if accelerator.capture is not None and not accelerator.is_relaxed():
            accelerator.capture.broken = "an event was asked during a capture"
            raise DeviceError(accelerator.capture.broken)
        return self.was_recorded and self.happened.is_set()

    def synchronize(self):
        assert self.happened.wait(30)

    def elapsed_time(self, later):
        assert self._timed, "an event without timing is asked for a time"
        assert later._timed, "an event without timing is asked for a time"
        if not (self.happened.is_set() and later.happened.is_set()):
            raise DeviceError("elapsed_time of an event that has not happened")
        return (later._mono_ns - self._mono_ns) / 1e6


class Graph:
    """What a capture recorded; `replay` runs it on the current stream."""

    def __init__(self):
        self.jobs = []
        self.broken = ""

    def replay(self):
        assert not self.broken, self.broken
        for job in self.jobs:
            accelerator.current_stream().put(job)


class Accelerator:
    """What `torch.cuda` is for CUDA."""

    Stream, Event = Stream, Event

    def __init__(self):
        self._here = threading.local()
        self._defaults = {}
        self._making = threading.Lock()
        self.num_devices = 8
        self.fault = ""  # set: every question to an event raises it
        self.capture = None  # the graph that is being captured, by any thread
        self.num_records = 0  # of record_stream

    def is_available(self):
        return True

    def device_count(self):
        return self.num_devices

    def current_device(self):
        return getattr(self._here, "device", 0)

    def set_device(self, index):
        self._here.device = index

    @contextlib.contextmanager
    def device(self, index):
        before, self._here.device = self.current_device(), index
        try:
            yield
        finally:
            self._here.device = before

    def current_stream(self, device=None):
        index = self.current_device() if device is None else device
        streams = getattr(self._here, "streams", {})
        with self._making:
            if index not in streams and index not in self._defaults:
                with self.device(index):
                    self._defaults[index] = Stream()
        return streams.get(index, self._defaults.get(index))

    @contextlib.contextmanager
    def stream(self, stream):
        streams = dict(getattr(self._here, "streams", {}))
        before, self._here.streams = streams, {**streams, stream.device: stream}
        try:
            yield
        finally:
            self._here.streams = before

    def ExternalStream(self, pointer, device=None):  # noqa: N802 -- torch's name
        return streams[pointer]

    def is_current_stream_capturing(self):
        return self.current_stream().is_captured

    @contextlib.contextmanager
    def relaxed(self):
        """Let this thread ask events while another one captures."""
        self._here.relaxed = True
        try:
            yield
        finally:
            self._here.relaxed = False

    def is_relaxed(self):
        return getattr(self._here, "relaxed", False)

    @contextlib.contextmanager
    def graph(self, graph):
        stream = Stream()
        stream.is_captured, self.capture = True, graph
        try:
            with self.stream(stream):
                yield
        finally:
            stream.is_captured, self.capture = False, None
        if graph.broken:
            raise DeviceError(f"the capture is invalid: {graph.broken}")


accelerator = Accelerator()


class DeviceArray:
    """An array that claims to be CUDA's; its content is a tensor of the host.

    Args:
        stream: what `__cuda_array_interface__` says of the stream on which the array is used.
    """

    def __init__(self, values, index=0, stream=None):
        self.tensor = torch.as_tensor(values).clone()
        self.device = types.SimpleNamespace(id=index)
        self._stream = stream

    @property
    def __cuda_array_interface__(self):
        facts = {
            "shape": tuple(self.tensor.shape), "strides": None, "version": 3,
            "typestr": self.tensor.numpy().dtype.str, "data": (self.tensor.data_ptr(), False),
        }  # fmt: skip
        return facts if self._stream is None else {**facts, "stream": self._stream}

    def compute(self, job):
        """Let the caller's stream work on it."""
        accelerator.current_stream(self.device.id).put(lambda: job(self.tensor))

    def read(self):
        accelerator.current_stream(self.device.id).synchronize()
        return self.tensor
