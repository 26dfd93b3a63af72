"""A program that leaves its world and joins again, at the same store and in the same attempt."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import CollectiveTimeoutError
from echelon.store import StoreServer, TCPStore
from tests.support.ports import free_port
from tests.support.ranks import run_ranks

_ENGINES = ["native", "python", "gloo", "shm+gloo", "xccl"]
_ROUNDS = 3


def _sum(group: dist.ProcessGroup) -> float:
    x = np.array([group.ranks[group.rank] + 1.0])
    group.all_reduce(x)
    group.barrier()
    return float(x[0])


def _rounds(rank: int, world_size: int, backend: str | None) -> list[list[float]]:
    sums = []
    for _ in range(_ROUNDS):
        world = dist.init(backend, timeout_s=30)
        pair = dist.new_group([2, 0])
        part = world.split(rank // 2, name="part")
        groups = [world, *([pair] if pair else []), part]
        sums.append([_sum(group) for group in groups])
        dist.shutdown()
    return sums


@pytest.mark.ranks
@pytest.mark.parametrize("engine", _ENGINES)
def test_a_world_and_its_groups_can_be_made_again(engine):
    backend = {"native": "shm", "python": "shm"}.get(engine, engine)
    reason = next(status.reason for status in registry.statuses() if status.name == backend)
    if reason:
        pytest.skip(f"{backend} {reason}")
    environ = {"ECHELON_SHM": engine} if backend == "shm" else {}
    found = run_ranks(_rounds, 3, backend, environ=environ, timeout_s=90)
    expected = [[6.0, 4.0, 3.0], [6.0, 3.0], [6.0, 4.0, 3.0]]
    assert found == [[sums] * _ROUNDS for sums in expected]


@pytest.mark.ranks
def test_a_rank_that_hosts_the_store_can_leave_and_join_again():
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    found = run_ranks(_rounds, 3, "shm", environ=environ, store_port=free_port())
    expected = [[6.0, 4.0, 3.0], [6.0, 3.0], [6.0, 4.0, 3.0]]
    assert found == [[sums] * _ROUNDS for sums in expected]


def _vanish(rank: int, world_size: int, backend: str) -> None:
    """Make a world and die in it."""
    world = dist.init(backend, timeout_s=30)
    assert _sum(world) == 6.0
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_joining(rank: int, world_size: int, port: int) -> None:
    def kill_when_joining() -> None:
        with TCPStore("127.0.0.1", port) as store:
            store.wait([f"echelon/none/0/join/came/{rank}"], timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_when_joining, daemon=True).start()
    dist.init("gloo", timeout_s=30)


def _missing(rank: int, world_size: int) -> list[int]:
    with TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=60) as store:
        store.barrier("about to join", 2)  # else the first to come might miss the second
    with pytest.raises(CollectiveTimeoutError, match="missing: 2") as caught:
        dist.init("gloo", timeout_s=4)
    dist.shutdown()
    return list(caught.value.ranks)


@pytest.fixture
def port():
    with StoreServer("127.0.0.1", 0) as server:
        yield server.port


@pytest.mark.ranks
@pytest.mark.parametrize("backend", ["shm", "gloo", "shm+gloo"])
def test_restarted_processes_do_not_meet_what_the_killed_ones_left(backend, port):
    killed = dict.fromkeys(range(3), -signal.SIGKILL)
    run_ranks(_vanish, 3, backend, exit_codes=killed, store_port=port)
    found = run_ranks(_rounds, 3, backend, store_port=port)
    assert [sums[0][0] for sums in found] == [6.0] * 3


@pytest.mark.ranks
def test_a_rank_that_does_not_join_again_is_missed_although_it_was_there_before(port):
    run_ranks(_rounds, 3, "gloo", store_port=port)
    assert run_ranks(_missing, 3, ranks=[0, 1], store_port=port) == [[2], [2]]


@pytest.mark.ranks
def test_a_rank_that_died_while_joining_is_not_counted_as_joined(port):
    killed = {0: -signal.SIGKILL, 2: -signal.SIGKILL}
    run_ranks(_die_while_joining, 3, port, ranks=[0, 2], exit_codes=killed, store_port=port)
    found = run_ranks(_rounds, 3, "gloo", store_port=port)
    assert [sums[0][0] for sums in found] == [6.0] * 3
