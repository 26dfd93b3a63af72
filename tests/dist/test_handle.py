"""The owner of a communicator: one thread inside at a time, one end, nothing after it."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from echelon.dist.backends.device.communicators.handle import Handle, HandleEnded
from echelon.dist.backends.device.communicators.launcher import Launcher


class _Communicator:
    def __init__(self, can_revoke=True):
        self.ends = []
        self.released = threading.Event()
        self._can_revoke = can_revoke

    def failure(self):
        assert not self.ends, "asked after its end"
        return "a fault"

    def revoke(self):
        if self._can_revoke:
            self.released.set()
        return self._can_revoke

    def abort(self):
        self.ends.append("abort")

    def destroy(self):
        self.ends.append("destroy")


@pytest.mark.parametrize("first", ["abort", "destroy"])
@pytest.mark.parametrize("second", ["abort", "destroy"])
def test_a_communicator_ends_once(first, second):
    communicator = _Communicator()
    handle = Handle(communicator)
    assert handle.failure() == "a fault"
    assert getattr(handle, first)(5)
    assert getattr(handle, second)(5)
    assert communicator.ends == [first]
    assert handle.failure() == ""
    with pytest.raises(HandleEnded), handle.entered():
        pass


@pytest.mark.parametrize("can_revoke", [True, False])
def test_it_is_freed_only_after_the_thread_inside_has_left(can_revoke):
    communicator = _Communicator(can_revoke)
    handle = Handle(communicator)
    seen, is_inside = [], threading.Event()

    def stay():
        with handle.entered():
            is_inside.set()
            communicator.released.wait(20)
            seen.extend(communicator.ends)

    thread = threading.Thread(target=stay)
    thread.start()
    assert is_inside.wait(20)
    assert handle.failure() == ""  # never beside another call
    assert handle.abort(0.5 if not can_revoke else 20) == can_revoke
    communicator.released.set()
    thread.join(20)
    assert handle.abort(20)
    assert (seen, communicator.ends) == ([], ["abort"])


def test_calls_of_a_known_kind_are_made_on_the_callers_thread_in_order():
    launcher, order = Launcher("a launcher"), []
    go, done = threading.Event(), threading.Event()

    def slow():
        go.wait(20)
        order.append(("slow", threading.current_thread().name))
        return True

    def quick(number):
        def job():
            order.append((number, threading.current_thread().name))
            done.set() if number == 1 else None
            return True

        return job

    launcher.launch(slow, "kind")
    launcher.launch(quick(1), "kind")  # known or not, it is behind the first
    assert order == []
    go.set()
    assert done.wait(20)
    deadline = threading.Event()
    while launcher._has_thread and not deadline.wait(0.001):
        pass
    launcher.launch(quick(2), "kind")
    here = threading.current_thread().name
    assert order == [("slow", "a launcher"), (1, "a launcher"), (2, here)]
