"""The rank after a loop is distinguished from the one inside it by the source of their function."""

from __future__ import annotations

import os

import pytest

from echelon.analysis.evidence.stacks.frames import Frame
from echelon.launcher.attach.loops import find_left, source_of

_SOURCE = """\
def train(loader):
    for epoch in range(2):
        for batch in loader:
            step(batch)
            log()
        evaluate()
    finish()

def step(batch):
    while not batch:
        backward()
    update()

for x in [1]:
    train(x)
save()
"""
_MODULE = Frame("/home/user/train.py", 15, "<module>")


def _train(line: int, *inner: Frame) -> tuple[Frame, ...]:
    return (*inner, Frame("/home/user/train.py", line, "train"), _MODULE)


def _read(rank: int, path: str) -> str:
    return _SOURCE if path == "/home/user/train.py" else ""


def _found(one: tuple[Frame, ...], other: tuple[Frame, ...], source: str = _SOURCE):
    found = find_left({0: one, 1: other}, lambda _rank, _path: source)
    return [(left.rank, left.other, left.first_line) for left in found]


def test_the_rank_behind_the_loop_is_named_with_the_loop():
    backward = Frame("/x/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward")
    found = find_left({0: _train(4, backward), 1: _train(7)}, _read)
    assert [(left.rank, left.other, left.loop) for left in found] == [(1, 0, "train.py:3")]
    assert _found(_train(6), _train(5)) == [(0, 1, 3)], "the innermost that was left"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_train(4), _train(4)),
        (_train(4), _train(5)),  # two lines of one turn, or of two
        (_train(7), _train(7)),
        (_train(4), (_MODULE,)),
        ((), _train(4)),
        (_train(4), (Frame("/home/user/train.py", 11, "step"), *_train(4))),
        (_train(4), (Frame("/home/user/other.py", 7, "train"), _MODULE)),
        (_train(12), _train(4)),  # the source is another: line 12 is not in this function
        ((Frame("/home/user/train.py", 16, "main"), _MODULE), _train(4)),
    ],
)
def test_nothing_is_said_where_no_loop_was_left(one, other):
    assert _found(one, other) == []
    assert _found(other, one) == []


@pytest.mark.parametrize("source", ["", "def train(:\n", "\0", "(" * 100_000, "x = 1\n"])
def test_a_source_that_cannot_be_parsed_or_is_another_says_nothing(source):
    assert _found(_train(4), _train(7), source) == []


def test_a_rank_behind_a_loop_of_the_script_itself():
    one = (Frame("/home/user/train.py", 16, "<module>"),)
    assert _found(one, _train(4)) == [(0, 1, 14)]


def test_a_source_is_read_as_its_process_sees_it(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(_SOURCE)
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "long.py").write_text("#" * (3 << 20))
    monkeypatch.chdir(tmp_path)
    pid = os.getpid()
    assert source_of(pid, str(tmp_path / "train.py")) == source_of(pid, "train.py") == _SOURCE
    for other in ("pipe.py", "long.py", "missing.py", "<string>", "", "a\0b", str(tmp_path)):
        assert source_of(pid, other) == "", other
