"""The message protocol without I/O: ranks in one process, streams cut at random places."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from echelon.dist.messages import protocol as protocol_module
from echelon.dist.messages.frames import FrameError, FrameKind, dtype_key, pack
from echelon.dist.messages.protocol import Protocol
from echelon.dist.messages.transfer import Transfer
from echelon.dist.operation.operation import ANY_SOURCE, Operation


def _mismatch(_: Transfer, sent: str) -> TypeError:
    return TypeError(sent)


class Ranks:
    """The protocols of all ranks, with a byte pipe for each ordered pair."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.protocols = [Protocol(size, _mismatch) for _ in range(size)]
        self.pipes = {pair: bytearray() for pair in itertools.permutations(range(size), 2)}

    def send(self, rank: int, to: int, data: np.ndarray, tag: int = 0, dtype: str = "") -> Transfer:
        return self._post(rank, "send", to, data, tag, dtype)

    def recv(self, rank: int, source: int, out: np.ndarray, tag: int = 0, dtype: str = ""):
        return self._post(rank, "recv", source, out, tag, dtype)

    def _post(self, rank, kind, peer, data, tag, dtype) -> Transfer:
        operation = Operation(
            kind, 0, dtype=dtype or data.dtype.name, peer=peer, tag=tag,
            source=data if kind == "send" else None, target=data if kind == "recv" else None,
        )  # fmt: skip
        transfer = Transfer(operation)
        self.protocols[rank].post(transfer)
        return transfer

    def step(self) -> bool:
        """Move some bytes on each pipe; return whether any moved."""
        moved = False
        for (sender, receiver), pipe in self.pipes.items():
            moved |= self._write(sender, receiver, pipe)
            moved |= self._read(sender, receiver, pipe)
        return moved

    def _write(self, sender: int, receiver: int, pipe: bytearray) -> bool:
        views = self.protocols[sender].outgoing(receiver)
        left = count = self.random.choice((1, 63, 64, 65, 5000, 1 << 21))
        for view in views:
            pipe += view[:left]
            left -= min(left, len(view))
        self.protocols[sender].wrote(receiver, count - left) if views else None
        return bool(views)

    def _read(self, sender: int, receiver: int, pipe: bytearray) -> bool:
        moved = False
        while pipe and self.random.random() < 0.9:
            view = self.protocols[receiver].incoming(sender)
            count = min(len(view), len(pipe), self.random.choice((1, 64, 100, 1 << 21)))
            view[:count] = pipe[:count]
            del pipe[:count]
            self.protocols[receiver].read(sender, view, count)
            moved = True
        return moved

    def run(self) -> None:
        idle = 0
        while idle < 20:
            idle = 0 if self.step() else idle + 1


SIZES = (0, 1, 100, 70_000, 300_000, 3_000_000)


def test_receives_in_the_other_order_of_tags_get_what_was_sent_to_them():
    ranks = Ranks(2)
    outs = {tag: np.zeros(3_000_000, np.uint8) for tag in (5, 9)}
    sends = [ranks.send(0, 1, np.full(3_000_000, tag, np.uint8), tag) for tag in (5, 9)]
    for tag in (9, 5):
        receive = ranks.recv(1, 0, outs[tag], tag)
        ranks.run()
        assert receive.done, tag
        assert (outs[tag] == tag).all()
    assert all(send.done and send.error is None for send in sends)


def test_messages_of_one_tag_stay_in_order_around_a_receive_of_another():
    ranks = Ranks(2, seed=4)
    last = ranks.recv(1, 0, np.zeros(1, np.int64), tag=5)
    outs = [np.zeros(1, np.int64) for _ in range(2000)]
    for number, out in enumerate(outs):
        ranks.send(0, 1, np.array([number]), tag=7)
        ranks.step()
        if number % 3 == 0:
            ranks.recv(1, 0, out, tag=7)
    for number, out in enumerate(outs):
        if number % 3:
            ranks.recv(1, 0, out, tag=7)
    ranks.run()
    order = [n for n in range(2000) if n % 3 == 0] + [n for n in range(2000) if n % 3]
    assert [int(outs[n][0]) for n in order] == list(range(2000))
    assert not last.done


