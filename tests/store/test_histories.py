"""Clients that lose their connections at random: one order explains what all of them saw."""

from __future__ import annotations

import random
import threading
import time

import pytest

from echelon.errors import StoreConnectionError
from echelon.store import StoreServer, TCPStore
from tests.store.histories import Operation, is_linearizable
from tests.store.peers import PATIENCE_S, Background
from tests.store.relay import Relay

_NUM_CLIENTS = 3
_NUM_CALLS = 10
KINDS = {
    "register": ["set", "get", "get", "delete", "compare_set"],
    "counter": ["add", "add", "get"],
}


def run_call(store: TCPStore, key: str, kind: str, operands: tuple[bytes, ...]) -> object:
    if kind == "set":
        return store.set_confirmed(key, *operands)
    if kind == "add":
        return store.add(key, int(operands[0]))
    if kind == "compare_set":
        return store.compare_set(key, *operands)
    if kind == "delete":
        return store.delete_key(key)
    with store.pipeline() as pipe:
        found = pipe.get(key)
    return found.value


def operands_of(rng: random.Random, kind: str) -> tuple[bytes, ...]:
    number = {"set": 1, "add": 1, "compare_set": 2}.get(kind, 0)
    return tuple(rng.choice([b"1", b"2", b"3"]) for _ in range(number))


def live(port: int, seed: int, history: dict[str, list[Operation]]) -> None:
    """Make calls over a relay that is cut at random; replace the client when it breaks."""
    rng = random.Random(seed)
    relay = Relay(port)
    store = TCPStore("127.0.0.1", relay.port, timeout=PATIENCE_S)
    for _ in range(_NUM_CALLS):
        key = rng.choice(list(KINDS))
        kind = rng.choice(KINDS[key])
        operands = operands_of(rng, kind)
        fate = rng.random()
        cutter = None
        if fate < 0.1:
            relay.cut_at_next()
        elif fate < 0.3:
            cutter = threading.Timer(rng.random() * 0.002, relay.cut)
            cutter.start()
        began = time.monotonic()
        try:
            result = run_call(store, key, kind, operands)
            done = Operation(kind, operands, result, began, time.monotonic())
        except StoreConnectionError:
            done = Operation(kind, operands, None, began)
        history[key].append(done)
        if cutter is not None:
            cutter.join()
    store.close()
    relay.close()


def check_history(seed: int) -> int:
    """Run one history; return how many calls broke."""
    history: dict[str, list[Operation]] = {key: [] for key in KINDS}
    with StoreServer() as server:
        clients = [
            Background(lambda n=n: live(server.port, 100 * seed + n, history))
            for n in range(_NUM_CLIENTS)
        ]
        for client in clients:
            client.result()
    for key, operations in history.items():
        assert is_linearizable(operations), (seed, key, operations)
    return sum(not one.is_known for of_key in history.values() for one in of_key)


def at(kind: str, began: float, ended: float, result: object, *operands: bytes) -> Operation:
    return Operation(kind, operands, result, began, ended)


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        ([at("set", 0, 1, None, b"1"), at("get", 2, 3, b"1")], True),
        ([at("set", 0, 1, None, b"1"), at("get", 2, 3, None)], False),
        ([at("set", 0, 3, None, b"1"), at("get", 1, 2, None)], True),
        ([at("add", 0, 1, 1, b"1"), at("add", 2, 3, 1, b"1")], False),
        ([at("add", 0, 9, 2, b"1"), at("add", 0, 9, 1, b"1")], True),
        ([Operation("add", (b"1",), None, 0), at("get", 5, 6, b"1")], True),
        ([Operation("add", (b"1",), None, 7), at("get", 5, 6, b"1")], False),
        ([Operation("add", (b"1",), None, 0), at("get", 5, 6, None)], True),
        ([at("compare_set", 0, 1, b"2", b"1", b"3"), at("get", 2, 3, None)], False),
    ],
)
def test_the_checker_tells_right_histories_from_wrong(operations, expected):
    assert is_linearizable(operations) is expected


def test_histories_under_random_cuts_have_an_order():
    assert sum(check_history(seed) for seed in range(10)) > 0, "no call broke"


@pytest.mark.slow
def test_500_histories():
    broken = sum(check_history(1000 + seed) for seed in range(500))
    print(f"\n500 histories, {broken} calls broke")
    assert broken > 100
