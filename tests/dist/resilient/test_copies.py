"""Where copies are kept, which of them are used, and what is seen of a copy that is torn."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echelon.dist.resilient.copies.choice import (
    CopiesLostError,
    Offer,
    Version,
    choose,
    partners_of,
)
from echelon.dist.resilient.copies.filling import crc_of
from echelon.dist.resilient.copies.memory import Address, CopyMemory, Stamp
from echelon.dist.resilient.copies.world import opened
from echelon.errors import PeerLostError


@pytest.mark.parametrize(
    ("places", "partners"),
    [
        ("a", [None]),
        ("aaaa", [None] * 4),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("abc", [1, 2, 0]),
        ("aaab", [3, 3, 3, 0]),
        ("abbb", [1, 0, 0, 0]),
        ("aabbbc", [2, 3, 5, 5, 5, 0]),
    ],
)
def test_the_second_copy_is_at_another_place(places, partners):
    found = partners_of(places)
    assert found == partners
    for rank, partner in enumerate(found):
        assert partner is None or places[partner] != places[rank]


@pytest.mark.parametrize(
    ("places", "machines", "partners"),
    [
        ("abc", "xxy", [2, 2, 0]),  # two containers of x: their second copies are on y
        ("abcd", "xxyy", [2, 2, 0, 0]),
        ("aabb", "xxxx", [2, 3, 0, 1]),  # no other machine: another container
    ],
)
def test_the_second_copy_is_on_another_machine_if_there_is_one(places, machines, partners):
    assert partners_of(places, machines) == partners


def _offers(*rows):
    return [Offer(Version(step, epoch), owner) for step, epoch, owner in rows]


def test_the_newest_state_that_is_complete_is_chosen():
    offers = {
        0: _offers((4, 0, 0), (5, 0, 0), (4, 0, 1)),  # rank 1 died before its copy of step 5
        2: _offers((4, 0, 2), (5, 0, 2)),
    }
    chosen = choose(offers, {0: [[0], [1], [2]]})
    assert chosen.version == Version(4, 0)
    assert chosen.holders == {0: 0, 1: 0, 2: 2}


def test_the_copies_of_an_earlier_world_count_until_all_of_the_next_one_exist():
    sets = {0: [[0], [1], [2], [3]], 1: [[0], [1], [2]]}
    old = [(7, 0, owner) for owner in range(4)]
    offers = {0: _offers(*old, (7, 1, 0)), 2: _offers((7, 0, 2), (7, 1, 2))}
    assert choose(offers, sets).version == Version(7, 0)
    offers[2] += _offers((7, 1, 1))
    assert choose(offers, sets).version == Version(7, 1)


def test_a_shard_that_no_rank_has_is_named():
    offers = {0: _offers((3, 0, 0), (4, 0, 0)), 1: _offers((3, 0, 1), (4, 0, 1))}
    with pytest.raises(CopiesLostError, match=r"state of ranks 2 and 3 are lost \(step 4\)"):
        choose(offers, {0: [[0], [1], [2], [3]]})
    with pytest.raises(CopiesLostError, match="no rank has a copy"):
        choose({0: []}, {})


def test_of_ranks_with_the_same_shards_one_copy_is_enough_and_a_living_owner_reads_its_own():
    offers = {
        0: _offers((4, 0, 0), (4, 0, 1), (5, 0, 0)),  # it also reads what rank 1 has left
        2: _offers((4, 0, 2), (5, 0, 2)),
        3: _offers((4, 0, 3)),
    }
    chosen = choose(offers, {0: [[0, 2], [1, 3]]})
    assert chosen.version == Version(4, 0)
    assert chosen.holders == {0: 0, 3: 3}
    del offers[3]
    assert choose(offers, {0: [[0, 2], [1, 3]]}).holders == {0: 0, 1: 0}
    offers[0] = _offers((5, 0, 0))
    with pytest.raises(CopiesLostError, match=r"state of ranks 1 and 3 are lost \(step 5\)"):
        choose(offers, {0: [[0, 2], [1, 3]]})


def _written(memory, values, step=3):
    memory.erase()
    content = memory.content(len(values))
    content.copy_(torch.tensor(values, dtype=torch.uint8))
    memory.commit(Stamp(Version(step, 0), 1, len(values), crc_of(content)))


def test_another_process_reads_a_copy_and_sees_each_kind_of_damage():
    memory = CopyMemory.create()
    other = CopyMemory.open(memory.address)
    try:
        assert other.stamp is None
        assert not other.is_intact()
        _written(memory, [1, 2, 3])
        assert other.stamp.version == Version(3, 0)
        assert other.is_intact()
        assert other.content(3).tolist() == [1, 2, 3]
        _written(memory, [4] * 10_000, step=4)  # has grown
        assert other.is_intact()
        memory.content(10_000)[9_000] = 5
        assert not other.is_intact()
        _written(memory, [4] * 10_000, step=4)
        os.pwrite(memory.address.fd, b"\xff", 20)  # of the stamp
        assert other.stamp is None
        assert not other.is_intact()
    finally:
        memory.close()
        other.close()


def test_a_forked_child_does_not_keep_a_memory_allocated():
    """A worker of a data loader outlives the world whose copies it inherited."""
    memory = CopyMemory.create()
    _written(memory, [7] * 10_000)
    fd = memory.address.fd
    inode = os.fstat(fd).st_ino
    child = os.fork()
    if child == 0:
        os._exit(_num_uses(inode))
    _, status = os.waitpid(child, 0)
    try:
        assert os.waitstatus_to_exitcode(status) == 0
        assert _num_uses(inode) > 0
        assert memory.is_intact()
    finally:
        memory.close()


def _num_uses(inode):
    """Return how many descriptors and mappings of this process refer to a file."""
    found = 0
    for fd in range(1024):
        with contextlib.suppress(OSError):
            found += os.fstat(fd).st_ino == inode
    maps = Path("/proc/self/maps").read_text().splitlines()
    return found + sum(line.split()[4] == str(inode) for line in maps)


def test_a_memory_outlives_the_one_that_made_it():
    memory = CopyMemory.create()
    other = CopyMemory.open(memory.address)
    _written(memory, [7, 8])
    memory.close()
    try:
        assert other.is_intact()
        assert other.content(2).tolist() == [7, 8]
    finally:
        other.close()


def test_a_descriptor_that_belongs_to_something_else_is_refused():
    memory = CopyMemory.create()
    address = memory.address
    try:
        with pytest.raises(OSError, match="has released its shared memory"):
            CopyMemory.open(Address(address.pid, address.fd, "00" * 16))
    finally:
        memory.close()


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_keeper_that_has_ended_is_a_lost_peer(is_reaped):
    """Survivors then wait for its loss to be published, however late."""
    with subprocess.Popen([sys.executable, "-c", ""]) as keeper:
        os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)
        if is_reaped:
            keeper.wait()
        with pytest.raises(PeerLostError, match="the memory that rank 4 keeps") as raised:
            opened(4, Address(keeper.pid, 3, "00" * 16))
    assert raised.value.ranks == (4,)


def test_a_keeper_whose_number_belongs_to_another_process_is_a_lost_peer():
    memory = CopyMemory.create()
    try:
        with pytest.raises(PeerLostError, match="has released its shared memory") as raised:
            opened(2, Address(os.getpid(), memory.address.fd, "00" * 16))
    finally:
        memory.close()
    assert raised.value.ranks == (2,)
