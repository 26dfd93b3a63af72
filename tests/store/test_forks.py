"""Children of a store's process: they hold nothing of it open."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys

import pytest

from echelon.store import FileStore, StoreServer, TCPStore
from tests.store.peers import PATIENCE_S, Background, until
from tests.support.ports import free_port

# A process that forks a child which lives on, then waits to be killed.
FORKING = """
import os, signal, sys, time
from echelon.store import TCPStore, FileStore, StoreServer
{setup}
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, {shown}, flush=True)
{last}
time.sleep(600)
"""


@pytest.fixture
def forking():
    """Start a process that forks; after the test both are killed."""
    started: list[int] = []

    def start(setup: str, shown: str = "''", last: str = "") -> tuple[subprocess.Popen, str]:
        script = FORKING.format(setup=setup, shown=shown, last=last)
        parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        child, _, rest = parent.stdout.readline().strip().partition(" ")
        started.append(int(child))
        parents.append(parent)
        return parent, rest

    parents: list[subprocess.Popen] = []
    yield start
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for parent in parents:
        parent.kill()
        parent.wait(PATIENCE_S)
        parent.stdout.close()


def kill(parent: subprocess.Popen) -> None:
    parent.kill()
    assert parent.wait(PATIENCE_S) == -signal.SIGKILL


def test_a_killed_rank_does_not_count_while_its_child_lives(server, client, forking):
    store = client()
    parent, _ = forking(
        f"store = TCPStore('127.0.0.1', {server.port}, timeout=60.0)\n"
        "presence = store.presence('here')\n",
        last="store.gather('g', 1, 3, b'dead', timeout=60.0)",
    )
    until(lambda: store.statistics().waiting.get("g") == 1, "it has arrived")
    assert store.check(["here"])
    kill(parent)
    until(lambda: store.statistics().waiting.get("g") is None, "its arrival is taken back")
    until(lambda: not store.check(["here"]), "its presence ends")


def test_a_killed_hosts_port_is_free_while_its_child_lives(forking):
    port = free_port()
    parent, _ = forking(f"server = StoreServer('127.0.0.1', {port}).start()\n")
    with TCPStore("127.0.0.1", port, timeout=20.0) as store:
        assert store.add("n", 1) == 1
    kill(parent)
    with StoreServer("127.0.0.1", port) as server:
        assert server.port == port


def test_a_killed_writers_lock_is_free_while_its_child_lives(tmp_path, forking):
    path = tmp_path / "store"
    parent, _ = forking(
        f"store = FileStore({str(path)!r})\nlocked = store._locked(__import__("
        "'echelon.store.deadline', fromlist=['x']).Deadline(5.0))\nlocked.__enter__()\n"
    )
    kill(parent)
    with FileStore(path, timeout=PATIENCE_S) as store:
        store.set("k", b"v")
        assert store.get("k") == b"v"


# The collector ends the objects of a cycle in any order: the socket may come before its owner.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_is_collected_while_another_starts_does_not_deadlock(monkeypatch):
    """The collector may end a hosting store at any allocation, also while one is being made."""

    class Holder:
        pass

    def make_cycle() -> None:
        holder = Holder()
        holder.itself = holder
        holder.store = TCPStore("127.0.0.1", 0, is_master=True, timeout=20.0)

    real = StoreServer.start
    collected = []

    def start(self: StoreServer) -> StoreServer:
        collected.append(gc.collect())
        return real(self)

    make_cycle()
    monkeypatch.setattr(StoreServer, "start", start)
    host = Background(lambda: TCPStore("127.0.0.1", 0, is_master=True, timeout=20.0))
    with host.result() as store:
        assert store.add("n", 1) == 1
    assert collected[0] > 0
