"""A torch group that is formed again and again: what it survives, and that it leaves nothing."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from echelon.dist.torch_backend.reconfigurable import Reconfigurable, parse
from echelon.errors import CollectiveError, CollectiveTimeoutError, PeerLostError
from echelon.store import TCPStore
from tests.support.ranks import run_ranks

_LIMIT_S = 100.0


def _address() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _store() -> TCPStore:
    return TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=_LIMIT_S)


def _sum(one: Reconfigurable) -> float:
    x = torch.full((1000,), one.rank + 1.0)
    one.group.allreduce([x]).wait()
    return x[-1].item()


def _wait_until(condition: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + _LIMIT_S
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def _held() -> tuple[list[str], int, list[str]]:
    """Return this process's threads, the number of its files, and its shared memory."""
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate())
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line.split(maxsplit=5)[-1] for line in maps if "/dev/shm" in line or "memfd:" in line]
    return threads, len(os.listdir("/proc/self/fd")), shared  # noqa: PTH208


def _many(rank: int, world_size: int, torchs: str) -> None:
    torch.set_num_threads(1)
    one = Reconfigurable(_LIMIT_S)
    one.configure(f"{_address()}/first", "replicas", rank, [0, 1, 2])
    assert _sum(one) == 6.0
    one.shutdown()
    before = _held()  # what serves all groups of a process has been started
    for number in range(20):
        members = [0, 1, 2] if number % 3 else [2, 0]
        if rank not in members:
            continue
        place = _address() if number % 2 else torchs
        one.configure(f"{place}/job/{number}", "replicas", members.index(rank), members)
        assert (one.rank, one.size) == (members.index(rank), len(members))
        assert _sum(one) == {2: 3.0, 3: 6.0}[len(members)]
        one.group.allreduce([torch.ones(2)]).get_future().wait()
        assert one.error is None
    assert _held() != before  # so that what a group holds is seen here
    one.shutdown()
    one.shutdown()
    with pytest.raises(CollectiveError, match="not configured"):
        _ = one.group
    _wait_until(lambda: _held() == before)


@pytest.mark.ranks
def test_a_group_is_formed_twenty_times_over_both_servers_and_leaves_nothing():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(_many, 3, f"127.0.0.1:{server.port}")


def _killed(rank: int, world_size: int) -> str:
    one = Reconfigurable(_LIMIT_S)
    one.configure(f"{_address()}/1", "quorum_1", rank, [10, 11, 12])
    assert _sum(one) == 6.0
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="rank 12 died or left") as raised:
        _sum(one)
    assert one.error is raised.value or one.error.ranks == (12,)
    for _ in range(2):
        with pytest.raises(CollectiveError):  # until it is formed again
            _sum(one)
    one.configure(f"{_address()}/2", "quorum_2", rank, [10, 11])
    assert one.error is None
    assert _sum(one) == 3.0
    one.shutdown()
    return "went on"


@pytest.mark.ranks
def test_survivors_of_a_killed_member_go_on_in_a_smaller_group():
    assert run_ranks(_killed, 3, exit_codes={2: -9}) == ["went on", "went on", None]


def _aborted(rank: int, world_size: int) -> None:
    one = Reconfigurable(_LIMIT_S)
    one.abort()  # of nothing
    one.configure(f"{_address()}/1", "replicas", rank, [0, 1])
    store = _store()
    if rank == 0:
        work = one.group.allreduce([torch.ones(3)])
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                one.group.barrier().wait()
            except CollectiveError as err:
                raised.append(err)

        waiting = threading.Thread(target=wait)
        waiting.start()
        _wait_until(lambda: one.group._get_sequence_number_for_group() == 2)
        begun_s = time.monotonic()
        one.abort()
        waiting.join(_LIMIT_S)
        with pytest.raises(CollectiveError, match="aborted on rank 0"):
            work.wait()
        assert time.monotonic() - begun_s < _LIMIT_S / 2  # not the operations' timeout
        assert "aborted on rank 0" in str(raised[0])
        assert "aborted on rank 0" in str(one.error)
        store.set("aborted", b"1")
    else:
        store.wait(["aborted"])
        with pytest.raises(CollectiveError, match="rank 0"):
            _sum(one)
        assert one.error is not None
    one.configure(f"{_address()}/2", "replicas", rank, [0, 1])
    assert one.error is None
    assert _sum(one) == 3.0
    store.close()


@pytest.mark.ranks
def test_abort_ends_what_waits_on_all_members_until_the_next_configuration():
    run_ranks(_aborted, 2)


def _never_there(rank: int, world_size: int) -> None:
    one = Reconfigurable(10 * _LIMIT_S)
    for number, end in enumerate((one.abort, one.shutdown)):
        raised: list[BaseException] = []

        def configure(number: int = number, raised: list[BaseException] = raised) -> None:
            try:
                one.configure(f"{_address()}/{number}", "replicas", 0, [0, 1])
            except CollectiveError as err:
                raised.append(err)

        configuring = threading.Thread(target=configure)
        configuring.start()
        _wait_until(lambda: one.size == 2)
        end()
        configuring.join(_LIMIT_S)
        assert "aborted on rank 0" in str(raised[0])
    one.set_timeout(0.3)
    with pytest.raises(CollectiveTimeoutError, match="missing: 1"):
        one.configure(f"{_address()}/late", "replicas", 0, [0, 1])
    assert isinstance(one.error, CollectiveTimeoutError)
    with pytest.raises(CollectiveError, match=r"not configured: .*missing: 1"):
        _sum(one)
    one.set_timeout(_LIMIT_S)
    one.configure(f"{_address()}/alone", "replicas", 0, [0])
    assert _sum(one) == 1.0
    assert one.error is None


@pytest.mark.ranks
def test_a_member_that_never_arrives_is_waited_for_until_an_abort_or_the_timeout():
    run_ranks(_never_there, 1)


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:29500/torchft/3/0", ("localhost", 29500, "torchft/3/0")),
        ("10.0.0.1:1", ("10.0.0.1", 1, "")),
        ("[fe80::1]:29500/a", ("fe80::1", 29500, "a")),
        ("fe80::1:29500/a", ("fe80::1", 29500, "a")),
    ],
)
def test_an_address_has_a_host_a_port_and_a_prefix(address, parts):
    assert parse(address) == parts


@pytest.mark.parametrize("address", ["", "localhost/a", ":29500/a", "localhost:port/a"])
def test_another_form_of_an_address_is_refused(address):
    with pytest.raises(ValueError, match="host:port/prefix"):
        parse(address)


def test_a_rank_outside_of_the_group_is_refused():
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        Reconfigurable(1.0).configure("localhost:1/a", "replicas", 2, [0, 1])
