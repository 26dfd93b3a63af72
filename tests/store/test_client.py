"""The client: broken connections, several threads, forks, deadlines, and hosting."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys

import pytest

from echelon.errors import StoreConnectionError, StoreError, StoreTimeoutError
from echelon.store import StoreServer, TCPStore
from echelon.store.client.channel import Channel
from echelon.store.wire import protocol as p
from tests.store.peers import Background, Raw, until
from tests.store.relay import Relay
from tests.support.ports import free_port


@pytest.fixture
def relay(server, closing):
    return closing(Relay(server.port))


@pytest.fixture
def relayed(relay, closing):
    return closing(TCPStore("127.0.0.1", relay.port, timeout=20.0))


@pytest.fixture
def sent(monkeypatch):
    """Note what channels send, from now on."""
    packets = []
    send = Channel.send

    def note(self, data, deadline):
        packets.append(data)
        send(self, data, deadline)

    monkeypatch.setattr(Channel, "send", note)
    return packets


@pytest.mark.parametrize(
    ("call", "query"),
    [
        (lambda s: s.get("k"), p.AWAIT_GET),
        (lambda s: s.multi_get(["k", "k"]), p.AWAIT_MULTI_GET),
        (lambda s: s.gather("g", 0, 1, b"v"), p.GATHER),
        (lambda s: s.set("l", b""), p.ACK_SET),
        (lambda s: s.queue_pop("q"), p.AWAIT_POP),
    ],
)
def test_every_call_is_one_packet_with_one_query(client, sent, call, query):
    store = client()
    store.set("k", b"v")
    store.queue_push("q", b"item")
    store.check(["k"])
    sent.clear()
    call(store)
    assert [packet[0] for packet in sent] == [query]


def test_reading_goes_on_over_a_new_connection(relay, relayed):
    relayed.set("k", b"v")
    assert relayed.get("k") == b"v"
    relay.cut()
    assert relayed.get("k") == b"v"
    relay.cut()
    assert relayed.check(["k"])
    assert relay.num_accepted >= 3


def test_a_wait_goes_on_over_a_new_connection(server, relay, relayed, client):
    waiting = Background(lambda: relayed.get("late"))
    until(lambda: server.statistics().num_waiters == 1, "the wait is open")
    relay.cut()
    until(lambda: relay.num_accepted >= 2, "it is connected again")
    client().set("late", b"v")
    assert waiting.result() == b"v"


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.add("n", 1),
        lambda s: s.compare_set("k", "", "v"),
        lambda s: s.delete_key("k"),
        lambda s: s.queue_pop("q", block=False),
        lambda s: s.set_confirmed("k", b"v"),
    ],
)
def test_what_must_not_be_done_twice_fails_when_the_connection_breaks(server, relayed, relay, call):
    relayed.check(["k"])
    relay.cut_at_next()
    with pytest.raises(StoreConnectionError, match="the connection broke"):
        call(relayed)
    assert relayed.num_keys() == 0
    assert server.statistics().num_keys == 0


@pytest.mark.parametrize("call", [lambda s: s.add("n", 1), lambda s: s.set("n", b"1")])
def test_a_connection_that_was_cut_while_idle_fails_nothing(server, relayed, relay, call):
    """Nothing was sent over it, so nothing can happen twice."""
    relayed.check(["k"])
    relay.cut()
    until(lambda: server.statistics().num_connections == 0, "the server saw it")
    call(relayed)
    assert relayed.get("n") == b"1"


def test_what_the_server_refuses_is_not_repeated_until_the_deadline(server, client):
    store = client()
    store.set("k", bytes(8 << 20))
    with pytest.raises(StoreError, match="multi_get exceeds the limit of"):
        store.multi_get(["k"] * 33)
    with pytest.raises(ValueError, match="the call has 131073 keys, but the limit is 131072"):
        store.wait(["k"] * 131073)
    assert server.statistics().num_refused == 0
    assert store.num_keys() == 1


def test_a_server_that_closes_over_a_question_is_asked_twice(relay, relayed):
    relayed.check(["k"])
    relay.cut_at_next(100)
    with pytest.raises(StoreConnectionError, match="the connection broke"):
        relayed.check(["k"])
    assert relay.num_accepted == 2


def test_a_refused_write_fails_the_next_call(client):
    store = client()
    store.set("n", b"x" * (8 << 20))
    store.append("n", b"y")
    with pytest.raises(StoreError, match="refused: append: the value of key n would be"):
        until(lambda: store.num_keys() == 0, "the refusal is seen")
    assert store.num_keys() == 1


def test_a_queue_of_the_name_is_no_value(client):
    """get waits for a value; b'' would be one that nobody set."""
    store = client()
    store.queue_push("q", b"item")
    for call in (lambda: store.get("q", timeout=0.1), lambda: store.multi_get(["q"], timeout=0.1)):
        with pytest.raises(StoreTimeoutError):
            call()
    with store.pipeline() as pipe:
        found = pipe.get("q")
    assert found.value is None
    assert store.queue_pop("q") == b"item"


def test_a_key_that_is_no_text_is_watched_as_it_is_listed(client):
    store = client()
    key = b"k\xff".decode("utf-8", "surrogateescape")
    with store.watch([key]) as watch:
        store.set(key, b"v")
        assert watch.next(20.0).key == key == store.list_keys()[0]


def test_a_round_is_not_repeated_when_the_connection_breaks(server, relay, relayed):
    waiting = Background(lambda: relayed.gather("g", 0, 2, b"v"))
    until(lambda: server.statistics().num_waiters == 1, "the arrival is there")
    relay.cut()
    with pytest.raises(StoreConnectionError, match=r"gather\('g'\).*the connection broke"):
        waiting.result()
    until(lambda: server.statistics().num_waiters == 0, "the arrival is withdrawn")


def test_writes_that_may_be_lost_are_not_passed_over(server, relay, relayed):
    relayed.check(["k"])
    relayed.set("k", b"v")
    relayed.set("l", b"w")
    relay.cut()
    with pytest.raises(StoreConnectionError, match="2 earlier writes may not have arrived"):
        relayed.get("k", timeout=5.0)


def test_a_restarted_server_is_noticed(server, relay, relayed, closing):
    relayed.set_confirmed("k", b"v")
    successor = closing(StoreServer().start())
    relay.retarget(successor.port)
    relay.cut()
    with pytest.raises(StoreConnectionError, match="the server was restarted, and its keys"):
        relayed.get("k")


def test_a_server_that_is_gone_ends_waits_soon(closing):
    server = closing(StoreServer().start())
    store = closing(TCPStore("127.0.0.1", server.port, timeout=300.0))
    waiting = Background(lambda: store.get("never"))
    until(lambda: server.statistics().num_waiters == 1, "the wait is open")
    server.close()
    with pytest.raises(StoreConnectionError, match="no server after"):
        waiting.result()


def test_one_connection_carries_waits_answers_watches_and_presences(server, client):
    store = client()
    with store.watch(["gate/0"]) as watch, store.presence("here"):
        for _ in range(3):
            blocked = [Background(lambda i=i: store.get(f"gate/{i}")) for i in range(6)]
            until(lambda: server.statistics().num_waiters == 6, "six wait")
            assert store.add("n", 1)
            store.multi_set([f"gate/{i}" for i in range(6)], [b"go"] * 6)
            assert [call.result() for call in blocked] == [b"go"] * 6
            assert watch.next(20.0).value == b"go"
            with store.pipeline() as pipe:
                for i in range(6):
                    pipe.delete_key(f"gate/{i}")
            assert watch.next(20.0).value is None
        assert server.statistics().num_connections == 1


def test_one_thread_needs_one_connection(server, client):
    store = client()
    store.set("a", b"1")
    for _ in range(3):
        store.get("a")
        store.gather("g", 0, 1, b"")
        with pytest.raises(StoreTimeoutError):
            store.get("never", timeout=0.02)
    assert server.statistics().num_connections == 1


def test_a_thread_reads_what_it_wrote_while_others_block(server, client):
    """A write without a reply must not be overtaken by its thread's next call elsewhere."""
    store = client()
    for number in range(100):
        store.set("mine", str(number))
        blocked = Background(lambda n=number: store.get(f"gate/{n}"))
        assert store.get("mine") == str(number).encode()
        store.set(f"gate/{number}", b"")
        blocked.result()


