"""What a node does with its standbys when an attempt starts, and when it may start them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.node import NodeAgent
from echelon.launcher.node.standby.pool import FIRST_STANDBY
from echelon.launcher.node.workers import Exited, Failed, Started
from echelon.launcher.options.options import parse
from echelon.launcher.output.output import Terminal

_CHECK, _STANDBY = FIRST_STANDBY + 1, FIRST_STANDBY + 2


class _Guard:
    """Notes what it is asked for; `news` is what it reports next."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.spawned: list[int] = []
        self.taken: list[tuple[int, int]] = []
        self.signals: list[tuple[int, int]] = []
        self.news: list[object] = []
        self.controls: dict[int, socket.socket] = {}

    def fileno(self) -> int:
        return self._ends[0]

    def hold(self, folder: str) -> None: ...

    def spawn(self, index, *_, control: int = -1, **__) -> tuple[int, int]:
        self.spawned.append(index)
        if control >= 0:
            self.controls[index] = socket.socket(fileno=os.dup(control))
        pipes = [os.pipe(), os.pipe()]
        for _, write_end in pipes:
            os.close(write_end)
        return pipes[0][0], pipes[1][0]

    def take(self, index: int, as_index: int, env: dict[str, str], *, group: str = "") -> None:
        self.taken.append((index, as_index))

    def signal(self, index: int, number: int, *, alone: bool = False) -> None:
        self.signals.append((index, number))

    def events(self) -> list[object]:
        news, self.news = self.news, []
        return news

    def close(self) -> None:
        for control in self.controls.values():
            control.close()
        for end in self._ends:
            os.close(end)


class _Node:
    """A node with one rank and one standby, on a clock that the test moves."""

    def __init__(self, folder, monkeypatch) -> None:
        self.guard, self.now_s, self.told = _Guard(), 1000.0, []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        (folder / "train.py").touch()
        self.selector = selectors.DefaultSelector()
        options = parse(["--standby", "1", str(folder / "train.py")], {})
        self.agent = NodeAgent(
            options, RunDirectory(folder / "run", ""), self.guard, self.selector, self.told.append,
            Terminal(), lambda _: None,
        )  # fmt: skip

    def start(self, attempt: int) -> None:
        command = m.Start(
            attempt=attempt, restart=attempt, max_restarts=3, job_id="x", world_size=1,
            first_rank=0, num_workers=1, node_rank=0, num_nodes=1, master_addr="127.0.0.1",
            master_port=1, stall_timeout_ms=60_000, torch_backend="",
        )  # fmt: skip
        self.agent.start(command)

    def report(self, *news: object) -> None:
        self.guard.news += news
        self.agent._take_news()

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.agent.tick()

    def make_ready(self) -> None:
        """Let a calm node check the interpreter and start a standby, which is then ready."""
        self.agent._prepare_before_start()  # pytest has changed the environment since
        self.after(6.0)
        self.report(Exited(_CHECK, 42, 1))
        self.agent.tick()
        self.report(Started(_STANDBY, 4321))
        told = {"read": [], "tested": [], "hidden": "", "set": ""}
        self.guard.controls[_STANDBY].sendall(json.dumps(told).encode() + b"\n")
        self.selector.unregister(self.guard.fileno())  # which has nothing to read
        for key, _ in self.selector.select(1.0):
            key.data()
        self.selector.register(self.guard.fileno(), selectors.EVENT_READ, None)

    def close(self) -> None:
        self.agent.close()
        self.selector.close()
        self.guard.close()


@pytest.fixture
def node(tmp_path, monkeypatch):
    made = _Node(tmp_path, monkeypatch)
    yield made
    made.close()


def test_a_node_that_waits_for_its_ranks_prepares_standbys(node):
    node.after(4.0)
    assert node.guard.spawned == []
    node.after(2.0)
    assert node.guard.spawned == [_CHECK]


def test_the_start_of_the_ranks_is_not_disturbed(node):
    node.start(0)
    node.report(Started(0, 4321))
    node.after(6.0)
    assert node.guard.spawned == [0]
    node.after(30.0)
    assert node.guard.spawned == [0, _CHECK]


def test_a_rank_starts_from_a_standby_and_gets_its_environment(node, tmp_path):
    node.make_ready()
    node.start(0)
    assert node.guard.taken == [(_STANDBY, 0)]
    assert node.guard.spawned == [_CHECK, _STANDBY], "no other process is started"
    node.report(Started(0, 4321))
    data, (file,), _, _ = socket.recv_fds(node.guard.controls[_STANDBY], 1, 2)
    with os.fdopen(file) as given:
        told = json.loads(os.pread(given.fileno(), 1 << 20, 0))
    assert data == b"!"
    assert told["environ"]["RANK"] == "0"
    assert told["environ"]["ECHELON_RANK_DIR"] == str(tmp_path / "run/rank_0/attempt_0")
    assert "ECHELON_STANDBY" not in told["environ"]


def test_a_rank_whose_standby_has_just_ended_starts_as_usual(node):
    node.make_ready()
    node.start(0)
    node.report(Failed(0, "the standby has ended"))
    assert node.guard.spawned == [_CHECK, _STANDBY, 0]
    node.report(Started(0, 4322))
    node.report(Exited(0, 0, 1))
    assert [one.code for one in node.told if isinstance(one, m.WorkerEnded)] == [0]


def test_a_standby_that_cannot_be_given_its_program_is_killed(node, monkeypatch):
    """The node has no descriptors left; its launcher, and its other ranks, go on."""

    said: list[str] = []

    def fail(*_):
        raise OSError(24, "Too many open files")

    node.make_ready()
    node.start(0)
    monkeypatch.setattr(os, "memfd_create", fail)
    monkeypatch.setattr(node.agent, "_say", said.append)
    node.report(Started(0, 4321))
    assert node.guard.signals == [(0, signal.SIGKILL)]
    assert said == ["rank 0: its standby cannot run the program: Too many open files"]


def test_it_does_not_start_any_more_once_the_attempt_is_stopped(node):
    node.make_ready()
    node.start(0)
    node.agent.stop(m.Stop(number=signal.SIGTERM, grace_ms=1000))
    node.report(Failed(0, "the standby has ended"))
    assert node.guard.spawned == [_CHECK, _STANDBY]
    assert [one.code for one in node.told if isinstance(one, m.WorkerEnded)] == [127]


def test_no_standby_is_prepared_once_all_ranks_have_succeeded(node):
    node.start(0)
    node.report(Started(0, 4321), Exited(0, 0, 1))
    node.after(60.0)
    assert node.guard.spawned == [0]


def test_without_python_there_are_none(capsys):
    options = parse(["--standby", "2", "--no-python", "true"], {})
    assert options.standby == 0
    assert options.notes == (
        "--standby has no effect with --no-python: only Python programs have standbys",
    )
    assert parse(["--no-python", "true"], {"PET_STANDBY": "0"}).notes == ()
