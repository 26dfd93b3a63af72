"""Clients that die in the middle of waits and rounds: nothing leaks, nobody passes alone."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading

import pytest

from echelon.store import TCPStore
from echelon.store.wire import protocol as p
from tests.store.peers import Background, Raw, ours, until
from tests.support.ranks import run_ranks


def store_here(timeout_s: float = 20.0) -> TCPStore:
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timeout_s)


def die_once_it_waits(key: str, num_waiting: int) -> None:
    """End this process by SIGKILL as soon as so many wait for the key."""

    def watch() -> None:
        store = store_here()
        until(
            lambda: (
                store.statistics().waiting.get(key, 0) >= num_waiting or store.check(["dying"])
            ),  # another saw it and may be gone already
            f"{num_waiting} wait",
        )
        store.set_confirmed("dying", b"")
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def meet_with_a_death(rank: int, world_size: int, operation: str) -> list[bytes]:
    """Rank 1 dies after it has arrived; the others pass only with the process that replaces it."""
    store = store_here()

    def arrive(rank: int, value: bytes) -> list[bytes]:
        if operation == "gather":
            return store.gather("round", rank, world_size, value)
        store.barrier("round", world_size, rank=rank)
        return []

    if rank == 1:
        die_once_it_waits("round", 2)
        arrive(1, b"dead")
    if rank == 2:  # comes only after rank 1 has come and gone
        store.wait(["dying"])
        until(lambda: store.statistics().waiting.get("round", 0) == 1, "one of them died")
        late = Background(lambda: arrive(2, b"2"))
        until(lambda: store.statistics().waiting.get("round", 0) == 2, "rank 2 waits as well")
        assert dict(store.statistics().missing_ranks) == {"round": (1,)}
        assert not late.is_done
        arrive(1, b"reborn")
        return late.result()
    return arrive(rank, b"0")


@pytest.mark.ranks
@pytest.mark.parametrize("operation", ["gather", "barrier"])
def test_a_rank_that_dies_in_a_round_is_missing_from_it(server, operation):
    found = run_ranks(
        meet_with_a_death, 3, operation, exit_codes={1: -signal.SIGKILL}, store_port=server.port
    )
    passed = [b"0", b"reborn", b"2"] if operation == "gather" else []
    assert found == [passed, None, passed]
    until(lambda: server.statistics().num_connections == 0, "all have left")
    assert server.statistics().num_waiters == 0


def wait_and_die(rank: int, world_size: int) -> str:
    """Ranks above 0 die in a wait for what rank 0 sets afterwards."""
    store = store_here()
    if rank > 0:
        die_once_it_waits("late", world_size - 1)
        store.wait(["late"])
    store.wait(["dying"])
    until(lambda: store.statistics().num_waiters == 0, "the dead no longer wait")
    store.set("late", b"")
    with store.presence("alive"):
        return "done"


@pytest.mark.ranks
def test_the_dead_no_longer_wait(server):
    killed = dict.fromkeys((1, 2, 3), -signal.SIGKILL)
    ended = run_ranks(wait_and_die, 4, exit_codes=killed, store_port=server.port)
    assert ended == ["done", None, None, None]
    until(lambda: server.statistics().num_connections == 0, "all connections are gone")
    statistics = server.statistics()
    assert (statistics.num_waiters, statistics.num_presences) == (0, 0)


def hold_presence(rank: int, _world_size: int) -> None:
    store = store_here()
    if rank == 1:
        presence = store.presence("here", b"1")
        store.get("watched")
        os.kill(os.getpid(), signal.SIGKILL)
        presence.close()
    store.wait(["here"])
    with store.watch(["here"]) as watch:
        store.set("watched", b"")
        assert watch.next(20.0).value is None
    assert store.list_keys() == ["watched"]


@pytest.mark.ranks
def test_a_killed_process_is_no_longer_present(server):
    run_ranks(hold_presence, 2, exit_codes={1: -signal.SIGKILL}, store_port=server.port)
    until(lambda: server.statistics().num_presences == 0, "its lease has run out")


def test_deaths_at_any_moment_leave_nothing(server):
    """Peers begin waits of every kind and die or cancel, in an order drawn by chance."""
    rng = random.Random(3)
    for _ in range(15):
        peers = []
        for number in range(12):
            peer = ours(server.port)
            peer.send(
                rng.choice(
                    [
                        p.encode(p.WAIT, [b"/a", b"/b"]),
                        p.tagged(p.AWAIT_GET, 1, b"/a"),
                        p.tagged(p.AWAIT_POP, 1, b"/q"),
                        p.encode(p.BARRIER, b"/b1", 40),
                        p.tagged(p.ARRIVE, 1, b"/b2", number, 40),
                        p.tagged(p.GATHER, 1, b"/g", number, 40, b"x"),
                        p.tagged(p.PRESENCE, 1, b"/p", b"", 1000),
                        p.tagged(p.WATCH, 1, [b"/w"]),
                    ]
                )
            )
            if rng.random() < 0.3:
                peer.send(rng.choice([p.tagged(p.CANCEL, 1), p.encode(p.CANCEL_WAIT)]))
            peers.append(peer)
        rng.shuffle(peers)
        for peer in peers:
            rng.choice([Raw.close, Raw.reset])(peer)
    until(lambda: server.statistics().num_connections == 0, "all have left")
    statistics = server.statistics()
    assert (statistics.num_waiters, statistics.num_keys, statistics.num_queues) == (0, 0, 0)
    assert (statistics.num_presences, statistics.num_watched_keys) == (0, 0)
    inside = server._call(lambda hub: (dict(hub.state.waiting), dict(hub.state.rounds)))
    assert inside == ({}, {})


def test_both_ends_notice_a_machine_that_vanished_with_data_on_its_way(server, client):
    """The kernel gives up after 30 s without an acknowledgement; probes cover the idle rest."""
    store = client()
    store.set_confirmed("k", b"v")
    near = store._calls._session._link.channel._socket
    far = server._call(lambda hub: [c.descriptor for c in hub.connections])
    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    for descriptor in far:
        with socket.socket(fileno=os.dup(descriptor)) as end:
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
