"""A job's coordinator without a process or a socket: messages in, commands out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.coordinator import Coordinator
from echelon.launcher.coordinator.observers import Happening, Observers
from echelon.launcher.doctor.probes.finding import Finding, State, Task
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.options.options import parse


class JobStore:
    """A store that does nothing; `death`: how it ended."""

    host, port = "127.0.0.1", 1
    death = ""

    def admit(self, address: str) -> None: ...

    def publish(self, key: str, value: str) -> None: ...

    def post(self, folder: str, value: str) -> None: ...

    def has(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)

    def renew(self) -> None: ...

    def how_it_died(self) -> str:
        return self.death


class JobTerminal:
    """Keeps what is printed."""

    error_columns = None

    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> None:
        self.text += f"{text}\n"

    write_error = say


class Job:
    """A coordinator with its own node `host` and one node `other`, `nproc` ranks each."""

    def __init__(
        self,
        folder: Path,
        *argv: str,
        nproc: int = 1,
        store: JobStore | None = None,
        endpoint: str = "127.0.0.1:1",  # "": on one node
        succession: Any = None,
    ) -> None:
        meeting = ["--rdzv-endpoint", endpoint] if endpoint else []
        self.options = parse(
            [*argv, *meeting, "--no-python", "true"],
            {"ECHELON_SECRET": "a-secret-of-the-tests"},
        )
        self.host, self.other = self.options.node_name, "other"
        self.report = Report(job_id="x", world_size=0)
        self.terminal = JobTerminal()
        self._answered: set[int] = set()
        self.sent: list[tuple[str, m.Command]] = []
        self.happened: list[Happening] = []
        self.coordinator = Coordinator(
            self.options, RunDirectory(folder, ""), self.report, store or JobStore(),
            lambda node, command: self.sent.append((node, command)), self.terminal,
            succession, Observers(self.terminal.say, [self.happened.append]),
        )  # fmt: skip
        for name in (self.host, self.other) if endpoint else (self.host,):
            self.take(name, m.Hello(node=name, host=name, num_workers=nproc))

    def take(self, node: str, event: m.Event) -> None:
        self.coordinator.take(node, event)
        self.step()

    def step(self) -> None:
        """Carry out what is due."""
        self.coordinator.step()
        self.answer_probes()

    def answer_probes(self) -> None:
        """Let each node answer that what it was asked to check is whole."""
        for node, command in list(self.sent):
            if isinstance(command, m.Probe) and command.number not in self._answered:
                self._answered.add(command.number)
                tasks = [Task.unpack(text) for text in command.tasks]
                found = [Finding(probe=t.probe, state=State.WHOLE, text="").pack() for t in tasks]
                self.take(node, m.Probed(number=command.number, findings=found))

    def look(self) -> None:
        """Let the next look at the ranks be due now."""
        self.coordinator._next_look_s = 0.0
        self.coordinator.step()
        self.answer_probes()

    def commands(self, kind: type, node: str | None = None) -> list:
        return [c for to, c in self.sent if isinstance(c, kind) and node in (None, to)]

    def end_all(self, *ranks: int) -> None:
        for rank in ranks:
            self.take(self.host if rank == 0 else self.other,
                      m.WorkerEnded(attempt=0, rank=rank, code=0))  # fmt: skip
        for node in (self.host, self.other):
            self.take(node, m.Idle(attempt=0, exit_codes=[], stopped=[]))
