"""Test the harness itself: a failed rank must never be reported as successful."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.ranks import RanksFailedError, run_ranks


def _identity(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


def _die(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("rank one")


def _hang(rank: int, world_size: int) -> None:
    if rank == 1:
        threading.Event().wait()


@pytest.mark.ranks
def test_results_come_in_rank_order():
    assert run_ranks(_identity, 3) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.ranks
def test_a_killed_rank_fails_the_test_unless_expected():
    with pytest.raises(RanksFailedError, match="rank 1: exit code -9, expected 0"):
        run_ranks(_die, 2)
    assert run_ranks(_die, 2, exit_codes={1: -9}) == [None, None]


@pytest.mark.ranks
def test_a_raising_rank_shows_its_traceback():
    with pytest.raises(RanksFailedError, match="KeyError: 'rank one'"):
        run_ranks(_raise, 2)


@pytest.mark.ranks
def test_a_hung_rank_shows_its_stacks():
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1: still running.*_hang"):
        run_ranks(_hang, 2, timeout_s=1.0)


def _tell_and_hang(rank: int, world_size: int, folder: str) -> None:
    Path(folder, f"{os.getpid()}").touch()
    threading.Event().wait()


_HUNG_TEST = """
import sys
from tests.support.ranks import _context, run_ranks
from tests.support.test_ranks import _tell_and_hang
if __name__ == "__main__":
    _context.set_forkserver_preload([])  # for the sake of time
    run_ranks(_tell_and_hang, 2, sys.argv[1], timeout_s=60)
"""


@pytest.mark.ranks
def test_ranks_go_with_a_test_that_is_killed(tmp_path):
    test = subprocess.Popen(
        [sys.executable, "-c", _HUNG_TEST, str(tmp_path)], cwd=Path(__file__).parents[2]
    )
    try:
        _until(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        test.kill()
        test.wait()
    ranks = [path.name for path in tmp_path.iterdir()]
    _until(lambda: not any(_runs(rank) for rank in ranks))


def _runs(pid: str) -> bool:
    """Return whether a process is running; a zombie is not."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        select.select([], [], [], 0.05)
    raise AssertionError("not within 50 s")
