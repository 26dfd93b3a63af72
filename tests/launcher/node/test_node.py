"""A node's part of a job, with a guard that starts nothing."""

from __future__ import annotations

import os
import selectors
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from echelon.errors import LaunchError
from echelon.launcher.control import messages as m
from echelon.launcher.incident.worker import Occasion
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node import node as node_module
from echelon.launcher.node.node import NodeAgent
from echelon.launcher.options.options import parse
from echelon.launcher.output.output import Terminal


class _Guard:
    """Starts no worker: its pipes end at once."""

    def __init__(self) -> None:
        self._ends = os.pipe()
        self.environments: list[dict[str, str]] = []
        self.signals: list[tuple[int, int]] = []
        self.told: list[m.Event] = []  # by the node
        self.error = ""  # with which the next spawn fails

    def signal(self, index: int, number: int) -> None:
        self.signals.append((index, number))

    def fileno(self) -> int:
        return self._ends[0]

    def hold(self, folder: str) -> None: ...

    def spawn(
        self, _: int, __: object, env: dict[str, str], *___: object, **____: object
    ) -> tuple[int, int]:
        if self.error:
            raise LaunchError(self.error)
        self.environments.append(env)
        pipes = [os.pipe(), os.pipe()]
        for _, write_end in pipes:
            os.close(write_end)
        return pipes[0][0], pipes[1][0]

    def close(self) -> None:
        for end in self._ends:
            os.close(end)


@pytest.fixture
def node(tmp_path: Path):
    guard, selector = _Guard(), selectors.DefaultSelector()
    options = parse(["--no-python", "true"], {})
    made = NodeAgent(
        options, RunDirectory(tmp_path, ""), guard, selector, guard.told.append, Terminal(),
        lambda _: None,
    )  # fmt: skip
    yield made
    made.close()
    selector.close()
    guard.close()


def _start(attempt: int) -> m.Start:
    return m.Start(
        attempt=attempt, restart=attempt, max_restarts=3, job_id="x", world_size=1, first_rank=0,
        num_workers=1, node_rank=0, num_nodes=1, master_addr="127.0.0.1", master_port=1,
        stall_timeout_ms=60_000, torch_backend="",
    )  # fmt: skip


def test_a_kill_for_memory_counts_only_in_its_own_attempt(node, monkeypatch):
    """Else every later SIGKILL of the job, by hand or by an administrator, is one for memory."""
    kills = iter([3, 4])
    monkeypatch.setattr(node_module, "oom_kills", lambda _: next(kills))
    occasions: list[Occasion] = []

    def no_steps(_: object, occasion: Occasion, *__: object):
        occasions.append(occasion)
        return []
        yield

    monkeypatch.setattr("echelon.launcher.node.examination.harvest_steps", no_steps)
    monkeypatch.setattr("echelon.launcher.node.examination.Examination.send", lambda *_: None)
    for attempt in (0, 1):
        node.start(_start(attempt))
        node.collect(m.Collect(incident=attempt, kind="failure", reason="x"))
    assert [one.oom_kills_before for one in occasions] == [3, 4]


def test_only_the_named_ranks_of_the_present_attempt_are_killed(node):
    node.start(replace(_start(0), world_size=6, first_rank=2, num_workers=1))
    node.kill_ranks(m.KillRanks(attempt=1, ranks=[2]))
    node.kill_ranks(m.KillRanks(attempt=0, ranks=[1, 3]))
    assert node._guard.signals == []
    node.kill_ranks(m.KillRanks(attempt=0, ranks=[2]))
    assert node._guard.signals == [(0, signal.SIGKILL)]


@pytest.mark.parametrize(("hung", "killed_after_s"), [([0, 2], 1.0), ([2], 5.0)])
def test_a_rank_that_hangs_is_killed_before_its_grace_ends(node, monkeypatch, hung, killed_after_s):
    node.start(_start(0))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stop = m.Stop(number=signal.SIGTERM, grace_ms=5000, hung=hung)
    node.stop(cast("m.Stop", m.unpack(m.pack(stop))))
    node._guard.signals.clear()
    now_s += killed_after_s - 0.1
    node.tick()
    assert node._guard.signals == []
    now_s += 0.2
    node.tick()
    assert node._guard.signals == [(0, signal.SIGKILL)]


def test_the_hosting_nodes_choice_on_losses_holds_on_this_node(node):
    node.start(replace(_start(0), on_loss="shrink"))
    (environ,) = node._guard.environments
    assert environ["ECHELON_ON_LOSS"] == "shrink"


def test_a_pipe_that_torch_made_in_a_lost_ranks_folder_is_removed(node, tmp_path):
    node.start(replace(_start(0), on_loss="replace"))
    pipe = Path(node._guard.environments[0]["TORCH_FR_DEBUG_INFO_PIPE_FILE"] + "0.pipe")
    os.mkfifo(pipe)
    (worker,) = node._workers
    worker.exit_code = -signal.SIGKILL
    node.replace(m.Replace(attempt=0, rank=0, epoch=1))
    aside = tmp_path / "rank_0" / "lost_0_of_attempt_0"
    assert (aside / "stderr.log").exists()
    assert not (aside / pipe.name).exists()


@pytest.mark.parametrize("where", ["folder", "process"])
def test_a_process_that_cannot_be_started_in_a_lost_ranks_place_is_reported(
    node, monkeypatch, where
):
    """The disk is full, or no descriptors are left. The lost rank's own end is not forgotten."""
    node.start(replace(_start(0), on_loss="replace"))
    (old,) = node._workers
    old.pid, old.exit_code = 4321, -signal.SIGKILL
    said, why = [], "no space is left"
    monkeypatch.setattr(node, "_say", said.append)

    def fail(*_):
        raise LaunchError(why)

    if where == "folder":
        monkeypatch.setattr(node._directory, "make_rank_dir", fail)
    else:
        node._guard.error = why
    node.replace(m.Replace(attempt=0, rank=0, epoch=1))
    assert node._guard.told == [m.WorkerEnded(attempt=0, rank=0, code=127, error=why)]
    assert not node.has_workers
    assert old.exit_code == -signal.SIGKILL
    assert said == [f"rank 0: {why}"]