def test_early_messages_take_a_bounded_amount_of_memory(monkeypatch):
    monkeypatch.setattr(protocol_module, "WINDOW_BYTES", 10_000)
    ranks = Ranks(2)
    for out in ranks.protocols:
        out._outbox(0).credit = out._outbox(1).credit = 10_000
    sends = [ranks.send(0, 1, np.full(1000, n % 100, np.uint8)) for n in range(100)]
    ranks.run()
    early = ranks.protocols[1]._matcher._early[0][0]
    assert sum(len(one.body or b"") for one in early) <= 10_000
    assert sum(send.done for send in sends) == 9
    outs = [np.zeros(1000, np.uint8) for _ in range(100)]
    receives = [ranks.recv(1, 0, out) for out in outs]
    ranks.run()
    assert all(one.done for one in (*sends, *receives))
    assert [int(out[0]) for out in outs] == [n % 100 for n in range(100)]
    assert ranks.protocols[0]._outbox(1).credit > 5_000, "taken messages give credit back"


def test_a_small_message_overtakes_a_large_one_that_is_on_its_way():
    ranks = Ranks(2)
    big = np.zeros(20 << 20, np.uint8)
    large = ranks.send(0, 1, big, tag=1)
    ranks.recv(1, 0, np.empty_like(big), tag=1)
    while not large.moved:
        ranks.step()
    ranks.send(0, 1, np.ones(1), tag=2)
    small = ranks.recv(1, 0, np.zeros(1), tag=2)
    while not small.done:
        ranks.step()
    assert not large.done


def test_receives_from_any_source_take_messages_in_the_order_of_arrival():
    ranks = Ranks(3)
    ranks.send(2, 0, np.array([2]))
    ranks.run()
    ranks.send(1, 0, np.array([1]))
    ranks.run()
    outs = [np.zeros(1, np.int64) for _ in range(4)]
    first, second = (ranks.recv(0, ANY_SOURCE, out) for out in outs[:2])
    assert (first.source, second.source) == (2, 1)
    third = ranks.recv(0, 1, outs[2])
    fourth = ranks.recv(0, ANY_SOURCE, outs[3])
    ranks.send(1, 0, np.array([11]))
    ranks.run()
    assert third.done, "it was posted before the receive from any source"
    assert not fourth.done
    ranks.send(1, 0, np.array([12]))
    ranks.run()
    assert fourth.source == 1
    assert [int(out[0]) for out in outs] == [2, 1, 11, 12]


LONG = "float8_" + "e4m3b11fnuz" * 5


@pytest.mark.parametrize(("sent", "wanted"), [("float32", "int32"), (LONG + "a", LONG + "b")])
@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_receive_of_another_dtype_fails_and_says_what_was_sent(sent, wanted, size, is_early):
    ranks = Ranks(2)
    x, out = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    if is_early:
        ranks.send(0, 1, x, dtype=sent)
        ranks.run()
        receive = ranks.recv(1, 0, out, dtype=wanted)
    else:
        receive = ranks.recv(1, 0, out, dtype=wanted)
        ranks.send(0, 1, x, dtype=sent)
        ranks.run()
    assert isinstance(receive.error, TypeError)
    assert f"{size} bytes" in str(receive.error)
    assert not out.any()
    ranks.send(0, 1, x, tag=3)
    after = ranks.recv(1, 0, out, tag=3)
    ranks.run()
    assert after.done, "the stream is still in step"


def test_a_dtype_of_any_length_is_told_from_others():
    names = ["float32", "float8_e4m3b11fnuz", LONG, LONG + "x", "f" * 32, "f" * 33]
    assert len({dtype_key(name) for name in names}) == len(names)
    assert max(len(dtype_key(name)) for name in names) <= 32


