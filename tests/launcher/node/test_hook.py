"""The user's command before a restart: what it receives, and what it may do to the job."""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from pathlib import Path

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.hook import FIRST_INDEX, environment
from echelon.launcher.node.node import NodeAgent
from echelon.launcher.node.workers import Exited, Failed, Swept
from echelon.launcher.options.options import parse


class _Guard:
    """Notes what it is asked for; `news` is what it reports next."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.spawned: list[int] = []
        self.signals: list[tuple[int, int]] = []
        self.said = b""
        self.news: list[object] = []

    def fileno(self) -> int:
        return self._ends[0]

    def hold(self, folder: str) -> None: ...

    def spawn(self, index: int, *_: object, **__: object) -> tuple[int, int]:
        self.spawned.append(index)
        pipes = [os.pipe(), os.pipe()]
        if index >= FIRST_INDEX:
            os.write(pipes[0][1], self.said)
        for _, write_end in pipes:
            os.close(write_end)
        return pipes[0][0], pipes[1][0]

    def signal(self, index: int, number: int, *, alone: bool = False) -> None:
        self.signals.append((index, number))

    def sweep(self, number: int) -> None:
        self.news.append(Swept(0, []))

    def events(self) -> list[object]:
        news, self.news = self.news, []
        return news

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


class _Terminal:
    columns = None
    deadline_s = None

    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> None:
        self.text += f"{text}\n"

    def tick(self) -> None: ...

    def end_live(self) -> None: ...


class _Node:
    """A node of two ranks whose second attempt has begun."""

    def __init__(self, folder: Path, said: bytes = b"") -> None:
        self.guard, self.terminal = _Guard(), _Terminal()
        self.guard.said = said
        self.told: list[m.Event] = []
        self.selector = selectors.DefaultSelector()
        argv = ["--nproc-per-node", "2", "--before-restart", "clean", "--no-python", "true"]
        self.agent = NodeAgent(
            parse(argv, {}), RunDirectory(folder, ""), self.guard, self.selector, self.told.append,
            self.terminal, lambda _: self.agent._take_news(),
        )  # fmt: skip
        self.agent.start(_start(1))

    def report(self, *news: object) -> None:
        self.guard.news += news
        self.agent._take_news()

    def close(self) -> None:
        self.agent.close()
        self.selector.close()
        self.guard.close()


@pytest.fixture
def node(tmp_path):
    made = _Node(tmp_path, b"cleaned up\nhalf a line")
    yield made
    made.close()


def _start(attempt: int, history: str = "", resume: str = "") -> m.Start:
    return m.Start(
        attempt=attempt, restart=attempt, max_restarts=3, job_id="x", world_size=2, first_rank=0,
        num_workers=2, node_rank=0, num_nodes=1, master_addr="127.0.0.1", master_port=1,
        stall_timeout_ms=60_000, torch_backend="", history=history, resume=resume,
    )  # fmt: skip


_HOOK = FIRST_INDEX + 1


def test_workers_start_once_the_command_has_ended(node):
    assert node.guard.spawned == [_HOOK]
    node.report(Exited(_HOOK, 0, 1))
    assert node.guard.spawned == [_HOOK, 0, 1]
    assert node.terminal.text == "before-restart: cleaned up\nbefore-restart: half a line\n"


@pytest.mark.parametrize(
    ("news", "line"),
    [
        (Exited(_HOOK, 3, 1), "--before-restart exited with code 3"),
        (Exited(_HOOK, -9, 1), "--before-restart was killed by SIGKILL"),
        (Failed(_HOOK, "cannot start a process"), "--before-restart cannot start a process"),
    ],
)
def test_a_command_that_fails_is_reported_and_the_workers_start(node, news, line):
    node.report(news)
    assert node.guard.spawned == [_HOOK, 0, 1]
    assert f"{line}; the workers start anyway" in node.terminal.text


def test_a_command_that_takes_too_long_is_killed(node, monkeypatch):
    now_s = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    node.agent.tick()
    assert node.guard.signals == [(_HOOK, signal.SIGKILL)]
    assert node.agent.deadline_s() == now_s + 5.0
    node.report(Exited(_HOOK, -9, 1))
    assert "took longer than 60 s and was killed" in node.terminal.text
    assert node.guard.spawned == [_HOOK, 0, 1]


def test_a_command_that_cannot_be_killed_is_left_behind(node, monkeypatch):
    now_s = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    node.agent.tick()
    now_s += 5.0
    node.agent.tick()
    assert node.guard.spawned == [_HOOK, 0, 1]


def test_a_stop_in_between_ends_the_attempt_before_it_has_begun(node):
    node.agent.stop(m.Stop(number=signal.SIGTERM, grace_ms=1000))
    assert (_HOOK, signal.SIGKILL) in node.guard.signals
    ended = [(one.rank, one.code) for one in node.told if isinstance(one, m.WorkerEnded)]
    assert ended == [(0, -signal.SIGTERM), (1, -signal.SIGTERM)]
    node.report(Exited(_HOOK, -9, 1))
    assert node.guard.spawned == [_HOOK], "no worker starts after the stop"
    node.agent.clear_up()
    (idle,) = [one for one in node.told if isinstance(one, m.Idle)]
    assert idle.stopped == [0, 1]
    node.agent.start(_start(2))
    node.report(Exited(_HOOK, -9, 1))  # of the attempt before, late
    assert node.guard.spawned == [_HOOK, FIRST_INDEX + 2]


def test_the_first_attempt_runs_no_command(tmp_path):
    node = _Node(tmp_path)
    try:
        node.agent.stop(m.Stop(number=signal.SIGTERM, grace_ms=1000))
        node.agent.clear_up()
        node.agent.start(_start(0))
        assert node.guard.spawned == [_HOOK, 0, 1]
    finally:
        node.close()


def test_what_the_command_is_told():
    decision = {"cause": "dead_process", "reason": "r", "culprit_ranks": [2, 3], "hosts": ["a"]}
    history = json.dumps({"attempts": [{"cause": "exception"}, decision]})
    base = {"PATH": "/bin", "ECHELON_SECRET": "s"}
    env = environment(base, _start(2, history, "/gpt"))
    assert env == {
        "PATH": "/bin", "ECHELON_CAUSE": "dead_process", "ECHELON_REASON": "r",
        "ECHELON_CULPRIT_RANKS": "2,3", "ECHELON_CULPRIT_HOSTS": "a", "ECHELON_ATTEMPT": "2",
        "ECHELON_JOB_ID": "x", "GROUP_RANK": "0", "ECHELON_RESUME": "/gpt",
    }  # fmt: skip
    for history in ("", "[]", '{"attempts": []}', '{"attempts": [3]}'):
        assert environment(base, _start(2, history))["ECHELON_CAUSE"] == ""
