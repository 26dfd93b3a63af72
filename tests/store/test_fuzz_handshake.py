"""A server with a secret under peers that lack it: in every state, split anywhere, relayed, dying.

Nothing that they send is executed, nothing grows, and a member is served all the while. The
campaign of ten minutes is `slow`; ECHELON_FUZZ_S and ECHELON_FUZZ_SEED set its length and seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.store import TCPStore
from echelon.store.wire import protocol as p
from echelon.store.wire import trust
from echelon.store.wire.seal import Sealer
from tests.store.peers import OPENING, PATIENCE_S, Raw, until
from tests.store.relay import Relay
from tests.store.test_fuzz_server import spoil, valid_traffic

SECRET = "correct horse battery staple"
ANNOUNCED = OPENING + p.encode(p.PING, p.OUR_NONCE)
# No uid is believed, so that torch's clients of this user are strangers as well.
SERVER = """
import sys
from echelon.store.server import cli
from echelon.store.wire import trust
trust.own_uid = lambda: None
sys.exit(cli.main(["--secret-file", sys.argv[1]]))
"""


@contextlib.contextmanager
def serving(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Run a server in a process of its own; yield its port and pid."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(secret)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()


@pytest.fixture
def guarded(tmp_path) -> Iterator[tuple[int, int]]:
    with serving(tmp_path) as found:
        yield found


def hello(rng: random.Random) -> bytes:
    """A HELLO, right or nearly."""
    version = p.EXTENSION_VERSION if rng.random() < 0.9 else rng.randrange(5)
    nonce = rng.randbytes(trust.NONCE_BYTES if rng.random() < 0.9 else rng.randrange(50))
    return p.tagged(p.HELLO, rng.randrange(3), nonce, version, rng.randbytes(trust.SESSION_BYTES))


def false_proof(rng: random.Random) -> bytes:
    """A proof that only a guess could make right."""
    guess = trust.client_proof(rng.randbytes(16), rng.randbytes(80))
    return p.tagged(p.PROOF, rng.randrange(3), rng.choice([guess, b"", bytes(32), guess[:-1]]))


def conversation(rng: random.Random) -> bytes:
    """What a peer without the secret may send."""
    commands = b"".join(valid_traffic(rng) for _ in range(rng.randrange(1, 5)))
    greeting = rng.choice([b"", OPENING, ANNOUNCED, ANNOUNCED + hello(rng)])
    if greeting.startswith(ANNOUNCED) and rng.random() < 0.6:
        greeting += b"".join(rng.choice([hello, false_proof])(rng) for _ in range(3))
    data = greeting + rng.choice([b"", commands, Sealer(rng.randbytes(32)).seal(commands)])
    return spoil(rng, data) if data and rng.random() < 0.5 else data or b"\x00"


def attack(rng: random.Random, port: int) -> None:
    """Send one conversation in random pieces, then leave in one of several ways."""
    data = conversation(rng)
    peer = Raw(port, opening=b"")
    with contextlib.suppress(OSError):
        while data:
            size = rng.randrange(1, 200)
            peer.send(data[:size])
            data = data[size:]
        if rng.random() < 0.3:
            peer.socket.settimeout(0.05)
            peer.socket.recv(1 << 16)
    rng.choice([Raw.close, Raw.reset])(peer)


def relay_attack(rng: random.Random, port: int) -> None:
    """Relay a member's handshake, then speak in its place."""
    relay = Relay(port)
    with contextlib.suppress(OSError):
        victim = TCPStore("127.0.0.1", relay.port, timeout=PATIENCE_S, secret=SECRET)
        injected = conversation(rng) + valid_traffic(rng)
        relay.inject(rng.choice([injected, Sealer(rng.randbytes(32)).seal(injected)]))
        victim.close()
    relay.close()


def campaign(
    port: int, pid: int, seed: int, is_over, beside: TCPStore | None = None
) -> tuple[int, list[float], list[float]]:
    """Attack until `is_over(number)`.

    Args:
        beside: a client of a server that is not under attack.

    Returns:
        How many attacks, and what a member's call after each took, here and `beside`.
    """
    rng = random.Random(seed)
    times: list[float] = []
    times_beside: list[float] = []
    with TCPStore("127.0.0.1", port, timeout=PATIENCE_S, secret=SECRET) as member:
        member.set_confirmed("guarded", b"untouched")
        number, at_first = 0, 0
        while not is_over(number):
            (relay_attack if number % 20 == 7 else attack)(rng, port)
            number += 1
            began = time.perf_counter()
            assert member.add("count", 1) == number
            times.append(time.perf_counter() - began)
            if beside is not None:
                began = time.perf_counter()
                assert beside.add("count", 1) == number
                times_beside.append(time.perf_counter() - began)
            if number % 50 == 0:
                statistics = member.statistics()
                assert statistics.num_keys == 2, (seed, number)
                assert (statistics.num_waiters, statistics.num_queues) == (0, 0), (seed, number)
                at_first = at_first or resident_mib(pid)
        assert member.get("guarded") == b"untouched"
        assert sorted(member.list_keys()) == ["count", "guarded"]
        until(lambda: member.statistics().num_connections == 1, "all strangers are closed")
        assert resident_mib(pid) - at_first < 64
    return number, times, times_beside


def resident_mib(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def test_nothing_without_the_secret_is_executed(guarded):
    assert campaign(*guarded, seed=20261122, is_over=lambda number: number >= 60)[0] == 60


@pytest.mark.slow
def test_ten_minutes_of_it(guarded, tmp_path):
    ends = time.monotonic() + float(os.environ.get("ECHELON_FUZZ_S", "600"))
    seed = int(os.environ.get("ECHELON_FUZZ_SEED", time.time_ns() % 1_000_000))
    with (
        serving(tmp_path) as (idle_port, _),
        TCPStore("127.0.0.1", idle_port, timeout=PATIENCE_S, secret=SECRET) as beside,
    ):
        number, times, idle = campaign(
            *guarded, seed=seed, is_over=lambda _: time.monotonic() > ends, beside=beside
        )
    print(
        f"\nseed {seed}: {number} attacks; a member's call, p50/p99/max: {shown(times)} ms; "
        f"at the same moments on a server that is not attacked: {shown(idle)} ms"
    )


def shown(times: list[float]) -> str:
    times = sorted(times)
    found = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1))
    return "/".join(f"{one:.1f}" for one in found)
