"""Backends as plug-ins, and the list of what is ready here and why the rest is not."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.dist.backends.interface import Members
from echelon.dist.backends.shm import backend as shm
from echelon.dist.backends.shm import futex, native
from echelon.errors import CollectiveMismatchError, CollectiveTimeoutError, PeerLostError
from echelon.store import PrefixStore, StoreServer, TCPStore
from tests.dist import contract
from tests.support.ranks import run_ranks

_POINT = importlib.metadata.EntryPoint(
    "store", "tests.dist.example_backend:create", registry.ENTRY_POINTS
)


def _install() -> None:
    registry.entry_points = lambda group: [_POINT] if group == registry.ENTRY_POINTS else []


def _use_plugin(rank: int, world_size: int) -> str:
    _install()
    world = dist.init("store", timeout_s=30)
    for check in (contract.check_all_reduce, contract.check_async, contract.check_objects):
        check(world, contract.Traits(is_slow=True))
    with pytest.raises(ValueError, match="backend 'store' has no scatter"):
        world.scatter(np.zeros(1), np.zeros(world_size) if rank == 0 else None, 0)
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 called .*; rank 1 called"):
        world.all_reduce(np.zeros(1 + rank))
    name = world.backend
    dist.shutdown()
    return name


@pytest.mark.ranks
def test_a_third_party_backend_is_found_by_its_entry_point_and_keeps_the_contract():
    assert run_ranks(_use_plugin, 2, timeout_s=60) == ["store"] * 2


def _miss(rank: int, world_size: int, done: str) -> None:
    _install()
    world = dist.init("store", timeout_s=20)
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="missing: 1"):
            world.barrier(timeout_s=0.5)
        Path(done).touch()
    else:
        while not Path(done).exists():  # alive, and not taking part
            time.sleep(0.01)
    dist.shutdown()


@pytest.mark.ranks
def test_its_timeouts_name_the_missing_rank(tmp_path):
    run_ranks(_miss, 2, str(tmp_path / "done"))


def _left(rank: int, world_size: int) -> None:
    _install()
    world = dist.init("store", timeout_s=20)
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 1"):
            world.barrier()
    dist.shutdown()


@pytest.mark.ranks
def test_a_rank_that_left_is_named_for_it():
    run_ranks(_left, 2)


def test_the_list_has_every_backend_with_ready_or_a_reason():
    done = subprocess.run(
        [sys.executable, "-m", "echelon.dist.backends", "--json"],
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert list(found)[:5] == ["shm", "gloo", "shm+gloo", "xccl", "nccl"]
    assert found["shm"]["ready"]
    for one in found.values():
        assert one["ready"] != bool(one["reason"])
        assert "\n" not in one["reason"]


def test_a_broken_plug_in_is_a_line_in_the_list(monkeypatch):
    point = importlib.metadata.EntryPoint("torn", "no.such.module:create", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [point])
    (torn,) = [status for status in registry.statuses() if status.name == "torn"]
    assert not torn.ready
    assert "ModuleNotFoundError" in torn.reason


@pytest.mark.parametrize("value", ["c", "yes"])
def test_a_bad_engine_name_is_one_clear_error(monkeypatch, value):
    monkeypatch.setenv("ECHELON_SHM", value)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="must be 'python' or 'native'"):
        dist.init("shm")


def test_the_python_engine_of_shm_is_refused_where_loads_may_be_reordered(monkeypatch):
    """It is refused on ARM, for example; the C core is not."""
    monkeypatch.setattr(futex, "STORES_STAY_IN_ORDER", False)
    monkeypatch.setattr(native, "available", lambda: True)
    assert shm.not_ready() == ""
    monkeypatch.setattr(native, "available", lambda: False)
    assert "needs its C core on this processor" in shm.not_ready()
    members = Members(name="world", rank=0, ranks=(0,))
    with StoreServer("127.0.0.1", 0) as server:
        store = TCPStore("127.0.0.1", server.port, timeout=20)
        monkeypatch.setattr(shm, "not_ready", lambda: "")  # the other ranks brought it to this one
        with pytest.raises(ValueError, match="needs its C core on this processor"):
            shm.create(members, PrefixStore("group", store), 5.0)
        store.close()
