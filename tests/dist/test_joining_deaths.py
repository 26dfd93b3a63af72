"""Members that die while a group is being made: the others name them, long before the timeout."""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any

import pytest

import echelon.dist as dist
from echelon.dist.backends import registry
from echelon.errors import PeerLostError
from tests.support.moments import lived_s
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

_NOTICE_S = (
    20.0  # the members look after each other once per second; the rest is for a busy machine
)


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(module: str, path: str, key: str | None = None) -> None:
    """Have this rank die where it would call a function; with `key`, for that key of the store."""
    owner: Any = importlib.import_module(f"echelon.dist.backends.{module}")
    *parts, name = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def call(*arguments: Any, **others: Any) -> Any:
        if key is None or key in arguments:
            _die()
        return real(*arguments, **others)

    setattr(owner, name, call)


def _die_after_publishing_an_address() -> None:
    bridge = importlib.import_module("echelon.dist.backends.gloo.transport")._Bridge
    publish = bridge.set

    def publish_and_die(*arguments: Any) -> None:
        publish(*arguments)
        arguments[0]._store.check(["sent before"])  # a write that was not confirmed yet arrives
        _die()

    bridge.set = publish_and_die


_DEATHS = {
    "facts": lambda: _die_at("shm.rendezvous", "exchange", "facts"),
    "descriptor": lambda: _die_at("shm.rendezvous", "receive"),
    "marks": lambda: _die_at("shm.rendezvous", "exchange", "marks"),
    "levels": lambda: _die_at("two_level", "exchange", "levels"),
    "messages": lambda: _die_at("gloo.backend", "exchange", "messages"),
    "before the mesh": lambda: _die_at("gloo.transport", "Transport.__init__"),
    "in the mesh": _die_after_publishing_an_address,
}


def _lose_partner(rank: int, world_size: int, backend: str, deaths: list[str]) -> None:
    """Ranks 0, 1 and 2, 3 and so on each make a pair, whose second rank dies on the way."""
    dist.init(backend, timeout_s=600)
    first = rank - rank % 2
    if rank != first:
        _DEATHS[deaths[rank // 2]]()
    began_s = lived_s()
    with pytest.raises(PeerLostError, match=f"rank {rank + 1} ") as caught:
        _make_pairs(world_size)
    assert caught.value.ranks == (rank + 1,)
    assert lived_s() - began_s < _NOTICE_S
    dist.shutdown()


def _make_pairs(world_size: int) -> None:
    for start in range(0, world_size, 2):
        pair = dist.new_group([start, start + 1], name=f"pair {start}")
        if pair is not None:
            pair.barrier()  # Gloo may connect only then


@pytest.mark.parametrize(
    ("backend", "deaths"),
    [
        ("shm", ["facts", "descriptor", "marks"]),
        ("gloo", ["messages", "before the mesh", "in the mesh"]),
        ("shm+gloo", ["levels"]),
    ],
)
def test_a_member_that_dies_while_a_group_is_made_is_named(backend, deaths):
    reason = next(status.reason for status in registry.statuses() if status.name == backend)
    if reason:
        pytest.skip(reason)
    size = 2 * len(deaths)
    codes = dict.fromkeys(range(1, size, 2), -signal.SIGKILL)
    run_ranks(_lose_partner, size, backend, deaths, exit_codes=codes, timeout_s=60)


def _lose_the_drawing_rank(rank: int, world_size: int) -> None:
    dist.init("xccl", timeout_s=600)
    if rank == 0:
        _die_at("xccl.library", "unique_id")
    with pytest.raises(PeerLostError, match="rank 0 ") as caught:
        dist.new_group([0, 1])
    assert caught.value.ranks == (0,)
    os._exit(7)  # the world's library waits for its members when it is released


def test_over_oneccl_the_rank_that_draws_the_id_is_named_too():
    reason = next(status.reason for status in registry.statuses() if status.name == "xccl")
    if reason:
        pytest.skip(reason)
    run_ranks(_lose_the_drawing_rank, 2, exit_codes={0: -signal.SIGKILL, 1: 7}, timeout_s=60)
