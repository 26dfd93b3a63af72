"""Which standbys are kept, what is done if one is lost, and which ranks may take one."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time

import pytest

from echelon.launcher.node.standby.pool import FIRST_STANDBY, Standbys
from echelon.launcher.node.standby.waiting import Waiting
from echelon.launcher.node.workers import Exited, Failed, Started

_CHECK = FIRST_STANDBY + 1


class _Guard:
    """Notes what it is asked for, and keeps the standbys' ends of their control sockets."""

    def __init__(self) -> None:
        self.spawned: list[tuple[int, tuple[str, ...], dict[str, str]]] = []
        self.killed: list[int] = []
        self.controls: dict[int, socket.socket] = {}

    def spawn(self, index, argv, env, cwd, processors=None, *, control=-1):
        self.spawned.append((index, tuple(argv), dict(env)))
        if control >= 0:
            self.controls[index] = socket.socket(fileno=os.dup(control))
        ends = [os.pipe(), os.pipe()]
        for _, write_end in ends:
            os.close(write_end)
        return ends[0][0], ends[1][0]

    def signal(self, index: int, number: int) -> None:
        assert number == signal.SIGKILL
        self.killed.append(index)


class _Pool:
    """Standbys for two ranks; `now` moves the clock."""

    def __init__(self, monkeypatch, size: int = 2) -> None:
        self.guard, self.lines, self.now_s = _Guard(), [], 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.selector = selectors.DefaultSelector()
        program = ("python", "-u", "train.py")
        self.standbys = Standbys(size, program, self.guard, self.selector, self.lines.append)

    def environ(self, rank: int, **more: str) -> dict[str, str]:
        return {"PATH": "/bin", "RANK": str(rank), "OMP_NUM_THREADS": "1", **more}

    def prepare(self, tmp_path) -> None:
        ranks = [(self.environ(rank), None) for rank in range(2)]
        self.standbys.prepare_for(ranks, tmp_path / "modules.json")

    def check(self, code: int = 42) -> None:
        self.standbys.start_next()
        self.standbys.take_news(Exited(_CHECK, code, 1))

    def start(self) -> int:
        assert self.standbys.wants_more
        self.standbys.start_next()
        index = self.guard.spawned[-1][0]
        self.standbys.take_news(Started(index, 4321))
        return index

    def tell(self, index: int, data: bytes) -> None:
        self.guard.controls[index].sendall(data)
        for key, _ in self.selector.select(1.0):
            key.data()

    def make_ready(self, index: int, *, read=(), tested=(), hidden="", sets="") -> None:
        told = {"read": list(read), "tested": list(tested), "hidden": hidden, "set": sets}
        self.tell(index, json.dumps(told).encode() + b"\n")

    def close(self) -> None:
        self.standbys.close()
        for control in self.guard.controls.values():
            control.close()
        self.selector.close()


@pytest.fixture
def pool(monkeypatch, tmp_path):
    made = _Pool(monkeypatch)
    assert not made.standbys.wants_more, "no attempt has started, so no rank's environment is known"
    made.prepare(tmp_path)
    yield made
    made.close()


def test_they_start_one_after_another_each_for_another_rank(pool):
    pool.check()
    first = pool.start()
    assert not pool.standbys.wants_more, "the first one still loads"
    pool.make_ready(first)
    second = pool.start()
    assert pool.lines == []
    pool.make_ready(second)
    assert not pool.standbys.wants_more
    assert [env["RANK"] for _, _, env in pool.guard.spawned[1:]] == ["0", "1"]
    assert pool.lines == ["2 standbys are ready; 0 MiB of private memory each"]


def test_the_interpreter_is_checked_first_so_that_no_standby_runs_the_script(pool):
    pool.standbys.start_next()
    (_, argv, env) = pool.guard.spawned[0]
    assert argv[:3] == ("python", "-u", "-c")
    assert env["ECHELON_STANDBY"] == "check"
    assert not pool.standbys.wants_more, "it waits for the check"
    pool.standbys.take_news(Exited(_CHECK, 1, 1))
    (line,) = pool.lines
    assert line == "--standby has no effect: python does not import sitecustomize from PYTHONPATH"
    assert not pool.standbys.wants_more


