"""An `echelon run` in the background, and the lines that it has printed so far."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

WAIT_S = 600.0


class Node:
    """One node of a job: `echelon run` with stdout and stderr combined.

    Args:
        before: what precedes `python`, such as a command that enters a namespace.
        environ: added to the environment.
    """

    def __init__(
        self,
        run_dir: Path,
        options: Sequence[str],
        *,
        before: Sequence[str] = (),
        environ: dict[str, str] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False  # its output, and with it the process and its workers
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "echelon", "run", "--run-dir", str(run_dir), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until `text` has been printed in `count` lines."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(text, count) or self._ended, WAIT_S)
            assert self._has(text, count), "\n".join(self.lines)

    def has(self, text: str) -> bool:
        """Return whether `text` has been printed so far."""
        with self._changed:
            return self._has(text, 1)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        try:
            code = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError("it does not end:\n" + "\n".join(self.lines)) from None
        self._reader.join(WAIT_S)
        return code

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.end()
        self.process.stdout.close()

    def _has(self, text: str, count: int) -> bool:
        return sum(text in line for line in self.lines) >= count

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
