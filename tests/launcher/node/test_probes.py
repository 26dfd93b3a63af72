"""A node's probes between two attempts, polled from its loop."""

from __future__ import annotations

import selectors
import sys
import time

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.doctor.probes.child import COMMAND
from echelon.launcher.doctor.probes.finding import LISTEN, NETWORK, Finding, State, Task
from echelon.launcher.doctor.probes.pair import new_token
from echelon.launcher.node.probes import Probes

pytestmark = pytest.mark.ranks

_LIMIT_S = 60.0
_STOPS = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


class _Loop:
    """A launcher's loop with nothing but its probes."""

    def __init__(self, folder, command=COMMAND):
        self.told: list[m.Event] = []
        self._selector = selectors.DefaultSelector()
        self.probes = Probes(folder, self._selector, self.told.append, command)

    def ask(self, number: int, *tasks: Task) -> list[Finding]:
        """Return the answer to a question."""
        num_told = len(self.told)
        packed = [task.pack() for task in tasks]
        self.probes.begin(m.Probe(number=number, tasks=packed))
        limit_s = time.monotonic() + _LIMIT_S
        while len(self.told) == num_told and time.monotonic() < limit_s:
            until_s = min(self.probes.deadline_s(), limit_s)
            for key, _ in self._selector.select(max(0.0, until_s - time.monotonic())):
                key.data()
            self.probes.tick()
        (answer,) = self.told[num_told:]
        assert isinstance(answer, m.Probed)
        assert answer.number == number
        return [Finding.unpack(text) for text in answer.findings]

    def close(self):
        self.probes.close()
        assert not self._selector.get_map()
        self._selector.close()


@pytest.fixture
def loop(tmp_path):
    made = _Loop(tmp_path)
    yield made
    made.close()


def test_a_disk_is_that_of_the_run_directory_if_none_is_named(loop, tmp_path):
    here, there = loop.ask(1, Task(probe="storage"), Task(probe="storage", folder="/nowhere"))
    assert (here.state, str(tmp_path) in here.text) == (State.WHOLE, True)
    assert there.is_broken
    assert list(tmp_path.iterdir()) == []


def test_a_listener_serves_the_question_after_its_own(loop):
    token = new_token()
    (listens,) = loop.ask(1, Task(probe=LISTEN, token=token))
    port = int(listens.figures["port"])
    (found,) = loop.ask(2, Task(probe=NETWORK, address="127.0.0.1", port=port, token=token))
    assert found.state is State.WHOLE, found
    loop.probes.close()
    (found,) = loop.ask(3, Task(probe=NETWORK, address="127.0.0.1", port=port, token=token))
    assert found.is_broken, found


def test_a_disk_that_hangs_is_broken_and_holds_nothing_up(tmp_path):
    """A process that stops itself stands for one that the kernel holds: neither answers."""
    loop = _Loop(tmp_path, [sys.executable, "-c", _STOPS])
    (found,) = loop.ask(1, Task(probe="storage", deadline_s=1.0))
    loop.close()
    assert found.text == "no answer within 1 s"
    assert found.is_broken


def test_a_listener_ends_at_its_deadline(loop):
    loop.ask(1, Task(probe=LISTEN, token="t", deadline_s=2.0))
    limit_s = time.monotonic() + _LIMIT_S
    while loop.probes.deadline_s() < float("inf") and time.monotonic() < limit_s:
        time.sleep(max(0.0, loop.probes.deadline_s() - time.monotonic()))
        loop.probes.tick()
    assert loop.probes.deadline_s() == float("inf")
