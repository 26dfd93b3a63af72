"""A program whose last save in the background failed does not succeed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from echelon.dist.checkpoint import load

_FULL_DISK = """
import errno, os, sys, threading, torch
import echelon.dist as dist
from echelon.dist.checkpoint import save
path, ending = sys.argv[1:]
if ending != "without a world":
    dist.init()
save(path, {"step": 1})
write = os.write
def full(*args):
    if threading.current_thread().name == "echelon-checkpoint":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(*args)
os.write = full
save(path, {"step": 2, "x": torch.ones(1000)}, async_op=True)
print("trained", flush=False)
if ending == "shutdown":
    try:
        dist.shutdown()
    finally:
        assert not dist.is_initialized()  # it left the world all the same
"""


@pytest.mark.parametrize("ending", ["shutdown", "end of script", "without a world"])
def test_a_failed_last_save_is_a_failed_program(tmp_path, ending):
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, tmp_path / "c", ending],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == "trained\n"
    assert "OSError: [Errno 28] No space left on device" in done.stderr
    assert load(tmp_path / "c", {})["step"] == 1


_REPORTED = """
import os, sys, torch
import echelon.dist as dist
from echelon.dist.checkpoint import save
def full(*args):
    raise OSError(28, "No space left on device")
dist.init()
write, os.write = os.write, full
pending = save(sys.argv[1], {"x": torch.ones(1000)}, async_op=True)
try:
    pending.wait()
except OSError as error:
    print(error)
os.write = write
dist.shutdown()
"""


def test_an_error_that_the_program_has_caught_is_not_raised_again(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _REPORTED, tmp_path / "c"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "No space left" in done.stdout
