"""A ring in a temporary folder, its recorder, and programs that record."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echelon.recorder.format.schema import Identity, Record
from echelon.recorder.read import read_ring
from echelon.recorder.write import native
from echelon.recorder.write.operations import operations
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring

NUM_OPERATIONS = 8
NUM_SPANS = 4


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring(
        tmp_path / "ring",
        Identity(rank=3, world_size=8, settings={"recorder_size": NUM_OPERATIONS}),
        num_operations=NUM_OPERATIONS,
        num_spans=NUM_SPANS,
    )
    yield ring
    ring.close()


@pytest.fixture(params=["c", "python", "locked"])
def recorder(
    ring: Ring, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Recorder:
    """Record with each writer of operations: in C, in Python, and in Python under a lock."""
    in_c = request.param == "c"
    monkeypatch.setattr(operations, "has_atomic_steps", lambda: request.param == "python")
    if in_c and not native.available():
        pytest.skip("the C core was not built")
    return Recorder(ring, in_c=in_c)


@pytest.fixture
def look(ring: Ring) -> Callable[[], Record]:
    """Read the ring as another process would: through its file."""
    return lambda: read_ring(ring.path)


class Program:
    """A Python program in a process of its own, with a rank's folder in its environment."""

    def __init__(self, source: str, folder: Path, environ: dict[str, str]) -> None:
        script = folder / "program.py"
        script.write_text(textwrap.dedent(source))
        self.rank_dir = folder / "rank"
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "ECHELON_RANK_DIR": str(self.rank_dir), "RANK": "3", **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def ring(self) -> Path:
        return self.rank_dir / "ring"

    def wait_for(self, line: str) -> None:
        """Read the program's output up to a line."""
        assert self.process.stdout is not None
        seen = []
        for text in self.process.stdout:
            if text.strip() == line:
                return
            seen.append(text)
        raise AssertionError(f"ended without saying {line!r}: {seen} {self.end()}")

    def end(self, timeout_s: float = 600.0) -> tuple[int, str, str]:
        """Let it end by itself; return its exit code and what it said."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Start a program; whatever still runs at the end is killed."""
    started: list[Program] = []

    def start(source: str, **environ: str) -> Program:
        folder = tmp_path / f"program_{len(started)}"
        folder.mkdir()
        started.append(Program(source, folder, environ))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def span_names(record: Record) -> list[str]:
    """Name the ended spans, without the collector's, which come when they please."""
    names = [record.strings[row["name"]] for row in record.spans]
    return [name for name in names if name != "gc"]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until a condition holds; return its value."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)
    return value
