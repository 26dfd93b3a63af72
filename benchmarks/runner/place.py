"""Where the checkout lies, and how a script's own processes find it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def child_environ(**more: str) -> dict[str, str]:
    """Return this environment for a program that imports `benchmarks`; `more` is added."""
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT), **more}