def test_what_a_lost_peer_sent_whole_can_be_received_and_nothing_else():
    ranks = Ranks(3)
    ranks.send(1, 0, np.array([7]), tag=1)
    ranks.send(1, 0, np.zeros(1 << 20, np.uint8), tag=2)
    ranks.run()
    waiting = ranks.recv(0, 1, np.zeros(1), tag=9)
    offered = ranks.send(0, 1, np.zeros(1 << 20, np.uint8))
    anyone = ranks.recv(0, ANY_SOURCE, np.zeros(1, np.int64), tag=3)
    ranks.protocols[0].lost(1, OSError("gone"))
    assert [type(one.error) for one in (waiting, offered)] == [OSError, OSError]
    out = np.zeros(1, np.int64)
    assert ranks.recv(0, 1, out, tag=1).error is None
    assert out[0] == 7
    later = [
        ranks.recv(0, 1, np.zeros(1 << 20, np.uint8), tag=2),
        ranks.recv(0, 1, out, tag=1),
        ranks.send(0, 1, out),
    ]
    assert [type(one.error) for one in later] == [OSError] * 3
    assert not anyone.done
    ranks.send(2, 0, np.array([5]), tag=3)
    ranks.run()
    assert anyone.source == 2
    last = ranks.recv(0, ANY_SOURCE, out, tag=4)
    ranks.protocols[0].lost(2, OSError("gone too"))
    assert isinstance(last.error, OSError)


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 64,
        pack(FrameKind.GRANT, number=3),
        pack(FrameKind.DATA, number=3, size=10),
        pack(FrameKind.EAGER, size=1 << 40),
    ],
)
def test_bytes_that_no_rank_would_send_are_refused(frame):
    ranks = Ranks(2)
    view = ranks.protocols[0].incoming(1)
    view[:64] = frame
    with pytest.raises(FrameError):
        ranks.protocols[0].read(1, view, 64)


@pytest.mark.parametrize("seed", range(30))
def test_random_schedules_deliver_every_message_to_its_receive(seed):
    """Posts and partial reads interleave at random, receives in any order of pairs and tags."""
    chance = random.Random(seed)
    size = chance.choice((2, 3, 5))
    ranks = Ranks(size, seed)
    posts, expected, all_posted = [], [], []
    lanes = [(a, b, tag) for a, b in itertools.permutations(range(size), 2) for tag in range(2)]
    for a, b, tag in lanes:
        for number in range(chance.randint(0, 6)):
            length = chance.choice(SIZES[:5] if seed % 5 else SIZES)
            data = np.random.default_rng(seed * 1000 + number).integers(0, 255, length, np.uint8)
            out = np.zeros(length, np.uint8)
            posts.append(((a, b, tag, "send"), (ranks.send, a, b, data, tag)))
            posts.append(((a, b, tag, "recv"), (ranks.recv, b, a, out, tag)))
            expected.append((out, data))
    queues: dict = {}
    for key, post in posts:
        queues.setdefault(key, []).append(post)
    while queues:
        key = chance.choice(sorted(queues))
        call, *args = queues[key].pop(0)
        all_posted.append(call(*args))
        if not queues[key]:
            del queues[key]
        if chance.random() < 0.5:
            ranks.step()
    ranks.run()
    assert all(one.done and one.error is None for one in all_posted)
    assert all((out == data).all() for out, data in expected)
    assert not any(one._matcher._early or one._matcher._posted for one in ranks.protocols)


def test_the_death_of_a_rank_does_not_end_a_receive_whose_message_may_have_arrived():
    """A rank may send, exit, and be known to be dead before its bytes are read."""
    checked = []

    class Watch:
        deadline_s = float("inf")

        def check(self, needed=None):
            checked.append(needed())

    receive = Transfer(
        Operation("recv", 0, dtype="uint8", peer=2, target=np.zeros(1, np.uint8)), Watch()
    )
    receive.check()
    receive.has_unread = lambda peer: peer == 2
    receive.check()
    Watch.deadline_s = 0.0  # unread bytes, of other tags perhaps, do not hide a deadline
    receive.check()
    assert checked == [[2], [], [2]]
