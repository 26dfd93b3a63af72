"""How a world comes to be and what it leaves: environments, stores, forks, descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist import runtime
from echelon.dist.membership.environment import Rendezvous
from tests.support.ports import free_port
from tests.support.ranks import run_ranks


def test_without_a_launcher_there_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    world = dist.init()
    try:
        assert dist.is_initialized()
        assert (world.rank, world.size, world.ranks) == (0, 1, (0,))
        x = np.arange(3.0)
        world.all_reduce(x)
        assert x.tolist() == [0, 1, 2]
        assert dist.world() is world
        with pytest.raises(ValueError, match="init was already called"):
            dist.init()
    finally:
        dist.shutdown()
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match=r"call echelon\.dist\.init"):
        dist.world()
    with pytest.raises(ValueError, match="shut down"):
        world.barrier()
    dist.shutdown()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0"}, "^WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "^RANK is not set"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be >= 0 and less than WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
    ],
)
def test_a_broken_environment_is_named(monkeypatch, variables, said):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=said):
        Rendezvous.from_environment()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "carrier pigeon"}, "carrier pigeon"),
        ({"timeout_s": 0}, "above 0"),
        ({"timeout_s": None}, "got None"),
        ({"timeout_s": "5"}, "got '5'"),
        ({"reduction": "sloppy"}, "reduction 'sloppy'"),
    ],
)
def test_bad_options_are_value_errors(monkeypatch, options, said):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=said):
        dist.init(**options)
    dist.shutdown()


def _sum(rank: int, world_size: int) -> float:
    world = dist.init(timeout_s=30)
    x = np.array([rank + 1.0])
    world.all_reduce(x)
    world.barrier()
    dist.shutdown()
    return float(x[0])


def test_a_worlds_timeout_is_that_of_its_groups_unless_the_program_chose_another():
    dist.init(timeout_s=30)
    try:
        own = dist.new_group([0])
        own.timeout_s = 5
        runtime.set_timeout(60.0)
        later = dist.new_group([0])
        assert [one.timeout_s for one in (dist.world(), own, later)] == [60, 5, 60]
        runtime.set_timeout(30.0)
        assert [one.timeout_s for one in (dist.world(), own, later)] == [30, 5, 30]
    finally:
        dist.shutdown()


@pytest.mark.ranks
def test_under_plain_torchrun_variables_rank_0_hosts_the_store():
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert run_ranks(_sum, 2, environ=environ, store_port=free_port()) == [3.0, 3.0]


@pytest.mark.ranks
def test_a_world_meets_on_torchs_own_store():
    torch_dist = pytest.importorskip("torch.distributed")
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(_sum, 3, store_port=server.port) == [6.0] * 3


@pytest.mark.ranks
def test_torchrun_itself_starts_a_world(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np, echelon.dist as dist\n"
        "world = dist.init(timeout_s=60)\n"
        "x = np.ones(2); world.all_reduce(x)\n"
        "import os; os.write(1, f'sum {x.tolist()}\\n'.encode()); dist.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [2.0, 2.0]") == 2


def _groups(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    even = dist.new_group([0, 2], name="even")
    turned = dist.new_group([3, 1])
    x = np.array([float(rank)])
    if rank in (0, 2):
        assert turned is None
        assert (even.name, even.ranks, even.rank) == ("even", (0, 2), rank // 2)
        even.all_reduce(x)
        assert x[0] == 2
    else:
        assert even is None
        assert (turned.ranks, turned.rank) == ((3, 1), 0 if rank == 3 else 1)
        turned.broadcast(x, 0)
        assert x[0] == 3
    with pytest.raises(ValueError, match="twice"):
        dist.new_group([0, 0])
    with pytest.raises(ValueError, match="not in the world"):
        dist.new_group([0, 4])
    with pytest.raises(ValueError, match="at least one"):
        dist.new_group([])
    world.barrier()
    dist.shutdown()


@pytest.mark.ranks
def test_new_groups_hold_the_ranks_asked_for_in_that_order():
    run_ranks(_groups, 4)


def _fork(rank: int, world_size: int) -> None:
    world = dist.init(timeout_s=30)
    work = world.all_reduce(np.ones(4), async_op=True)
    work.wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not dist.is_initialized()
            for call in (world.barrier, dist.world, dist.init):
                with pytest.raises(ValueError, match="fork"):
                    call()
            dist.shutdown()  # what its exit handlers would do: nothing to the parent's group
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    x = np.ones(1000)
    world.all_reduce(x)
    assert (x == world_size).all()
    dist.shutdown()


@pytest.mark.ranks
def test_a_forked_child_cannot_join_and_does_its_parent_no_harm():
    run_ranks(_fork, 2)


def _descriptors() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name} {fd.readlink()}")
        except OSError:
            continue  # the listing's own
    return found


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("echelon-shm")


def _come_and_go(rank: int, world_size: int) -> None:
    dist.init(timeout_s=30)
    dist.shutdown()  # first use opens what belongs to the process, such as libraries
    before, threads = _descriptors(), set(threading.enumerate())
    for _ in range(3):
        world = dist.init(timeout_s=30)
        group = dist.new_group(range(world_size))
        works = [g.all_reduce(np.ones(100_000), async_op=True) for g in (world, group)]
        for work in works:
            work.wait()
        del works, work
        world.barrier()
        dist.shutdown()
    assert _descriptors() == before
    assert set(threading.enumerate()) == threads
    assert _mappings() == 0


@pytest.mark.ranks
def test_shutdown_gives_everything_back():
    run_ranks(_come_and_go, 2)
