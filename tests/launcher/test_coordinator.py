"""The coordinator's part of a job, without a process or a socket: messages in, commands out."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from echelon.launcher.control import messages as m
from echelon.launcher.coordinator.coordinator import Coordinator
from echelon.launcher.coordinator.decide import EndedBy
from echelon.launcher.job.report import Report
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.options.options import parse


class _Meeting:
    host, port = "127.0.0.1", 1

    def admit(self, address: str) -> None: ...

    def renew(self) -> None: ...

    def how_it_died(self) -> str:
        return ""


class _Terminal:
    error_columns = None

    def __init__(self) -> None:
        self.text = ""

    def say(self, text: str) -> None:
        self.text += f"{text}\n"

    write_error = say


class _Job:
    """A coordinator with its own node `host` and one node `other`, one rank each."""

    def __init__(self, folder: Path, *argv: str) -> None:
        options = parse(
            [*argv, "--rdzv-endpoint", "127.0.0.1:1", "--no-python", "true"],
            {"ECHELON_SECRET": "a-secret-of-the-tests"},
        )
        self.host, self.other = options.node_name, "other"
        self.report = Report(job_id="x", world_size=0)
        self.terminal = _Terminal()
        self.sent: list[tuple[str, m.Command]] = []
        self.coordinator = Coordinator(
            options, RunDirectory(folder, ""), self.report, _Meeting(),
            lambda node, command: self.sent.append((node, command)), self.terminal,
        )  # fmt: skip
        for name in (self.host, self.other):
            self.take(name, m.Hello(node=name, host=name, num_workers=1))

    def take(self, node: str, event: m.Event) -> None:
        self.coordinator.take(node, event)
        self.coordinator.step()

    def commands(self, kind: type, node: str | None = None) -> list:
        return [c for to, c in self.sent if isinstance(c, kind) and node in (None, to)]

    def end_all(self, *ranks: int) -> None:
        for rank in ranks:
            self.take(self.host if rank == 0 else self.other,
                      m.WorkerEnded(attempt=0, rank=rank, code=0))  # fmt: skip
        for node in (self.host, self.other):
            self.take(node, m.Idle(attempt=0, exit_codes=[], stopped=[]))


@pytest.fixture
def job(tmp_path):
    return _Job(tmp_path, "--nnodes", "2")


def test_a_report_claims_nothing_before_the_end(job):
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.AGENT, 1)
    job.end_all(0, 1)
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.WORKER, 0)
    assert job.report.error == ""


def test_a_rank_that_cannot_be_killed_is_left_behind_and_named(job):
    job.take(job.host, m.StopAsked(number=signal.SIGTERM))
    why = "uninterruptible sleep in nfs_wait"
    job.take(job.other, m.Unkillable(attempt=0, rank=1, why=why))
    job.end_all(0)
    assert job.coordinator.is_over
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.AGENT, 1)
    assert f"rank 1: {why}" in job.report.error
    assert "rank 1 cannot be killed" in job.terminal.text


def test_all_nodes_are_asked_to_stop_and_workers_are_signalled_once_with_their_grace(job):
    for node in (job.other, job.host, job.other):
        job.take(node, m.StopAsked(number=signal.SIGTERM))
    stops = job.commands(m.Stop, job.other)
    assert {(stop.number, stop.grace_ms) for stop in stops} == {(signal.SIGTERM, 10_000)}
    assert job.commands(m.Kill) == []
    job.end_all(0, 1)
    assert (job.report.ended_by, job.report.exit_code) == (EndedBy.SIGNAL, 143)


def test_a_node_of_an_elastic_job_leaves_and_the_world_starts_without_it(tmp_path):
    job = _Job(tmp_path, "--nnodes", "1:2")
    job.take(job.other, m.StopAsked(number=signal.SIGTERM))
    assert [stop.number for stop in job.commands(m.Stop, job.host)] == [signal.SIGTERM]
    job.end_all(0, 1)
    assert [over.exit_code for over in job.commands(m.Over, job.other)] == [143]
    job.coordinator.step()
    starts = job.commands(m.Start, job.host)
    assert [(start.world_size, start.restart) for start in starts] == [(2, 0), (1, 1)]
    assert not job.coordinator.is_over
