"""One contract for every store: what torch's API promises, and gather and the rest beside it."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store import FileStore, MemoryStore, PrefixStore, StoreServer, TCPStore
from tests.store.peers import PATIENCE_S, Background, until

SHORT = 0.05
_NUM_LOOKS = 20  # calls of the test while another must wait: time enough for one that does not


def timed_out(call) -> StoreTimeoutError:
    """Return the error of a call that times out, from a server that had the time to say why.

    What is missing is not known where a busy machine does not answer within `SHORT`.
    """
    for timeout_s in (SHORT, 1.0, 30.0):
        with pytest.raises(StoreTimeoutError) as failure:
            call(timeout_s)
        if failure.value.missing:
            break
    return failure.value


@contextmanager
def memory(_):
    yield MemoryStore(20.0)


@contextmanager
def file(folder):
    with FileStore(folder / "store", timeout=20.0) as store:
        yield store


@contextmanager
def on_our_server(_):
    with StoreServer() as server, TCPStore("127.0.0.1", server.port, timeout=20.0) as store:
        yield store


@contextmanager
def on_torch_server(_):
    distributed = pytest.importorskip("torch.distributed")
    host = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with TCPStore("127.0.0.1", host.port, timeout=20.0) as store:
        assert not store.has_extensions
        yield store
    del host


@contextmanager
def behind_prefixes(folder):
    with on_our_server(folder) as store:
        yield PrefixStore("outer", PrefixStore("inner", store))


@contextmanager
def prefix_on_memory(_):
    yield PrefixStore("p", MemoryStore(20.0))


MAKERS = [memory, file, on_our_server, on_torch_server, behind_prefixes, prefix_on_memory]


@pytest.fixture(params=MAKERS, ids=lambda maker: maker.__name__)
def store(request, tmp_path):
    with request.param(tmp_path) as made:
        yield made


@pytest.fixture
def twins(store, closing):
    """Make further stores on the same keys."""
    return lambda count: [store] + [closing(store.clone()) for _ in range(count - 1)]


def test_get_returns_what_set_stored(store):
    store.set("text", "grün")
    store.set("bytes", b"\x00\xff")
    store.set("empty", b"")
    assert (store.get("text"), store.get("bytes"), store.get("empty")) == (
        "grün".encode(),
        b"\x00\xff",
        b"",
    )


def test_get_waits_for_the_key(store, twins):
    _, other = twins(2)
    waiting = Background(lambda: other.get("late"))
    store.set("unrelated", b"1")
    store.set("late", b"here")
    assert waiting.result() == b"here"


def test_get_times_out_and_names_the_key(store):
    failure = timed_out(lambda short: store.get("never", timeout=timedelta(seconds=short)))
    assert re.match(r"get\('.*never'\)", str(failure))
    assert [key.rpartition("/")[2] for key in failure.missing] == ["never"]
    assert isinstance(failure, TimeoutError)
    store.set("never", b"now")
    assert store.get("never") == b"now"


def test_add_counts_in_decimal(store):
    assert [store.add("n", 5), store.add("n", -7), store.add("n", 0)] == [5, -2, -2]
    assert store.get("n") == b"-2"
    store.set("n", "40")
    assert store.add("n", 2) == 42


def test_append_extends(store):
    store.append("log", "a")
    store.append("log", b"b")
    assert store.get("log") == b"ab"


def test_check_says_whether_all_are_there(store):
    store.set("a", b"1")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.check([])


@pytest.mark.parametrize(
    ("held", "expected", "desired", "answer", "after"),
    [
        (None, b"", b"new", b"new", b"new"),
        (None, b"old", b"new", b"old", None),
        (b"old", b"old", b"new", b"new", b"new"),
        (b"other", b"old", b"new", b"other", b"other"),
        (b"", b"", b"new", b"new", b"new"),
    ],
)
def test_compare_set(store, held, expected, desired, answer, after):
    if held is not None:
        store.set("k", held)
    assert store.compare_set("k", expected, desired) == answer
    assert store.check(["k"]) == (after is not None)
    if after is not None:
        assert store.get("k") == after


def test_delete_key_says_whether_it_was_there(store):
    store.set("k", b"1")
    assert store.delete_key("k")
    assert not store.delete_key("k")
    assert not store.check(["k"])


class Waiting(Background):
    """A call of a store that has begun to wait; notes in `order` when it has returned.

    A call that does not wait at all is found out: the test makes calls of its own before the event.
    """

    def __init__(self, store, call, order: list[str]) -> None:
        has_begun = threading.Event()

        @contextmanager
        def observer(_operation, _key):
            has_begun.set()
            yield

        store.observer = observer
        super().__init__(lambda: (call(), order.append("returned")))
        assert has_begun.wait(PATIENCE_S)
        store.observer = None


def test_wait_returns_when_all_keys_are_there(store, twins):
    _, other = twins(2)
    order: list[str] = []
    waiting = Waiting(other, lambda: other.wait(["a", "b"]), order)
    store.set_confirmed("a", b"1")
    for _ in range(_NUM_LOOKS):
        assert not store.check(["b"])
    assert not waiting.is_done
    order.append("set")
    store.set("b", b"2")
    waiting.result()
    assert order == ["set", "returned"]


def test_wait_names_only_the_keys_that_are_missing(store):
    store.set("a", b"1")
    failure = timed_out(lambda short: store.wait(["a", "b", "c"], short))
    assert [key.rpartition("/")[2] for key in failure.missing] == ["b", "c"]


def test_list_and_number_of_keys(store):
    before = store.num_keys()
    store.multi_set(["x/1", "x/2"], [b"1", b"2"])
    assert store.num_keys() == before + 2
    assert {"x/1", "x/2"} <= set(store.list_keys())


def test_multi_get_waits_for_all(store, twins):
    _, other = twins(2)
    waiting = Background(lambda: other.multi_get(["m1", "m2"]))
    store.set("m2", b"two")
    store.multi_set(["m1"], ["one"])
    assert waiting.result() == [b"one", b"two"]
    assert store.multi_get([]) == []


def test_multi_get_names_what_is_missing(store):
    store.set("m1", b"1")
    failure = timed_out(lambda short: store.multi_get(["m1", "m2"], short))
    assert [key.rpartition("/")[2] for key in failure.missing] == ["m2"]


def test_queues_are_first_in_first_out(store):
    store.queue_push("q", b"1")
    store.queue_push("q", "2")
    assert store.queue_len("q") == 2
    assert [store.queue_pop("q"), store.queue_pop("q", block=False)] == [b"1", b"2"]
    assert store.queue_len("q") == 0
    with pytest.raises(StoreError, match="the queue is empty"):
        store.queue_pop("q", block=False)


def test_queue_pop_waits_for_an_item(store, twins):
    _, other = twins(2)
    waiting = Background(lambda: other.queue_pop("q"))
    store.queue_push("q", b"item")
    assert waiting.result() == b"item"
    with pytest.raises(StoreTimeoutError, match="queue_pop"):
        store.queue_pop("q", timeout=SHORT)


def test_gather_returns_everyones_value_in_rank_order_round_after_round(store, twins):
    ranks = twins(3)
    for number in range(3):
        calls = [
            Background(lambda r=r, s=s, n=number: s.gather("g", r, 3, f"{n}.{r}"))
            for r, s in enumerate(ranks)
        ]
        expected = [f"{number}.{rank}".encode() for rank in range(3)]
        assert [call.result() for call in calls] == [expected] * 3


def test_gather_names_the_ranks_that_did_not_come_and_can_be_tried_again(store, twins):
    first, second = twins(2)
    failure = timed_out(lambda short: first.gather("g", 0, 2, b"early", timeout=short))
    assert "1 of 2 ranks arrived (missing: 1)" in str(failure)
    assert failure.missing == (1,)
    calls = [
        Background(lambda: first.gather("g", 0, 2, b"a")),
        Background(lambda: second.gather("g", 1, 2, b"b")),
    ]
    assert [call.result() for call in calls] == [[b"a", b"b"]] * 2


def test_gather_of_one(store):
    assert store.gather("solo", 0, 1, b"me") == [b"me"]


def test_barrier_with_ranks_holds_until_all_came_and_can_be_used_again(store, twins):
    ranks = twins(2)
    for _ in range(2):
        order: list[str] = []
        early = Waiting(ranks[0], lambda: ranks[0].barrier("b", 2, rank=0), order)
        for _ in range(_NUM_LOOKS):
            ranks[1].check(["other"])
        assert not early.is_done
        order.append("came")
        ranks[1].barrier("b", 2, rank=1)
        early.result()
        assert order == ["came", "returned"]
    failure = timed_out(lambda short: ranks[1].barrier("b", 2, short, rank=1))
    assert failure.missing == (0,)


def test_pipeline_answers_in_order(store):
    with store.pipeline() as pipe:
        replies = [
            pipe.set("x", b"1"),
            pipe.get("x"),
            pipe.get("none"),
            pipe.add("x", 2),
            pipe.append("x", b"0"),
            pipe.compare_set("x", b"30", b"31"),
            pipe.check("x"),
            pipe.queue_push("q", b"i"),
            pipe.queue_len("q"),
            pipe.delete_key("x"),
            pipe.check("x"),
        ]
    assert [reply.value for reply in replies] == [
        None, b"1", None, 3, None, b"31", True, None, 1, True, False,
    ]  # fmt: skip


def test_pipeline_longer_than_a_socket_buffer(store):
    num = 300 if isinstance(store, FileStore) else 3000
    with store.pipeline() as pipe:
        for i in range(num):
            pipe.set(f"k{i}", bytes(500))
        replies = [pipe.get(f"k{i}") for i in range(num)]
    assert all(reply.value == bytes(500) for reply in replies)


def test_a_pipeline_that_fails_sends_nothing(store):
    replies = []

    def fail():
        with store.pipeline() as pipe:
            replies.append(pipe.set("x", b"1"))
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert not store.check(["x"])
    with pytest.raises(RuntimeError, match="not been sent"):
        _ = replies[0].value


def test_watch_tells_of_changes(store, twins):
    _, other = twins(2)
    other.set("w", b"0")
    with store.watch(["w", "v"]) as watch:
        other.set_confirmed("w", b"1")
        change = watch.next(20.0)
        assert (change.key, change.value) == ("w", b"1")
        other.delete_key("w")
        change = watch.next(20.0)
        assert (change.key, change.value) == ("w", None)
        with pytest.raises(StoreTimeoutError, match="nothing changed"):
            watch.next(SHORT)


def test_presence_ends_with_its_owner(store, twins):
    _, other = twins(2)
    with other.presence("here", b"42"):
        assert store.get("here") == b"42"
    assert not store.check(["here"])


def test_set_confirmed_is_there_for_others_at_once(store, twins):
    _, other = twins(2)
    for number in range(20):
        store.set_confirmed("c", str(number))
        assert other.get("c") == str(number).encode()


def test_observer_sees_calls_that_may_wait_and_travels_through_prefixes(store):
    from contextlib import contextmanager

    seen = []

    @contextmanager
    def observer(operation, key):
        seen.append((operation, key.rpartition("/")[2]))
        yield
        seen.append("end")

    store.observer = observer
    PrefixStore("deeper", store).set("k", b"1")
    assert PrefixStore("deeper", store).get("k") == b"1"
    store.wait(["deeper/k"])
    store.gather("g", 0, 1, b"")
    store.barrier("b", 1, rank=0)
    store.queue_push("q", b"")
    store.queue_pop("q")
    store.observer = None
    store.get("deeper/k")
    assert seen == [
        step
        for operation, key in (
            ("get", "k"), ("wait", "k"), ("gather", "g"), ("barrier", "b"), ("queue_pop", "q"),
        )
        for step in ((operation, key), "end")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda s: s.set(b"key", b""), TypeError),
        (lambda s: s.set("k", 5), TypeError),
        (lambda s: s.wait("abc"), TypeError),
        (lambda s: s.set("k" * 9000, b""), ValueError),
        (lambda s: s.set("k", bytes((8 << 20) + 1)), ValueError),
        (lambda s: s.add("k", 1 << 63), ValueError),
        (lambda s: s.get("k", timeout=0), ValueError),
        (lambda s: s.get("k", timeout=float("inf")), ValueError),
        (lambda s: s.gather("g", 2, 2, b""), ValueError),
        (lambda s: s.gather("g", 0, 0, b""), ValueError),
        (lambda s: s.barrier("g", 2, rank=-1), ValueError),
        (lambda s: s.multi_set(["a"], []), ValueError),
    ],
)
def test_a_callers_mistake_is_told_before_anything_is_sent(store, call, error):
    with pytest.raises(error):
        call(store)
    assert not store.check(["k"])


def test_timeouts_are_torchs(store):
    store.set_timeout(timedelta(seconds=7))
    assert store.timeout == timedelta(seconds=7)
    assert store.has_extended_api()
    store.set_timeout(SHORT)
    with pytest.raises(StoreTimeoutError):
        store.get("never")


def test_calls_of_several_threads_do_not_stop_each_other(store):
    blocked = [Background(lambda i=i: store.get(f"gate{i}")) for i in range(3)]
    workers = [Background(lambda: [store.add("n", 1) for _ in range(50)]) for _ in range(4)]
    for worker in workers:
        worker.result()
    assert store.add("n", 0) == 200
    assert not any(call.is_done for call in blocked)
    for i in range(3):
        store.set(f"gate{i}", str(i))
    assert [call.result() for call in blocked] == [b"0", b"1", b"2"]


def test_a_deleted_key_is_waited_for_again(store, twins):
    """A wait for two keys must not end on one that was there once."""
    if isinstance(store, TCPStore) and not store.has_extensions:
        pytest.skip("torch's server wakes on what was there once")
    _, other = twins(2)
    store.set("a", b"1")
    waiting = Background(lambda: other.wait(["a", "b"]))
    if isinstance(store, TCPStore):
        until(lambda: store.statistics().num_waiters, "the wait is open")
    store.delete_key("a")
    store.set("b", b"2")
    store.set("a", b"3")
    waiting.result()
