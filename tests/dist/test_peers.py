"""Which processes have ended, seen by all groups through one descriptor per process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.dist.membership.peers import Peers, _Descriptors
from echelon.host.identity import pid_namespace, start_ticks
from tests.dist.contract import wait_until


def _num_descriptors() -> int:
    """Return how many pidfds and epolls this process has."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found += path.readlink().name.startswith(
                ("anon_inode:[pidfd]", "anon_inode:[eventpoll]")
            )
    return found


@pytest.fixture
def children():
    """Yield two processes that run until their standard input ends."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE)) for _ in range(2)
        ]


def _process(child: subprocess.Popen[bytes]) -> tuple[int, int, int]:
    ticks = start_ticks(child.pid)
    assert ticks is not None
    return (pid_namespace(), child.pid, ticks)


def test_a_death_is_seen_by_every_group_also_before_it_is_reaped(children):
    before = _num_descriptors()
    processes = {rank: _process(child) for rank, child in enumerate(children, 1)}
    first = Peers(processes)
    held = _num_descriptors()
    others = [Peers(processes) for _ in range(20)]
    assert _num_descriptors() == held, "a group of the same processes needs no descriptor"
    assert first.dead([1, 2]) == []
    children[0].stdin.close()  # it is a zombie then: only the test's end reaps it
    for peers in (first, *others):
        wait_until(lambda peers=peers: peers.dead([1, 2]) == [1], 20)
    assert first.dead([2]) == []
    others.append(Peers(processes))
    assert others[-1].dead([1, 2]) == [1], "a group that is made afterwards sees it too"
    first.close()
    assert others[0].dead([1, 2]) == [1]
    for peers in others:
        peers.close()
    assert _num_descriptors() == before


def test_the_last_group_releases_every_descriptor(children):
    before = _num_descriptors()
    processes = {rank: _process(child) for rank, child in enumerate(children, 1)}
    groups = [Peers(processes) for _ in range(3)]
    children[1].stdin.close()
    wait_until(lambda: groups[0].dead([1, 2]) == [2], 20)
    for peers in groups:
        peers.close()
        peers.close()
    assert _num_descriptors() == before


def test_a_process_with_a_reused_pid_is_dead(children):
    namespace, pid, ticks = _process(children[0])
    with contextlib.closing(Peers({1: (namespace, pid, ticks - 1)})) as peers:
        assert peers.dead([1]) == [1]


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_a_look_beside_a_close_finds_nothing_and_keeps_no_descriptor(
    children, monkeypatch, has_pidfds
):
    """A thread that watches a group may be inside a look when the group is closed."""
    before = _num_descriptors()
    take = _Descriptors.take
    monkeypatch.setattr(_Descriptors, "take", lambda *_: None)  # the limit is reached, say
    peers = Peers({1: _process(children[0])})
    if not has_pidfds:
        children[0].kill()
        children[0].wait()  # no longer in /proc: dead, if it were asked for

    def close_meanwhile(descriptors, process):
        peers.close()
        return take(descriptors, process) if has_pidfds else None

    monkeypatch.setattr(_Descriptors, "take", close_meanwhile)
    assert peers.dead([1]) == []
    assert peers.dead([1]) == []
    assert peers.watched == set()
    peers.close()
    assert _num_descriptors() == before
