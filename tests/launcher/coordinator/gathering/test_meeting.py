"""The job's store as the coordinator sees it: how it ended, or why it does not start."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from echelon.errors import LaunchError
from echelon.launcher.coordinator.gathering import meeting
from echelon.launcher.coordinator.gathering.meeting import StoreProcess

_WAIT_S = 60.0


@pytest.mark.ranks
def test_a_store_that_is_stopped_is_reported_and_replaced_without_a_wait():
    store = StoreProcess("127.0.0.1", "127.0.0.1", "a-secret-of-the-tests")
    try:
        assert store.how_it_died() == ""
        os.kill(store._process.pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + _WAIT_S
        while store.how_it_died() != "is stopped by a signal":
            assert time.monotonic() < deadline_s
        stopped = store._process
        store.renew()
        assert stopped.returncode == -signal.SIGKILL
        assert store.how_it_died() == ""
    finally:
        store.close()
    assert "exited" in store.how_it_died()


@pytest.mark.ranks
def test_the_store_says_which_keys_it_has(monkeypatch):
    monkeypatch.setattr(meeting, "_ANSWER_S", _WAIT_S)  # of a busy machine
    store = StoreProcess("127.0.0.1", "127.0.0.1", "a-secret-of-the-tests")
    try:
        store.publish("first", "1")
        keys = [*(f"continuation/begun/{rank}" for rank in range(300)), "first", "second"]
        assert store.has(keys) == [False] * 300 + [True, False]
        assert store.has([]) == []
        store.renew()
        assert store.has(["first"]) == [False]
        os.kill(store._process.pid, signal.SIGKILL)
        store._process.wait()
        with pytest.raises(LaunchError, match="store server"):
            store.has(["first"])
    finally:
        store.close()


def test_a_store_that_cannot_be_started_is_one_line(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(LaunchError, match="cannot start the store server: Resource temp"):
        StoreProcess("127.0.0.1", "127.0.0.1", "a-secret-of-the-tests")


def test_a_store_that_ends_at_its_start_is_reported_with_its_exit_code(monkeypatch):
    started = subprocess.Popen

    def start_another(_: object, **options: object) -> subprocess.Popen[bytes]:
        return started(["false"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", start_another)
    with pytest.raises(LaunchError, match=r"did not start: exited with code 1$"):
        StoreProcess("127.0.0.1", "127.0.0.1", "a-secret-of-the-tests")
