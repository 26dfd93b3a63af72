"""Analyze an incident with `echelon.analysis` in a separate process.

The analysis of thousands of ranks can take a minute and gigabytes of memory, and can fail. It
therefore runs in a child process with a memory limit and, if requested, a low priority. The child
process is started when the collection of an incident's dumps begins, so that its imports are
complete by the time the collection ends. A restart waits only a few seconds for the result.

    agent -> child   one line of JSON: {incident, shown, columns}
    child -> agent   one JSON object: {report, story, text, file_text, circumstances}

The launcher writes verdict.json and verdict.txt once the verdict has been shown.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.errors import LaunchError
from echelon.launcher.job.rundir import write_json

DEADLINE_S = 180.0
_NICE = 10
_GIVE_WAY = "--give-way"
_LEAST_BYTES = 2 << 30
_UNFOLDED_COLUMNS = 100_000  # the lines of a log are searched, not read on a terminal
_FILE_COLUMNS = 100


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of an incident's analysis."""

    report: dict[str, Any] | None  # None: the analysis failed
    story: dict[str, Any] | None  # what the root cause said last
    text: str  # for the terminal
    file_text: str = ""
    circumstances: dict[str, Any] | None = None  # what a restart depends on

    @property
    def verdict(self) -> dict[str, Any] | None:
        """The finding about the root cause; None if the analysis failed or found none."""
        found = (self.report or {}).get("verdict")
        return found if isinstance(found, dict) else None

    def keep(self, incident: Path, line: str = "") -> None:
        """Write verdict.json and verdict.txt to the incident's folder; append `line` to the latter.

        Raises:
            OSError: the files cannot be written.
        """
        if self.report is not None:
            (incident / "verdict.txt").write_text(self.file_text + line)
            write_json(incident / "verdict.json", self.report)


class Analysis:
    """A child process that waits for one incident, analyzes it, and returns the result.

    Args:
        gives_way: whether running ranks have priority over the analysis. Must be False if the job
            waits for the verdict.

    Raises:
        OSError: the child process cannot be started.
    """

    def __init__(self, *, gives_way: bool) -> None:
        nice = [_GIVE_WAY] if gives_way else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echelon.launcher.incident.explain", *nice],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the agent's to handle
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._answer = b""
        self._shown = Path()
        self._deadline_s = float("inf")

    def begin(self, incident: Path, shown: Path, columns: int | None) -> None:
        """Send an incident to the child process.

        `shown` is the path of the incident as shown to the user.
        """
        self._shown = shown
        self._deadline_s = time.monotonic() + DEADLINE_S
        task = {"incident": str(incident), "shown": str(shown), "columns": columns}
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the child has failed, which its answer will show
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.close()

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when part of the child's answer arrives."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def poll(self) -> Explanation | None:
        """Return the explanation, or None if it is not ready yet.

        If the analysis has failed, the explanation contains the reason.
        """
        try:
            while data := os.read(self.fileno(), 1 << 16):
                self._answer += data
        except BlockingIOError:
            if time.monotonic() < self._deadline_s:
                return None
            return self._failed(f"took longer than {DEADLINE_S:g} s")
        try:
            answer = json.loads(self._answer)
        except ValueError:
            code = self._process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return self._failed(how)
        if "error" in answer:
            return self._failed(f"failed ({answer['error']})")
        return Explanation(**answer)

    def close(self) -> None:
        """Kill the child process if it is still running, and reap it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.kill()
        self._process.wait()

    def _failed(self, how: str) -> Explanation:
        text = (
            f"echelon: the analysis {how}; the black boxes are in {self._shown}; "
            f"run fr-analyze {self._shown}\n"
        )
        return Explanation(None, None, text)


def explain_now(incident: Path, shown: Path, columns: int | None) -> Explanation:
    """Analyze an incident, wait for the result, and write the result to the incident's folder.

    Use this function only after the job has ended.
    """
    try:
        analysis = Analysis(gives_way=False)
    except OSError as err:
        return Explanation(None, None, f"echelon: no analysis can be started: {err.strerror}\n")
    with contextlib.closing(analysis):
        analysis.begin(incident, shown, columns)
        while (explanation := analysis.poll()) is None:
            time.sleep(0.02)
    with contextlib.suppress(OSError):
        explanation.keep(incident)
    return explanation


def _explain(incident: Path, columns: int | None) -> dict[str, Any]:
    """Analyze an incident; return the fields of an `Explanation`."""
    from echelon.analysis import analyze
    from echelon.launcher.incident.circumstances import circumstances, idle_ranks
    from echelon.launcher.incident.story import root_cause_story

    report = analyze(incident)
    answer = report.to_json()
    story = root_cause_story(incident, answer["verdict"])
    culprits = (answer["verdict"] or {}).get("culprit_ranks", [])
    around = circumstances(incident, culprits)
    if around is not None:
        around = replace(around, idle_ranks=idle_ranks(incident, culprits))
    said = "".join(f"{line}\n" for line in (story.lines() if story else []))
    return {
        "report": answer,
        "story": None if story is None else story.to_json(),
        "text": said + _rendered(report, columns or _UNFOLDED_COLUMNS, color=columns is not None),
        "file_text": said + _rendered(report, _FILE_COLUMNS, color=False),
        "circumstances": None if around is None else around.to_json(),
    }


def _rendered(report: Any, columns: int, *, color: bool) -> str:
    from rich.console import Console

    from echelon.analysis import render_text

    out = io.StringIO()
    render_text(report, Console(file=out, width=columns, force_terminal=color))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _limit_memory() -> None:
    """Limit the address space to half of the available memory, or to 2 GiB if that is more."""
    available = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(ln.split()[1]) << 10 for ln in lines if ln.startswith("MemAvailable"))
    limit = max(_LEAST_BYTES, available // 2)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _lower_priority() -> None:
    """Lower this process's priority, so that the ranks take precedence."""
    with contextlib.suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, max(_NICE, now))


def main() -> None:
    """Read one incident from stdin, analyze it, and write the result to stdout."""
    if _GIVE_WAY in sys.argv:
        _lower_priority()
    _limit_memory()
    import rich.console  # noqa: F401 -- while the incident is being collected

    import echelon.analysis
    import echelon.launcher.incident.circumstances
    import echelon.launcher.incident.story  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        return  # nothing was collected
    task = json.loads(line)
    try:
        answer = _explain(Path(task["incident"]), task["columns"])
    except Exception as err:  # noqa: BLE001 -- reported by the agent; the job continues
        message = str(err) if isinstance(err, LaunchError) else f"{type(err).__name__}: {err}"
        answer = {"error": message}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
