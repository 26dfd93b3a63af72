"""Run this node's probes between two attempts, without blocking the agent's loop.

A listener runs until its deadline, so that the node at the other end has time to measure the link.
All probes end before the next attempt.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.launcher.control import messages as m
from echelon.launcher.doctor.probes.child import COMMAND, Child
from echelon.launcher.doctor.probes.finding import LISTEN, STORAGE, Finding, Task


class Probes:
    """The probes that the coordinator has requested from this node.

    Args:
        folder: this node's run directory, which is the default folder for storage probes.
        command: the command that runs a probe.
    """

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        tell: Callable[[m.Event], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._folder = str(folder)
        self._selector = selector
        self._tell = tell
        self._command = command
        self._number = -1  # of the present question; -1: it is answered
        self._children: list[Child] = []
        self._listeners: list[Child] = []

    def begin(self, command: m.Probe) -> None:
        """Start the requested probes, which replace any earlier probes."""
        self._end(self._children)
        self._number = command.number
        self._children = [Child(self._placed(text), self._command) for text in command.tasks]
        for child in self._children:
            if child.fileno() >= 0:
                self._selector.register(child.fileno(), selectors.EVENT_READ, self.tick)
        self.tick()

    def deadline_s(self) -> float:
        """Return the time by which `tick` must be called."""
        waiting = self._children if self._number >= 0 else []
        return min((child.due_s for child in [*waiting, *self._listeners]), default=float("inf"))

    def tick(self) -> None:
        """Send the findings once all probes have answered; end listeners past their deadlines."""
        late = [one for one in self._listeners if time.monotonic() >= one.due_s]
        self._end(late)
        self._listeners = [one for one in self._listeners if one not in late]
        if self._number < 0:
            return
        found: list[Finding] = []
        for child in self._children:
            one = child.poll()
            if one is not None:
                self._forget(child)
                found.append(one)
        if len(found) < len(self._children):
            return
        packed = [one.pack() for one in found]
        self._tell(m.Probed(number=self._number, findings=packed))
        self._number = -1
        self._listeners += [one for one in self._children if one.task.probe == LISTEN]
        self._end([one for one in self._children if one.task.probe != LISTEN])
        self._children = []

    def close(self) -> None:
        """Stop all running probes and listeners."""
        self._number = -1
        self._end(self._children)
        self._end(self._listeners)
        self._children, self._listeners = [], []

    def _placed(self, text: str) -> Task:
        try:
            task = Task.unpack(text)
        except ValueError:
            task = Task(probe="unknown")  # of a newer coordinator: it says that it was not checked
        needs_folder = task.probe == STORAGE and not task.folder
        return replace(task, folder=self._folder) if needs_folder else task

    def _end(self, children: list[Child]) -> None:
        for child in children:
            self._forget(child)
            child.close()

    def _forget(self, child: Child) -> None:
        if child.fileno() >= 0 and child.fileno() in self._selector.get_map():
            self._selector.unregister(child.fileno())
