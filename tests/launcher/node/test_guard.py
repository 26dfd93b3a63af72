"""The guard: many workers, workers that cannot be started or killed, and foreign signals."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.launcher.node import guard as guard_module
from echelon.launcher.node.containment import Containment
from echelon.launcher.node.guard import Guard, descendants
from echelon.launcher.node.workers import (
    _PR_SET_CHILD_SUBREAPER,
    Exited,
    Failed,
    Started,
    Swept,
    Workers,
)

pytestmark = pytest.mark.ranks
_WAIT_S = 60.0
_ENV = {"PATH": os.environ["PATH"]}


def _adopt_no_more() -> None:
    """Have this process adopt no orphans again, which workers had it do."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    made.close()
    _adopt_no_more()


class _Run:
    """Workers' output and events, until what is asked for has arrived."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.pipes: list[int] = []
        self.events: list[object] = []

    def spawn(self, index: int, *argv: str, **options) -> None:
        out, err = self.workers.spawn(index, argv, _ENV, "/", **options)
        os.close(err)
        self.pipes.append(out)

    def wait_for(self, kind: type, count: int = 1) -> list:
        deadline = time.monotonic() + _WAIT_S
        while len(found := [e for e in self.events if isinstance(e, kind)]) < count:
            ready, _, _ = select.select([self.workers.fileno()], [], [], 1.0)
            if ready:
                self.events += self.workers.events()
            assert time.monotonic() < deadline, self.events
        return found

    def output(self, index: int) -> str:
        pipe, self.pipes[index] = self.pipes[index], -1  # its number may be another's soon
        with os.fdopen(pipe, "rb") as file:
            return file.read().decode()

    def line(self, index: int) -> str:
        data = b""
        while not data.endswith(b"\n"):
            data += os.read(self.pipes[index], 1)
        return data.decode().strip()


@pytest.fixture
def run(workers: Workers) -> Iterator[_Run]:
    made = _Run(workers)
    yield made
    for pipe in made.pipes:
        if pipe >= 0:
            os.close(pipe)


def test_hundreds_of_workers_start_before_any_answer_is_read(run):
    for index in range(300):
        run.spawn(index, "true")
    ends = run.wait_for(Exited, 300)
    assert {end.index for end in ends} == set(range(300))
    assert {end.code for end in ends} == {0}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("/no/such/program", "--key=s3cret"), "cannot start /no/such/program: No such file"),
        (("true", "a\0b"), "cannot start true: embedded null byte"),
    ],
    ids=["no such program", "NUL"],
)
def test_a_program_that_cannot_start_is_named_without_its_arguments(run, argv, words):
    run.spawn(0, *argv)
    (failed,) = run.wait_for(Failed)
    assert words in failed.error
    assert "a-secret-of-the-tests" not in failed.error


def test_no_ignorable_signal_ends_the_guard(run):
    run.spawn(0, "sleep", "60")
    run.wait_for(Started)
    guard = run.workers._guard.pid
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM, signal.SIGTSTP):
        os.kill(guard, number)
    run.workers.signal(0, signal.SIGTERM)
    assert run.wait_for(Exited)[0].code == -signal.SIGTERM


def test_a_users_signal_goes_to_the_worker_and_not_to_its_children(run):
    run.spawn(0, "sh", "-c", "trap 'exit 7' USR1; sleep 60 & echo up; while :; do wait; done")
    assert run.line(0) == "up"
    run.workers.signal(0, signal.SIGUSR1, alone=True)
    assert run.wait_for(Exited)[0].code == 7
    run.workers.sweep(signal.SIGKILL)
    assert run.wait_for(Swept)[0].count == 1, "the child has lived on"


def _ignored_by_the_caller() -> int:
    """Return the mask of what this process ignores, without what Python itself ignores."""
    line = re.search(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    assert line is not None
    own = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    return int(line[1], 16) & ~own


@pytest.mark.parametrize("ignored", [False, True])
def test_what_nohup_ignores_stays_ignored_in_the_workers(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    kept = _ignored_by_the_caller()
    workers = Workers()
    run = _Run(workers)
    try:
        run.spawn(0, "grep", "SigIgn", "/proc/self/status")
        mask = int(run.output(0).split()[1], 16)
    finally:
        signal.signal(signal.SIGHUP, before)
        workers.close()
        _adopt_no_more()
    assert bool(mask >> (signal.SIGHUP - 1) & 1) == ignored
    assert mask & ~(1 << (signal.SIGHUP - 1)) & ~kept == 0, "nothing else is ignored"


def test_a_worker_may_read_the_launchers_input(run, monkeypatch):
    read_end, write_end = os.pipe()
    saved = os.dup(0)
    os.dup2(read_end, 0)
    try:
        run.spawn(0, "cat", has_stdin=True)
        run.spawn(1, "cat")
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(read_end)
    os.write(write_end, b"hello\n")
    os.close(write_end)
    assert (run.output(0), run.output(1)) == ("hello\n", "")


def test_workers_have_groups_where_they_can(run):
    containment = Containment()
    if containment.folder is None:
        pytest.skip("no cgroup of version 2 is delegated here")
    group = containment.group("rank_0")
    run.spawn(0, "sh", "-c", "sleep 60 & echo up; wait", group=group)
    assert run.line(0) == "up"
    assert len(Path(group, "cgroup.procs").read_text().split()) == 2
    run.workers.signal(0, signal.SIGKILL, alone=True)
    run.wait_for(Exited)
    for count in range(1, 100):
        run.workers.sweep(signal.SIGKILL)
        if run.wait_for(Swept, count)[-1].count == 0:
            break
    assert not Path(group).exists()
    containment.close()


# ---- without processes ----


@pytest.fixture
def inside() -> Iterator[tuple[Guard, socket.socket]]:
    ours, theirs = socket.socketpair()
    guard = Guard(theirs, lambda *_: 0, frozenset())
    yield guard, ours
    ours.close()
    theirs.close()
    os.close(guard._wake_read)
    os.close(guard._wake_write)


def test_a_fork_that_fails_is_reported(inside, monkeypatch):
    guard, ours = inside
    monkeypatch.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError(11, "no more")))
    guard._descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    guard._obey({"do": "spawn", "index": 5, "argv": ["x"], "group": "", "env": {}})
    assert b"cannot start a process: no more" in ours.recv(4096)


def test_a_stray_that_may_not_be_killed_is_reported_and_ends_nothing(inside, monkeypatch):
    guard, _ = inside
    monkeypatch.setattr(guard_module, "descendants", lambda *_: [4321])
    monkeypatch.setattr(guard_module, "_is_below", lambda *_: True)
    monkeypatch.setattr(os, "pidfd_open", lambda _: os.open(os.devnull, os.O_RDONLY))

    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    assert guard._sweep(signal.SIGKILL) == (1, [4321])
    guard._kill_everything()


def test_without_proc_there_are_no_descendants_and_no_error(monkeypatch):
    def refuse(_: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "listdir", refuse)
    assert descendants(1) == []


def test_workers_die_at_the_fence_and_none_starts_after_it(run):
    run.spawn(0, "sh", "-c", "setsid sleep 1000 & sleep 1000")
    run.wait_for(Started)
    run.workers.fence(time.clock_gettime(time.CLOCK_BOOTTIME) + 0.2)
    (ended,) = run.wait_for(Exited)  # nobody has told the guard to kill it
    assert ended.code == -signal.SIGKILL
    run.spawn(1, "true")
    (failed,) = run.wait_for(Failed)
    assert "lease has expired" in failed.error
    assert run.output(0) == "", "what it had started in a session of its own is dead too"
    run.workers.fence(time.clock_gettime(time.CLOCK_BOOTTIME) + 1000)
    run.spawn(2, "true")
    assert run.wait_for(Exited, 2)[1].code == 0


def test_a_stray_is_signaled_through_a_pidfd_and_only_while_it_is_below(monkeypatch):
    """Its pid may be another's by the time it is signaled."""
    by_pid: list[int] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, _: by_pid.append(pid))
    child = subprocess.Popen(["sleep", "60"])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(guard_module, "_is_below", lambda *_: False)  # reused meanwhile
            assert guard_module._signal_stray(child.pid, signal.SIGTERM)
        assert child.poll() is None
        assert guard_module._signal_stray(child.pid, signal.SIGTERM)
        assert child.wait(_WAIT_S) == -signal.SIGTERM
        assert guard_module._signal_stray(child.pid, signal.SIGTERM), "it has gone: nothing to do"
    finally:
        if child.poll() is None:
            kill(child.pid, signal.SIGKILL)
        child.wait()
    assert by_pid == []


_LOSES_ITS_GUARD = """
import os, signal
from echelon.errors import LaunchError
from echelon.launcher.node.workers import Workers
workers = Workers()
guard = workers._guard.pid
os.kill(guard, signal.SIGSTOP)
workers.sweep(signal.SIGKILL)
os.kill(guard, signal.SIGKILL)
try:
    workers.events()
except LaunchError as err:
    print(err)
workers.close()
"""


def test_a_guard_that_dies_with_input_unread_is_one_line():
    """In a process of its own: everything below it is killed."""
    done = subprocess.run(
        [sys.executable, "-c", _LOSES_ITS_GUARD],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    assert done.stdout == "the guard process died; all workers were killed\n"


_WITHOUT_ROOM = """
import os, resource
from echelon.launcher.node import guard
print(guard._where_none_can_start())
os.setuid(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
print(guard._where_none_can_start())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="takes another uid: root has no such limit")
def test_a_launcher_that_died_where_no_thread_can_be_started_is_said_to_have():
    argv = [sys.executable, "-c", _WITHOUT_ROOM]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    words = " where no process can be started: Resource temporarily unavailable; raise"
    assert told.splitlines() == ["", f"{words} pids.max or ulimit -u"]
