"""Clients that are killed in the middle of a call: one order explains what all processes saw."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest

from echelon.store import StoreServer, TCPStore
from tests.store.histories import Operation, is_linearizable
from tests.store.peers import PATIENCE_S, all_have_left
from tests.store.relay import Relay
from tests.store.test_histories import KINDS, operands_of, run_call
from tests.support.ranks import run_ranks

_NUM_CLIENTS = 3


def live_until_killed(
    rank: int, _world_size: int, ports: list[int], seed: int, folder: str
) -> None:
    """Make calls over a relay that ends this process; write each one's begin and end down."""
    rng = random.Random(f"{seed} {rank}")
    store = TCPStore("127.0.0.1", ports[rank], timeout=PATIENCE_S)
    with Path(folder, f"{rank}").open("wb", buffering=0) as journal:
        journal.write(b"%d\n" % os.getpid())
        while True:
            key = rng.choice(list(KINDS))
            kind = rng.choice(KINDS[key])
            operands = operands_of(rng, kind)
            texts = [one.decode() for one in operands]
            journal.write(json.dumps([key, kind, texts, time.monotonic()]).encode() + b"\n")
            result = run_call(store, key, kind, operands)
            shown = {"bytes": result.decode()} if isinstance(result, bytes) else result
            journal.write(json.dumps([shown, time.monotonic()]).encode() + b"\n")


class Executioner:
    """Kills the client of a relay at one of its packets, before or after that one is forwarded."""

    def __init__(self, journal: Path, num_packets: int, *, is_forwarded: bool) -> None:
        self._journal = journal
        self._num_packets = num_packets
        self._is_forwarded = is_forwarded
        self.num_killed = 0

    def __call__(self, num_asked: int, is_forwarded: bool) -> bool:
        """Return whether the client is dead now: no reply may go back to it."""
        if num_asked < self._num_packets or is_forwarded is not self._is_forwarded:
            return False
        pid = int(self._journal.read_text().partition("\n")[0])
        with os.fdopen(os.pidfd_open(pid)) as process:
            os.kill(pid, signal.SIGKILL)
            assert select.select([process], [], [], PATIENCE_S)[0], "it survived SIGKILL"
        self.num_killed += 1
        return True


def operations_in(journal: Path) -> list[tuple[str, Operation]]:
    """Return the calls of one process, with their keys; the last has no end if it was killed."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    found = []
    for number in range(0, len(lines), 2):
        key, kind, texts, began = lines[number]
        operands = tuple(text.encode() for text in texts)
        if number + 1 == len(lines):
            found.append((key, Operation(kind, operands, None, began)))
            continue
        result, ended = lines[number + 1]
        if isinstance(result, dict):
            result = result["bytes"].encode()
        found.append((key, Operation(kind, operands, result, began, ended)))
    return found


def check_history(folder: Path, seed: int) -> int:
    """Run one history of processes that are all killed; return how many calls were cut short."""
    rng = random.Random(seed)
    journals = [folder / f"{rank}" for rank in range(_NUM_CLIENTS)]
    history: dict[str, list[Operation]] = {key: [] for key in KINDS}
    with StoreServer() as server:
        relays = []
        for journal in journals:
            relay = Relay(server.port)
            relay.on_request = Executioner(
                journal, rng.randrange(8, 25), is_forwarded=rng.random() < 0.7
            )
            relays.append(relay)
        run_ranks(
            live_until_killed, _NUM_CLIENTS, [relay.port for relay in relays], seed, str(folder),
            exit_codes=dict.fromkeys(range(_NUM_CLIENTS), -signal.SIGKILL),
            store_port=server.port,
        )  # fmt: skip
        for relay in relays:
            relay.close()
            assert relay.on_request.num_killed == 1
        all_have_left(server)
        with TCPStore("127.0.0.1", server.port, timeout=PATIENCE_S) as last:
            for key in KINDS:
                began = time.monotonic()
                value = run_call(last, key, "get", ())
                history[key].append(Operation("get", (), value, began, time.monotonic()))
    for journal in journals:
        for key, operation in operations_in(journal):
            history[key].append(operation)
    for key, operations in history.items():
        assert is_linearizable(operations), (seed, key, operations)
    return sum(not one.is_known for of_key in history.values() for one in of_key)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_history_of_killed_clients_has_an_order(tmp_path):
    assert check_history(tmp_path, seed=5) == _NUM_CLIENTS


@pytest.mark.slow
def test_100_histories_of_killed_clients(tmp_path):
    cut_short = 0
    for seed in range(100):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        cut_short += check_history(folder, 1000 + seed)
    print(f"\n100 histories, {cut_short} calls of killed processes")
    assert cut_short == 100 * _NUM_CLIENTS