@pytest.mark.parametrize(
    ("differs", "read", "tested", "fits"),
    [
        ({}, (), (), True),
        ({"RANK": "1"}, (), (), True),
        ({"RANK": "1"}, ("RANK",), (), False),
        ({"RANK": "1"}, (), ("RANK",), True),
        ({"ECHELON_RESUME": "/gpt"}, (), ("ECHELON_RESUME",), False),
        ({"OMP_NUM_THREADS": "2"}, (), (), False),
        ({"CUDA_VISIBLE_DEVICES": "1"}, (), (), False),
    ],
)
def test_a_rank_takes_it_only_if_nothing_differs_that_an_import_has_read(
    pool, differs, read, tested, fits
):
    pool.check()
    pool.make_ready(pool.start(), read=read, tested=tested)
    taken = pool.standbys.take({**pool.environ(0), **differs}, None)
    assert (taken is not None) == fits
    if taken is not None:
        assert pool.standbys.take(pool.environ(0), None) is None, "it was the only one"
        taken.close()


def test_a_rank_bound_to_other_processors_does_not_take_it(pool):
    pool.check()
    pool.make_ready(pool.start())
    assert pool.standbys.take(pool.environ(0), frozenset({0})) is None


def test_a_rank_prefers_the_one_that_was_started_for_it(pool):
    pool.check()
    for _ in range(2):
        pool.make_ready(pool.start())
    for rank in (1, 0):
        taken = pool.standbys.take(pool.environ(rank), None)
        assert taken.rank == str(rank)
        taken.close()


def test_one_that_still_loads_is_not_taken(pool):
    pool.check()
    index = pool.start()
    assert pool.standbys.take(pool.environ(0), None) is None
    pool.make_ready(index)
    taken = pool.standbys.take(pool.environ(0), None)
    assert taken is not None
    taken.close()


def test_those_that_fit_no_rank_of_the_new_attempt_are_ended(pool, tmp_path):
    pool.check()
    index = pool.start()
    pool.make_ready(index)
    other = [(pool.environ(0, ECHELON_TORCH_BACKEND="echelon"), None)]
    pool.standbys.prepare_for(other, tmp_path / "modules.json")
    assert pool.guard.killed == [index]
    assert pool.standbys.wants_more
    assert pool.lines == []


def test_one_that_ends_is_reported_and_replaced_after_a_pause_and_at_most_so_often(pool):
    pool.check()
    for pause_s, code, how in (
        (2, -9, "was killed by SIGKILL while it waited"),
        (4, 1, "exited with code 1 while it loaded its libraries"),
        (8, -11, "was killed by SIGSEGV while it loaded its libraries"),
    ):
        index = pool.start()
        if "waited" in how:
            pool.make_ready(index)
        pool.standbys.take_news(Exited(index, code, 1))
        assert pool.lines[-1] == f"a standby {how}; another one is started after {pause_s} s"
        pool.now_s += pause_s - 0.1
        assert not pool.standbys.wants_more
        pool.now_s += 0.2
    index = pool.start()
    pool.standbys.take_news(Failed(index, "cannot start a process"))
    assert pool.lines[-1] == (
        "a standby could not start: cannot start a process; no more standbys after 4 such failures"
    )
    pool.now_s += 1000.0
    assert not pool.standbys.wants_more


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"hidden": "/me/numpy.py"}, "/me/numpy.py hides a library that standbys load"),
        ({"sets": "X"}, "the program sets X, which libraries read when they are loaded"),
    ],
)
def test_a_program_that_loads_its_libraries_otherwise_ends_them_all(pool, told, why):
    pool.check()
    first = pool.start()
    pool.make_ready(first, **told)
    assert pool.guard.killed == [first]
    assert pool.lines == [f"--standby has no effect: {why}"]
    assert not pool.standbys.wants_more


@pytest.mark.parametrize("data", [b"{}\n", b"nonsense\n", b'{"read": 3}\n'])
def test_one_that_reports_nonsense_is_ended(pool, data):
    pool.check()
    index = pool.start()
    pool.tell(index, data)
    assert pool.guard.killed == [index]
    assert pool.standbys.take(pool.environ(0), None) is None


def test_one_that_loads_for_too_long_is_raised_then_given_up(pool, monkeypatch):
    raised = []
    monkeypatch.setattr(Waiting, "raise_priority", lambda one: raised.append(one.index))
    pool.check()
    index = pool.start()
    pool.now_s += 9.0
    pool.standbys.tick()
    assert raised == []
    pool.now_s += 2.0
    pool.standbys.tick()
    assert raised == [index]
    pool.now_s += 300.0
    pool.standbys.tick()
    assert pool.guard.killed == [index]
    assert "was not ready after 300 s and was killed" in pool.lines[0]


def test_news_of_one_that_a_rank_has_taken_are_not_the_pools(pool):
    pool.check()
    index = pool.start()
    pool.make_ready(index)
    taken = pool.standbys.take(pool.environ(0), None)
    pool.standbys.take_news(Exited(index, -9, 1))
    assert pool.lines == []
    taken.close()
