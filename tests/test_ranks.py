"""The harness itself: a rank that breaks must never pass for a good one."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.ranks import RanksFailedError, run_ranks


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
