"""The run directory: where everything of a job goes.

    RUN/job.json                                 endpoint and secret, 0600
    RUN/report.json                              how the job ended, written last
    RUN/rank_<r>/attempt_<n>/                    stdout.log, stderr.log, ring, stacks
    RUN/dump/incident_<k>/                       rank_<r>, incident.json, verdict.json, verdict.txt
    RUN/dump/latest -> incident_<k>              the newest complete one

A directory that is there already is used again: attempts and incidents take the next free number
and nothing is overwritten. An incident is collected under a hidden name and renamed when complete.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError

_ATTEMPT = re.compile(r"attempt_(\d+)")
_INCIDENT = re.compile(r"\.?incident_(\d+)(\.partial)?")


class RunDirectory:
    """Paths of one job.

    Raises:
        LaunchError: the directory cannot be made or written.
    """

    def __init__(self, path: Path | None, job_id: str) -> None:
        if path is None:
            stamp = time.strftime("%Y%m%d-%H%M%S")
            path = Path("runs") / f"{stamp}-{job_id or secrets.token_hex(3)}"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as err:
            raise LaunchError(f"--run-dir {path}: {err.strerror}") from err
        if not os.access(path, os.W_OK | os.X_OK):
            raise LaunchError(f"--run-dir {path}: not writable")
        self.shown = path  # as the user knows it
        self.path = path.resolve()

    @property
    def job_file(self) -> Path:
        """The endpoint and the secret."""
        return self.path / "job.json"

    def write_job(self, job: dict[str, Any]) -> None:
        """Write job.json.

        Raises:
            LaunchError: it cannot be written.
        """
        try:
            write_json(self.job_file, job)
        except OSError as err:
            raise LaunchError(f"{self.job_file}: {err.strerror or err}") from err

    def has_job(self, job: Mapping[str, str]) -> bool:
        """Whether the job's file is there already and says at least this."""
        try:
            there = json.loads(self.job_file.read_text())
        except (OSError, ValueError):
            return False
        return isinstance(there, dict) and job.items() <= there.items()

    @property
    def dump(self) -> Path:
        """The folder of incidents."""
        return self.path / "dump"

    def next_attempt(self) -> int:
        """Return the first attempt number that no rank has used."""
        return _next_number(self.path.glob("rank_*/attempt_*"), _ATTEMPT)

    def free_attempt(self, ranks: range, wanted: int) -> int:
        """Return the first attempt number from `wanted` on that none of these ranks has used."""
        number = wanted
        while any(self.rank_dir(rank, number).exists() for rank in ranks):
            number += 1
        return number

    def rank_dir(self, rank: int, attempt: int) -> Path:
        """Return the folder of a rank's attempt."""
        return self.path / f"rank_{rank}" / f"attempt_{attempt}"

    def make_rank_dir(self, rank: int, attempt: int) -> Path:
        """Make the folder of a rank's attempt.

        Raises:
            LaunchError: it cannot be made.
        """
        folder = self.rank_dir(rank, attempt)
        try:
            folder.mkdir(mode=0o700, parents=True)
        except OSError as err:
            raise LaunchError(f"{folder}: {err.strerror or err}") from err
        return folder

    def open_incident(self) -> tuple[int, Path]:
        """Return the next incident's number and the hidden folder to collect it in."""
        self.dump.mkdir(mode=0o700, exist_ok=True)
        number = _next_number(self.dump.iterdir(), _INCIDENT)
        folder = self.dump / f".incident_{number}.partial"
        folder.mkdir(mode=0o700)
        return number, folder

    def complete_incident(self, number: int, folder: Path) -> Path:
        """Show a collected incident under its name, and point `latest` to it."""
        final = self.dump / f"incident_{number}"
        folder.rename(final)
        link = self.dump / ".latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.rename(self.dump / "latest")
        return final


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file of mode 0600, in one step.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    part = path.with_name(f".{path.name}.part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _next_number(paths: Any, pattern: re.Pattern[str]) -> int:
    numbers = [int(match[1]) for path in paths if (match := pattern.fullmatch(path.name))]
    return max(numbers, default=-1) + 1
