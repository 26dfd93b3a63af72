"""Ranks on three hosts: exactly the dead one is named, and a frozen store delays nothing."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.hosts import hosts, needs_hosts, run_text_on

pytestmark = pytest.mark.netns

_PREAMBLE = """
import os, pathlib, signal, sys, time
import numpy as np
import echelon.dist as dist
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from tests.support.moments import lived_s

def caught(call):
    began_s = lived_s()
    try:
        call()
    except CollectiveError as err:
        return err, lived_s() - began_s
    raise AssertionError("no error")
"""


def _run(machines, body: str, exit_codes: list[int]) -> list[str]:
    program = _PREAMBLE + textwrap.dedent(body)
    ends = run_text_on(machines, program, ranks_per_host=1, timeout_s=240)
    story = "\n".join(f"rank {rank}: {one.stderr}" for rank, one in enumerate(ends))
    assert [one.returncode for one in ends] == exit_codes, story
    return [one.stdout for one in ends]


@needs_hosts
@pytest.mark.parametrize(
    ("backend", "step_s"),
    [
        ("gloo", 3.0),
        pytest.param("gloo", 10.0, marks=pytest.mark.slow),
        pytest.param("shm+gloo", 10.0, marks=pytest.mark.slow),
    ],
)
def test_of_three_hosts_the_survivors_name_exactly_the_dead_rank(backend, step_s):
    """Rank 1 is killed while rank 2 computes for longer than the liveness check waits, 1.5 s."""
    pytest.importorskip("torch")
    with hosts(3) as machines:
        _run(
            machines,
            f"""
            world = dist.init({backend!r}, timeout_s=200)  # it loads torch
            world.timeout_s = 60
            x = np.ones(1000)
            world.all_reduce(x)
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == 2:
                time.sleep({step_s})  # a step of its own: not inside any call
            err, took = caught(lambda: world.all_reduce(x))
            assert isinstance(err, PeerLostError), err
            assert err.ranks == (1,), err
            assert "rank 1 died" in str(err) or "for rank 1" in str(err), err
            assert took < 30, took
            dist.shutdown()
            """,
            [0, -9, 0],
        )


@needs_hosts
def test_a_rank_that_computes_is_late_and_not_dead(tmp_path):
    """The others stay until it has asked for its error: one of them hosts the store."""
    pytest.importorskip("torch")
    with hosts(3) as machines:
        _run(
            machines,
            f"""
            world = dist.init("gloo", timeout_s=200)
            x = np.ones(1000)
            world.all_reduce(x)
            world.timeout_s = 1.0
            if world.rank == 2:
                time.sleep(5.0)
            err, took = caught(lambda: world.all_reduce(x))
            assert isinstance(err, CollectiveTimeoutError), err
            assert err.ranks == (2,), err
            assert "not heard from" not in str(err), err
            late = pathlib.Path({str(tmp_path / "late")!r})
            if world.rank == 2:
                late.touch()
            deadline_s = time.monotonic() + 120
            while not late.exists():
                assert time.monotonic() < deadline_s, "rank 2 has not come"
                time.sleep(0.05)
            dist.shutdown()
            """,
            [0, 0, 0],
        )


@needs_hosts
def test_a_frozen_store_delays_neither_a_timeout_nor_an_abort():
    """Rank 0's process hosts the store; rank 1 freezes it, and no rank can be blamed."""
    pytest.importorskip("torch")
    with hosts(3) as machines:
        _run(
            machines,
            """
            from echelon.host.identity import start_ticks

            world = dist.init("gloo", timeout_s=200)
            world.timeout_s = 60
            other = dist.new_group([1, 2])
            pids = world.all_gather_object(os.getpid())
            if world.rank == 0:
                time.sleep(300)  # rank 2 ends it
            if world.rank == 1:
                os.kill(pids[0], signal.SIGSTOP)
                other.timeout_s = 1.0
                err, took = caught(lambda: other.all_reduce(np.ones(1000)))
                assert isinstance(err, CollectiveTimeoutError), err
                assert err.ranks == (), err
                assert "store does not answer" in str(err), err
                assert took < 4, took
            else:
                while start_ticks(pids[1]) is not None:
                    time.sleep(0.05)
            began_s = lived_s()
            world.abort()
            assert lived_s() - began_s < 1.0
            err, _ = caught(world.barrier)
            assert "aborted on rank" in str(err), err
            began_s = lived_s()
            dist.shutdown()
            assert lived_s() - began_s < 4.0
            if world.rank == 2:
                os.kill(pids[0], signal.SIGKILL)
            """,
            [-9, 0, 0],
        )
