"""The parser: every prefix, any split, random bytes; and the encoders against it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import StoreProtocolError
from echelon.store.wire import protocol as p
from echelon.store.wire.limits import Limits
from echelon.store.wire.parser import Parser, expand_run
from tests.store.peers import OPENING

SETTINGS = settings(derandomize=True, max_examples=150, deadline=None, database=None)
LIMITS = Limits(key_bytes=40, value_bytes=300, num_command_keys=30, command_bytes=4000)

keys = st.binary(max_size=LIMITS.key_bytes)
values = st.binary(max_size=60)
numbers = st.integers(-(1 << 63), (1 << 63) - 1)
tags = st.integers(0, 0xFFFFFFFF)
key_lists = st.lists(keys, max_size=6)
pairs = st.lists(st.tuples(keys, values), max_size=6).map(lambda ps: [x for p_ in ps for x in p_])

messages = st.one_of(
    st.tuples(st.sampled_from([p.SET, p.APPEND, p.QUEUE_PUSH]), keys, values),
    st.tuples(st.sampled_from([p.ACK_SET, p.ACK_APPEND, p.ACK_PUSH]), tags, keys, values),
    st.tuples(st.sampled_from([p.GET, p.DELETE_KEY, p.QUEUE_POP]), keys),
    st.tuples(st.sampled_from([p.GET_IF, p.AWAIT_GET, p.AWAIT_POP, p.RELEASE]), tags, keys),
    st.tuples(st.sampled_from([p.ADD, p.BARRIER]), keys, numbers),
    st.tuples(st.just(p.ACK_ADD), tags, keys, numbers),
    st.tuples(st.just(p.PRESENCE), tags, keys, values, numbers),
    st.tuples(st.sampled_from([p.CHECK, p.WAIT, p.MULTI_GET]), key_lists),
    st.tuples(st.sampled_from([p.WATCH, p.AWAIT, p.CHECK_EACH]), tags, key_lists),
    st.tuples(st.just(p.ACK_MULTI_SET), tags, pairs),
    st.tuples(st.just(p.MULTI_SET), pairs),
    st.tuples(st.just(p.COMPARE_SET), keys, values, values),
    st.tuples(st.just(p.GATHER), tags, keys, numbers, numbers, values),
    st.tuples(st.just(p.ARRIVE), tags, keys, numbers, numbers),
    st.tuples(st.just(p.PING), st.integers(0, 0xFFFFFFFF)),
    st.tuples(st.sampled_from([p.NUM_KEYS, p.LIST_KEYS, p.CANCEL_WAIT])),
    st.tuples(st.sampled_from([p.CANCEL, p.STATISTICS, p.BEAT]), tags),
)
# Floods of commands of equal lengths go through a path of their own.
runs = st.tuples(messages, st.integers(1, 40)).map(lambda pair: [pair[0]] * pair[1])
traffic = st.lists(runs, max_size=5).map(lambda found: [m for run in found for m in run])


def encode(message: p.Message) -> bytes:
    return (p.tagged if message[0] >= p.TAGGED else p.encode)(*message)


def member() -> Parser:
    parser = Parser(LIMITS)
    parser.admitted = True
    assert parser.feed(OPENING + p.encode(p.PING, p.OUR_NONCE)) == [(p.PING, p.OUR_NONCE)]
    return parser


def one_by_one(messages: list[p.Message]) -> list[p.Message]:
    """Return messages with runs taken apart."""
    return [m for each in messages for m in (expand_run(each) if each[0] >= p.RUN else [each])]


def feed_in_pieces(parser: Parser, data: bytes, cuts: list[int]) -> list[p.Message]:
    found: list[p.Message] = []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        found += one_by_one(parser.feed(data[start:end]))
    return found


@SETTINGS
@given(traffic, st.lists(st.integers(0, 10_000), max_size=12))
def test_what_is_encoded_is_parsed_however_it_is_split(sent, cuts):
    data = b"".join(encode(message) for message in sent)
    parser = member()
    assert feed_in_pieces(parser, data, cuts) == sent
    assert parser.violation is None
    assert not parser.is_inside_command


@SETTINGS
@given(traffic)
def test_byte_by_byte_and_all_at_once_are_the_same(sent):
    data = b"".join(encode(message) for message in sent)
    assert feed_in_pieces(member(), data, list(range(len(data)))) == sent


@settings(SETTINGS, max_examples=40)
@given(st.lists(messages, min_size=1, max_size=3))
def test_every_prefix_yields_the_whole_commands_in_it(sent):
    data = b"".join(encode(message) for message in sent)
    ends, end = [], 0
    for message in sent:
        end += len(encode(message))
        ends.append(end)
    for size in range(len(data) + 1):
        parser = member()
        assert one_by_one(parser.feed(data[:size])) == [
            m for m, e in zip(sent, ends, strict=True) if e <= size
        ]
        assert parser.violation is None
        assert parser.is_inside_command == (size > 0 and size not in ends)


@SETTINGS
@given(st.binary(max_size=400), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_random_bytes_end_alike_however_they_are_split(noise, cuts, is_member):
    def parse(pieces):
        parser = member() if is_member else Parser(LIMITS)
        found = feed_in_pieces(parser, noise, pieces)
        return found, parser.violation

    assert parse(cuts) == parse([])


@SETTINGS
@given(st.binary(max_size=200), traffic)
def test_nothing_passes_after_a_violation(noise, sent):
    parser = member()
    parser.feed(b"\xee" + noise)
    assert parser.violation == "unknown query 0xee"
    assert parser.feed(b"".join(encode(message) for message in sent)) == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (bytes((p.SET,)) + p.pack_u64(41), "the key has 41 bytes"),
        (bytes((p.SET,)) + p.pack_u64(1 << 63), "the key has"),
        (bytes((p.SET,)) + p.pack_string(b"k") + p.pack_u64(301), "the value has 301 bytes"),
        (bytes((p.CHECK,)) + p.pack_u64(31), "CHECK has 31 keys"),
        (bytes((p.MULTI_SET,)) + p.pack_u64((1 << 64) - 1), "MULTI_SET has"),
        (p.encode(p.MULTI_SET, [b"k", bytes(300)] * 20), "is larger than the limit"),
        (b"\x13", "unknown query 0x13"),
        (bytes((p.VALIDATE,)), "unknown query 0x00"),
    ],
)
def test_limits_are_held_before_the_bytes_come(command, why):
    parser = member()
    parser.feed(command)
    assert parser.violation is not None
    assert why in parser.violation


def test_a_stranger_gets_small_commands_only():
    parser = Parser(Limits(untrusted_bytes=100))
    parser.feed(OPENING + bytes((p.SET,)) + p.pack_u64(200))
    assert parser.violation == "SET: the command is larger than the limit"


def test_our_queries_need_our_announcement():
    parser = Parser(LIMITS)
    parser.admitted = True
    parser.feed(OPENING + p.tagged(p.AWAIT_GET, 1, b"k"))
    assert parser.violation == "unknown query 0xc7"


@SETTINGS
@given(st.lists(st.binary(max_size=50), max_size=10), st.integers(1, 20))
def test_strings_of_a_reply_are_whole_or_refused(strings, cut):
    payload = p.pack_strings(strings)
    assert p.unpack_strings(payload) == strings
    if strings:
        with pytest.raises(StoreProtocolError, match="ends in the middle of a"):
            p.unpack_strings(payload[: len(payload) - min(cut, len(strings[-1]) + 7)])


@pytest.mark.parametrize(
    "odd",
    [
        (p.SET, b"key", bytes(261)),  # the length's low byte is that of its neighbors
        (p.APPEND, b"key", b"value"),
        (p.SET, b"keys", b"valu"),
        (p.GET, b"key"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 9, 19, 20])
def test_a_run_of_equal_commands_ends_where_one_differs(odd, position):
    sent = [(p.SET, b"k%02d" % i, b"val%02d" % i) for i in range(20)]
    sent.insert(position, odd)
    parser = member()
    assert one_by_one(parser.feed(b"".join(encode(message) for message in sent))) == sent
