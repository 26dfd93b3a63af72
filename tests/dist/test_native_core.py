"""The C core by itself: ranks as threads of one C program (`make check-native` adds sanitizers)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_CHECKS = Path(__file__).parents[1] / "native"
_CORE = Path(__file__).parents[2] / "echelon" / "dist" / "backends" / "shm" / "native"
_FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread"]


def test_collectives_messages_and_endings_between_threads(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    program = tmp_path / "check"
    checks = [_CHECKS / f"{name}.c" for name in ("check", "operations", "endings")]
    sources = [*checks, *(file for file in _CORE.glob("*.c") if file.stem != "module")]
    subprocess.run(
        [compiler, *_FLAGS, f"-I{_CORE}", *sources, "-o", program, "-lm"], check=True, timeout=300
    )
    ran = subprocess.run([program, "10"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "10 rounds on 3 ranks" in ran.stdout
