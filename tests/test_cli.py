"""The `echelon` command, where what it prints cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon import __version__
from echelon.cli import main

FULL = Path("/dev/full")


def _echelon(*arguments: str, stdout) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *arguments],
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
    )  # fmt: skip


def _commands() -> list[str]:
    shown = _echelon("--help", stdout=subprocess.PIPE).stdout
    return [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]


def test_a_reader_that_has_left_ends_a_command_in_silence():
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        gone.wait(20)
        assert gone.stdin is not None
        done = _echelon("--help", stdout=gone.stdin)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_costs_one_line():
    with FULL.open("w") as full:
        done = _echelon("--help", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "echelon --help: cannot write the output: No space left on device\n"


def test_an_unknown_command_is_told_all_that_there_are():
    done = _echelon("reprot", stdout=subprocess.DEVNULL)
    assert done.returncode == 2
    for command in _commands():
        assert command in done.stderr, done.stderr


def test_every_command_shows_its_version(capsys):
    for command in _commands():
        with pytest.raises(SystemExit) as end:
            main([command, "--version"])
        assert (end.value.code, capsys.readouterr().out) == (0, f"echelon {__version__}\n"), command
