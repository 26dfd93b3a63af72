"""A rank's side of tests on the made-up device: joining, arrays, and a clean end."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import os
import time

import torch

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.dist.backends.device.communicators.launcher import Launcher
from tests.dist import made_up_library
from tests.dist.made_up_device import DeviceArray, Event, Graph, Stream, accelerator
from tests.dist.made_up_library import Faults

__all__ = ["DeviceArray", "Event", "Faults", "Graph", "Stream", "accelerator"]

_POINTS = [
    importlib.metadata.EntryPoint(
        "made-up", "tests.dist.made_up_backend:create", registry.ENTRY_POINTS
    )
]


def init(backend, **settings):
    """Join the world; returns it and what makes arrays on this rank's device."""
    registry.entry_points = lambda group: _POINTS if group == registry.ENTRY_POINTS else []
    torch.set_num_threads(1)
    torch.Tensor.record_stream = _count_record  # a tensor's memory is the host's here
    index = accelerator.current_device() or int(os.environ["LOCAL_RANK"])
    world = dist.init(backend, **settings)
    accelerator.set_device(index)
    return world, array_on(index)


def array_on(own_index):
    """Return what makes arrays on a device."""

    def array(values, index=own_index, stream=None):
        return DeviceArray(values, index, stream)

    return array


def shutdown():
    """Leave the world, and check that the library was used as it allows."""
    dist.shutdown()
    assert made_up_library.violations == []


def store():
    """Return the world's store."""
    return importlib.import_module("echelon.dist.runtime")._need().store


def wait_until(condition, timeout_s=20):
    """Poll until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.005)


def pause_after_connecting(pause_s):
    """Have a thread that makes a first call stand still right after it."""
    launch = Launcher.launch

    def launch_and_pause(self, job, key):
        is_first = not self.knows(key)

        def job_and_pause():
            succeeded = job()
            if is_first:
                time.sleep(pause_s)
            return succeeded

        launch(self, job_and_pause, key)

    Launcher.launch = launch_and_pause


def num_launched():
    """Return how many operations were launched on this process's communicators."""
    return sum(one.num_launched for one in _communicators())


def num_inside():
    """Return how many of this process's communicators have a thread inside."""
    return sum(one._inside.locked() for one in _communicators())


def _communicators():
    return [one for one in gc.get_objects() if isinstance(one, made_up_library.Communicator)]


def _count_record(*_):
    accelerator.num_records += 1