def test_close_ends_calls_that_wait_in_other_threads(server, client):
    store = client()
    waiting = Background(lambda: store.get("never"))
    until(lambda: server.statistics().num_waiters == 1, "the wait is open")
    store.close()
    with pytest.raises(StoreError, match="closed"):
        waiting.result()
    with pytest.raises(StoreError, match="the store is closed"):
        store.get("k")
    until(lambda: server.statistics().num_connections == 0, "the connections are closed")


def test_a_forked_child_is_told_to_open_its_own(client):
    store = client()
    store.set("k", b"parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.get("k")
        except StoreError as error:
            code = 0 if "opened the store before a fork" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.get("k") == b"parent"


def test_a_server_that_says_nothing_is_a_timeout(closing):
    silent = closing(socket.create_server(("127.0.0.1", 0)))
    with pytest.raises(StoreTimeoutError, match="no server after"):
        TCPStore("127.0.0.1", silent.getsockname()[1], timeout=0.2)


def test_a_peer_that_is_no_store_is_told_apart(closing):
    listener = closing(socket.create_server(("127.0.0.1", 0)))

    def answer():
        connected, _ = listener.accept()
        with connected:
            connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connected.recv(100)

    wrong = Background(answer)
    with pytest.raises(StoreError, match="not a store server"):
        TCPStore("127.0.0.1", listener.getsockname()[1], timeout=20.0)
    wrong.result()


def test_the_master_hosts_the_server_and_takes_it_along(closing):
    master = TCPStore("127.0.0.1", 0, is_master=True, timeout=20.0)
    other = closing(TCPStore("127.0.0.1", master.port, timeout=20.0))
    other.set_confirmed("k", b"v")
    assert master.get("k") == b"v"
    master.close()
    with pytest.raises((StoreConnectionError, StoreTimeoutError)):
        other.get("k", timeout=5.0)


def test_the_master_waits_for_its_workers(closing):
    port = free_port()
    waiting = Background(lambda: TCPStore("127.0.0.1", port, 3, True, timeout=20.0))
    workers = [closing(TCPStore("127.0.0.1", port, 3, timeout=20.0)) for _ in range(2)]
    master = closing(waiting.result())
    assert master.num_keys() == 1
    assert master.list_keys() == []
    master.set("later", b"1")
    assert workers[0].get("later") == b"1"


def test_the_master_says_how_many_workers_joined():
    with pytest.raises(StoreTimeoutError, match="1 of 2 workers joined"):
        TCPStore("127.0.0.1", 0, 2, True, timeout=0.2)


def test_tenants_share_a_server(closing):
    first = TCPStore("127.0.0.1", 0, is_master=True, timeout=20.0, multi_tenant=True)
    second = closing(
        TCPStore("127.0.0.1", first.port, is_master=True, timeout=20.0, multi_tenant=True)
    )
    second.set_confirmed("k", b"v")
    assert first.get("k") == b"v"
    first.close()
    assert second.get("k") == b"v"


def test_a_listening_descriptor_is_taken_over(closing):
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = closing(
        TCPStore(
            "127.0.0.1", port, is_master=True, timeout=20.0, master_listen_fd=listener.detach()
        )
    )
    assert store.port == port
    assert store.add("n", 1) == 1


@pytest.mark.parametrize(
    ("port", "is_master"), [(70000, False), (-1, False), (0, False), (65536, True)]
)
def test_a_port_that_no_server_can_have_is_refused_at_once(port, is_master):
    with pytest.raises(ValueError, match=f"port {port}: a server's port must be from 1 to 65535"):
        TCPStore("127.0.0.1", port, is_master=is_master, timeout=0.5)


def test_a_taken_port_is_one_line(server):
    with pytest.raises(
        StoreError, match=r"Address already in use\. Another server is using the port"
    ):
        StoreServer("127.0.0.1", server.port)


def test_a_dropped_store_closes_by_itself(server):
    store = TCPStore("127.0.0.1", server.port, timeout=20.0)
    store.set("k", b"v")
    del store
    gc.collect()
    until(lambda: server.statistics().num_connections == 0, "the connection is closed")


def test_statistics_say_who_waits_for_what(server, client):
    first, second = client(), client()
    first.set("k", b"12345")
    calls = [
        Background(lambda: first.get("a", 20.0)),
        Background(lambda: first.gather("g", 1, 3, b"")),
        Background(lambda: first.queue_pop("q", timeout=20.0)),
    ]
    until(lambda: second.statistics().num_waiters == 3, "three wait")
    statistics = second.statistics()
    assert dict(statistics.waiting) == {"a": 1, "g": 1, "q": 1}
    assert dict(statistics.missing_ranks) == {"g": (0, 2)}
    assert (statistics.num_keys, statistics.value_bytes) == (1, 5)
    first.close()
    for call in calls:
        with pytest.raises(StoreError):
            call.result()
    until(lambda: second.statistics().num_waiters == 0, "all were withdrawn")


def test_a_second_arrival_of_a_rank_takes_the_place_of_the_first(client):
    first, second, other = client(), client(), client()
    early = Background(lambda: first.gather("g", 0, 2, b"old"))
    until(lambda: other.statistics().num_waiters == 1, "the first is there")
    late = Background(lambda: second.gather("g", 0, 2, b"new"))
    with pytest.raises(StoreError, match="rank 0 arrived again"):
        early.result()
    assert other.gather("g", 1, 2, b"1") == [b"new", b"1"]
    assert late.result() == [b"new", b"1"]


def test_rounds_of_different_sizes_are_an_error_not_a_hang(client):
    first, second = client(), client()
    waiting = Background(lambda: first.barrier("b", 2, rank=0))
    until(lambda: second.statistics().num_waiters == 1, "the first is there")
    with pytest.raises(
        StoreError,
        match="barrier of 3 ranks at key b, but other ranks are already waiting there in a "
        "barrier of 2 ranks",
    ):
        second.barrier("b", 3, rank=1)
    second.barrier("b", 2, rank=1)
    waiting.result()


def test_torch_and_our_clients_meet_at_one_barrier(server, client, closing):
    waiting = Background(lambda: client().barrier("b", 2))
    until(lambda: server.statistics().num_waiters == 1, "ours is there")
    torchs = closing(Raw(server.port))
    torchs.send(p.encode(p.BARRIER, b"/b", 2))
    assert torchs.take(1) == p.WAIT_DONE
    waiting.result()


def test_the_store_imports_neither_server_nor_torch():
    script = (
        "import sys, echelon.store\n"
        "heavy = {'asyncio', 'uvloop', 'torch', 'numpy', 'ssl', 'concurrent.futures'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
        "from echelon.store import StoreServer\n"
        "print('asyncio' in sys.modules, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\nTrue False\n"
