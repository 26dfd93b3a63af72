"""A machine that runs short of descriptors, processes or threads: one line, and no hang."""

from __future__ import annotations

import concurrent.futures
import errno
import resource
import subprocess
import sys

import pytest

from echelon.errors import LaunchError
from echelon.launcher.incident import harvest as harvest_module
from echelon.launcher.incident.verdicts import Verdicts
from echelon.launcher.job.report import Incident
from echelon.launcher.job.rundir import RunDirectory
from echelon.launcher.node.workers import Workers
from echelon.launcher.shortage import is_shortage, raise_descriptor_limit
from tests.launcher.coordinator.jobs import JobTerminal


def _refuse(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    ("err", "expected"),
    [
        (OSError(errno.EMFILE, "x"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOENT, "x"), False),
        (RuntimeError("a defect"), False),
    ],
)
def test_what_the_machine_lacks_is_no_defect(err, expected):
    assert is_shortage(err) == expected


@pytest.mark.parametrize(("num_links", "needed"), [(0, 32), (2, 74)])
def test_too_few_descriptors_are_one_line_before_anything_starts(monkeypatch, num_links, needed):
    limits = [(10, needed)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    raise_descriptor_limit(2, num_links)
    assert limits[-1] == (needed, needed), "all that is allowed is used"
    limits[:] = [(needed - 1, needed - 1)]
    with pytest.raises(LaunchError, match=rf"limit is {needed - 1} .* need {needed}$"):
        raise_descriptor_limit(2, num_links)


def test_a_launcher_without_descriptors_ends_with_one_line(tmp_path):
    done = subprocess.run(
        ["prlimit", "--nofile=14:14", sys.executable, "-m", "echelon", "run", "--run-dir",
         str(tmp_path / "run"), "--no-python", "true"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("echelon run: Too many open files: the limit is 14")


def test_a_guard_that_cannot_be_started_is_one_line(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", _refuse)
    with pytest.raises(LaunchError, match="cannot start the guard process: Resource temp"):
        Workers()


def test_without_threads_no_stacks_are_read_from_outside_and_the_harvest_goes_on(monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", refuse)
    looks = [lambda: None] * 2
    assert list(harvest_module._on_threads(looks, 60.0, lambda: False)) == []


def test_an_analysis_that_cannot_be_started_says_why(monkeypatch, tmp_path):
    terminal = JobTerminal()
    verdicts = Verdicts(RunDirectory(tmp_path, ""), terminal, lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", _refuse)
    verdicts.expect(gives_way=True)
    folder = tmp_path / "dump/incident_0"
    folder.mkdir(parents=True)
    incident = Incident(folder=folder, kind="failure", attempt=0, reason="x")
    verdicts.begin(incident, [], is_due=True)
    verdicts.poll()
    assert "no analysis could be started (Resource temporarily unavailable)" in terminal.text
