"""The location of the checkout, and an environment in which child processes find it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def child_environ(**more: str) -> dict[str, str]:
    """Return the environment plus `more` for a child process that imports `benchmarks`."""
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT), **more}
