"""Manage the run directory, which contains all files of a job.

    RUN/job.json                                 the hosting node's endpoint and secret (0600)
    RUN/job.<node>.json                          another node's copy, until the job ends
    RUN/report.json                              how the job ended, written last
    RUN/goodput.json                             how each rank spent its time
    RUN/rank_<r>/attempt_<n>/                    stdout.log, stderr.log, ring, stacks
    RUN/rank_<r>/lost_<k>_of_attempt_<n>/        the same, for a rank that was lost and replaced
    RUN/dump/incident_<k>/                       rank_<r>, incident.json, verdict.json, verdict.txt
    RUN/dump/latest -> incident_<k>              the newest complete incident

If the directory exists, it is reused. Attempts and incidents get the next free numbers, so their
files are not overwritten. An incident's folder has a hidden name until the incident is complete.
Several nodes can share the directory, so each file is written under a unique name and then renamed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError

ACCOUNT = "goodput.json"
_ATTEMPT = re.compile(r"attempt_(\d+)")
_INCIDENT = re.compile(r"\.?incident_(\d+)(\.partial)?")


class RunDirectory:
    """The run directory of one job on this node.

    Args:
        node: this node's name; "" on the hosting node.

    Raises:
        LaunchError: the directory cannot be created or written.
    """

    def __init__(self, path: Path | None, job_id: str, node: str = "") -> None:
        self._node = node
        if path is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = Path("runs") / f"{stamp}-{job_id or secrets.token_hex(3)}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise LaunchError(f"--run-dir {path}: {err.strerror}") from err
        if not os.access(path, os.W_OK | os.X_OK):
            raise LaunchError(f"--run-dir {path} is not writable")
        self.shown = path  # as the user knows it
        self.path = path.resolve()

    @property
    def job_file(self) -> Path:
        """The file in which this node stores the job's endpoint and secret."""
        return self.path / (f"job.{self._node}.json" if self._node else "job.json")

    @property
    def report_file(self) -> Path:
        """The path of the report on how the job ended."""
        return self.path / "report.json"

    def forget_report(self) -> None:
        """Remove report.json and goodput.json of the previous job."""
        for path in (self.report_file, self.path / ACCOUNT):
            with contextlib.suppress(OSError):
                path.unlink()

    def forget_secret(self, job: dict[str, Any]) -> None:
        """Remove the secret from job.json after the job has ended."""
        with contextlib.suppress(OSError):
            write_json(self.job_file, {k: v for k, v in job.items() if k != "secret"})

    def remove_own_job(self) -> None:
        """Remove this node's job file, unless this is the hosting node."""
        if self._node:
            with contextlib.suppress(OSError):
                self.job_file.unlink()

    def write_job(self, job: dict[str, Any]) -> None:
        """Write job.json.

        Raises:
            LaunchError: the file cannot be written.
        """
        try:
            write_json(self.job_file, job)
        except OSError as err:
            raise LaunchError(f"{self.job_file}: {err.strerror or err}") from err

    @property
    def dump(self) -> Path:
        """The folder that contains the incidents."""
        return self.path / "dump"

    def next_attempt(self) -> int:
        """Return the highest existing attempt number plus one, or 0 if no attempt exists."""
        return _next_number(self.path.glob("rank_*/attempt_*"), _ATTEMPT)

    def free_attempt(self, ranks: range, wanted: int) -> int:
        """Return the lowest attempt number, `wanted` or higher, that none of the ranks has used."""
        number = wanted
        while any(self.rank_dir(rank, number).exists() for rank in ranks):
            number += 1
        return number

    def rank_dir(self, rank: int, attempt: int) -> Path:
        """Return the folder of a rank for one attempt."""
        return self.path / f"rank_{rank}" / f"attempt_{attempt}"

    def make_rank_dir(self, rank: int, attempt: int) -> Path:
        """Create the folder of a rank for one attempt.

        Raises:
            LaunchError: the folder cannot be created.
        """
        folder = self.rank_dir(rank, attempt)
        try:
            folder.mkdir(mode=0o700, parents=True)
        except OSError as err:
            raise LaunchError(f"{folder}: {err.strerror or err}") from err
        return folder

    @staticmethod
    def set_aside(rank_dir: Path) -> Path:
        """Rename a lost rank's folder to `lost_<k>_of_attempt_<n>`; return the new path.

        If the folder cannot be renamed, it is removed.
        """
        number = 0
        while (aside := _aside(rank_dir, number)).exists():
            number += 1
        try:
            return rank_dir.rename(aside)
        except OSError:
            shutil.rmtree(rank_dir, ignore_errors=True)
            return aside

    def open_incident(self) -> tuple[int, Path]:
        """Create a hidden folder for the next incident; return the incident's number and folder.

        Raises:
            OSError: the folder cannot be created.
        """
        self.dump.mkdir(mode=0o700, exist_ok=True)
        number = _next_number(self.dump.iterdir(), _INCIDENT)
        while True:
            folder = self.dump / f".incident_{number}.partial"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:  # another node has just created it
                number += 1
                continue
            return number, folder

    def complete_incident(self, number: int, folder: Path) -> Path:
        """Rename an incident's folder to its final name, using the next free number.

        The incident must be complete. After the rename, the link `latest` points to it.

        Raises:
            OSError: the folder cannot be renamed.
        """
        while True:
            final = self.dump / f"incident_{number}"
            try:
                folder.rename(final)
                break
            except OSError as err:
                if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                number += 1  # another node that shares the directory was faster
        self._point_to(final)
        return final

    def replace_incident(self, folder: Path, former: Path) -> Path:
        """Replace an earlier incident with a newly collected one.

        Raises:
            OSError: the folder cannot be moved.
        """
        aside = self.dump / f".{former.name}.{_unique()}.former"
        former.rename(aside)
        try:
            folder.rename(former)
        except OSError:
            aside.rename(former)
            raise
        shutil.rmtree(aside, ignore_errors=True)
        self._point_to(former)
        return former

    def _point_to(self, incident: Path) -> None:
        link = self.dump / f".latest.{_unique()}"
        link.symlink_to(incident.name)
        link.rename(self.dump / "latest")


def processes_of(run: Path, rank: int, attempt: int) -> list[Path]:
    """Return the folders of a rank's processes in an attempt, the newest process first.

    There are several folders if the rank was lost and replaced.
    """
    newest = run / f"rank_{rank}" / f"attempt_{attempt}"
    lost: list[Path] = []
    while (aside := _aside(newest, len(lost))).exists():
        lost.insert(0, aside)
    return [newest, *lost]


def _aside(rank_dir: Path, number: int) -> Path:
    """Return the path to which the folder of a replaced process is renamed."""
    return rank_dir.with_name(f"lost_{number}_of_{rank_dir.name}")


def write_json(path: Path, value: dict[str, Any], indent: int | None = 1) -> None:
    """Atomically write a JSON file with mode 0600.

    Raises:
        OSError: the file cannot be written. The partial file is removed.
    """
    part = path.with_name(f".{path.name}.{_unique()}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, indent=indent)
            file.write("\n")
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _unique() -> str:
    """Return a name that no other process on any host uses."""
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def _next_number(paths: Any, pattern: re.Pattern[str]) -> int:
    numbers = [int(match[1]) for path in paths if (match := pattern.fullmatch(path.name))]
    return max(numbers, default=-1) + 1
