"""What is recorded of an operation is what a reader gets."""

from __future__ import annotations

import sys
import threading
from zlib import crc32

import numpy as np
import pytest

from echelon.recorder.format.schema import (
    MAX_DIMS,
    MAX_SPLITS,
    MAX_TENSORS,
    NUM_KEPT,
    Flag,
    Group,
    Live,
    Signature,
    State,
)
from echelon.recorder.read import LiveRing
from echelon.recorder.write.recorder import Recorder
from tests.recorder.conftest import NUM_OPERATIONS


def test_every_field_of_a_collective_comes_back(recorder, look):
    recorder.step(41)
    group = recorder.group("dp", (1, 3, 5, 7))
    number = recorder.begin(
        group,
        "reduce_scatter",
        sequence=4812,
        dtype="bfloat16",
        shapes=((1024, 4096), (3,)),
        num_bytes=1 << 40,
        reduce_op="avg",
        root=5,
        coalesced=2,
        timeout_s=600.5,
        flags=Flag.ASYNC,
        depth=0,
    )
    record = look()
    (row,) = record.operations
    assert record.groups[row["group"]] == Group("dp", (1, 3, 5, 7))
    assert record.signatures[row["signature"]] == Signature("bfloat16", ((1024, 4096), (3,)))
    assert [record.strings[row[name]] for name in ("operation", "reduce_op", "error")] == [
        "reduce_scatter",
        "avg",
        "",
    ]
    names = "record sequence p2p_sequence step num_bytes timeout_ms root peer tag coalesced flags"
    assert {name: int(row[name]) for name in names.split()} == {
        "record": number,
        "sequence": 4812,
        "p2p_sequence": -1,
        "step": 41,
        "num_bytes": 1 << 40,
        "timeout_ms": 600500,
        "root": 5,
        "peer": -1,
        "tag": -1,
        "coalesced": 2,
        "flags": Flag.ASYNC,
    }
    assert row["thread"] == threading.get_native_id()
    assert record.warnings == ()


def test_every_field_of_a_send_comes_back(recorder, look):
    recorder.begin(
        recorder.group("pp", (0, 3)),
        "send",
        p2p_sequence=17,
        peer=0,
        tag=-(1 << 31),
        flags=Flag.P2P | Flag.ASYNC,
    )
    (row,) = look().operations
    assert (row["sequence"], row["p2p_sequence"], row["peer"]) == (-1, 17, 0)
    assert (row["tag"], row["flags"], row["root"]) == (-(1 << 31), Flag.P2P | Flag.ASYNC, -1)


def test_the_call_site_is_the_line_that_called(recorder, look):
    def train() -> None:
        recorder.begin(0, "barrier", depth=0)

    line = train.__code__.co_firstlineno + 1
    train()
    record = look()
    (row,) = record.operations
    assert record.strings[row["site"]] == f"{__file__}:{line} train"
    innermost, caller = record.strings[row["stack"]].splitlines()[:2]
    assert innermost == record.strings[row["site"]]
    assert caller.endswith("test_the_call_site_is_the_line_that_called")


def test_one_line_called_from_two_places_has_two_stacks(recorder, look):
    def train() -> None:
        recorder.begin(0, "barrier", depth=0)

    train()
    train()
    first, second = look().operations
    assert first["site"] == second["site"]
    assert first["stack"] != second["stack"]


def test_each_of_four_frames_tells_two_stacks_apart(recorder, look):
    """Of a line that is called again and again, the last stack is never taken for the next one."""

    def first() -> None:
        recorder.completed(recorder.begin(0, "barrier"))

    def second(is_other: int) -> None:
        if is_other:
            first()
        else:
            first()

    def third(is_other: int, *others: int) -> None:
        if is_other:
            second(*others)
        else:
            second(*others)

    def fourth(is_other: int, *others: int) -> None:
        if is_other:
            third(*others)
        else:
            third(*others)

    stacks = []
    for number in range(16):
        gray = number ^ (number >> 1)  # one caller changes at a time
        others = gray >> 2 & 1, gray >> 1 & 1, gray & 1
        fourth(*others)
        record = look()
        stacks.append(record.strings[record.operations[-1]["stack"]])
        lines = [int(line.rpartition(":")[2].split()[0]) for line in stacks[-1].splitlines()]
        starts = [one.__code__.co_firstlineno for one in (second, third, fourth)]
        offsets = [line - start for line, start in zip(lines[1:], starts, strict=True)]
        assert offsets == [2 if is_other else 4 for is_other in reversed(others)]
    assert len(set(stacks)) == 8


def test_a_line_found_under_the_key_of_another_is_not_taken_for_it(recorder, look):
    """The key is an address plus an offset, which two lines could share."""

    def first() -> None:
        recorder.begin(0, "barrier")

    def second() -> None:
        recorder.begin(0, "barrier")

    for is_again in (False, True):
        if is_again and not recorder.is_in_c:
            lines = recorder.begin.__self__._lines
            (one, line), (other, other_line) = lines.items()
            lines |= {one: other_line, other: line}
        for train in (first, second):
            train()
    record = look()
    sites = [record.strings[row["site"]].rpartition(" ")[2] for row in record.operations]
    assert sites == ["first", "second", "first", "second"]


def test_a_list_that_changed_is_another_signature(recorder, look):
    shape = [3]
    for n in (3, 4, 5):
        shape[0] = n
        recorder.completed(recorder.begin(0, "all_reduce", shapes=[shape]))
    record = look()
    shapes = [record.signatures[row["signature"]].shapes for row in record.operations]
    assert shapes == [((3,),), ((4,),), ((5,),)]


def test_states_follow_the_operation(recorder, look):
    group = recorder.group("world", (3,))
    numbers = [recorder.begin(group, "barrier", sequence=i) for i in range(4)]
    for number in numbers[1:]:
        recorder.started(number)
    recorder.completed(numbers[2])
    recorder.failed(numbers[3], TimeoutError("rank 5 did not come"))
    rows = look().operations
    assert rows["state"].tolist() == [State.CREATED, State.STARTED, State.COMPLETED, State.FAILED]
    assert (rows["started_mono_ns"] > 0).tolist() == [False, True, True, True]
    assert (rows["completed_mono_ns"] > 0).tolist() == [False, False, True, True]
    done = rows[2]
    assert done["created_mono_ns"] <= done["started_mono_ns"] <= done["completed_mono_ns"]
    record = look()
    assert record.strings[record.operations[3]["error"]] == "TimeoutError: rank 5 did not come"


def test_a_start_may_be_recorded_later_with_its_own_time(recorder, look):
    number = recorder.begin(0, "barrier")
    recorder.started(number, 77)
    recorder.completed(number, 99)
    (row,) = look().operations
    assert (row["started_mono_ns"], row["completed_mono_ns"]) == (77, 99)


def test_an_operation_that_never_started_can_end(recorder, look):
    recorder.completed(recorder.begin(0, "barrier"))
    (row,) = look().operations
    assert (row["state"], row["started_mono_ns"]) == (State.COMPLETED, 0)


def test_splits_come_back(recorder, look):
    recorder.begin(0, "all_to_all", shapes=((9,),), input_splits=(0, 4, 5), output_splits=(9, 0))
    record = look()
    assert record.signatures[0] == Signature("", ((9,),), (0, 4, 5), (9, 0))


@pytest.mark.parametrize(
    ("shapes", "inputs", "outputs"),
    [
        (((2, 3),) * (MAX_TENSORS + 1), (), ()),
        (((1,) * (MAX_DIMS + 1),), (), ()),
        (((4,),), (1,) * MAX_SPLITS, (1,)),
    ],
    ids=["tensors", "dims", "splits"],
)
def test_what_does_not_fit_is_summarized(recorder, look, shapes, inputs, outputs):
    recorder.begin(0, "all_to_all", dtype="int8", shapes=shapes, input_splits=inputs,
                   output_splits=outputs)  # fmt: skip
    record = look()
    (row,) = record.operations
    numbers = [n for shape in shapes for n in shape] + [*inputs, *outputs]
    numel = sum(int(np.prod(shape)) for shape in shapes)
    expected = (len(shapes), numel, crc32(np.array(numbers, "<i8").tobytes()))
    assert record.signatures[row["signature"]] == Signature("int8", summary=expected)
    assert row["flags"] & Flag.SUMMARIZED


@pytest.mark.parametrize(
    ("shapes", "inputs", "outputs"),
    [
        (((7,) * MAX_DIMS,) * MAX_TENSORS, (1,) * (MAX_SPLITS - 3), (1, 2, 3)),
        ((), (), ()),
        (((),), (), ()),
        (((0, 5),), (), ()),
    ],
    ids=["all that fits", "nothing", "a scalar", "an empty tensor"],
)
def test_what_fits_comes_back_whole(recorder, look, shapes, inputs, outputs):
    recorder.begin(0, "all_to_all", dtype="float16", shapes=shapes, input_splits=inputs,
                   output_splits=outputs)  # fmt: skip
    assert look().signatures[0] == Signature("float16", shapes, inputs, outputs)


def test_lists_that_differ_only_in_where_they_are_cut_are_two_signatures(recorder, look):
    recorder.begin(0, "all_to_all", input_splits=(1, 2), output_splits=(3,))
    recorder.begin(0, "all_to_all", input_splits=(1,), output_splits=(2, 3))
    assert len(look().signatures) == 2


def test_a_full_ring_keeps_the_newest(recorder, look):
    for i in range(2 * NUM_OPERATIONS + 3):
        recorder.completed(recorder.begin(0, "barrier", sequence=i))
    rows = look().operations
    newest = list(range(NUM_OPERATIONS + 3, 2 * NUM_OPERATIONS + 3))
    assert rows["record"].tolist() == newest
    assert rows["sequence"].tolist() == newest
    assert look().live[Live.NUM_OPERATIONS] == 2 * NUM_OPERATIONS + 3


def test_an_end_that_comes_after_its_slot_was_reused_changes_nothing(recorder, look):
    late = recorder.begin(0, "barrier", sequence=0)
    for i in range(NUM_OPERATIONS):
        recorder.begin(0, "barrier", sequence=i + 1)
    recorder.started(late)
    recorder.completed(late)
    recorder.failed(late, ValueError("late"))
    rows = look().operations
    assert rows["sequence"].tolist() == list(range(1, NUM_OPERATIONS + 1))
    assert set(rows["state"]) == {State.CREATED}


def test_threads_never_share_a_slot(recorder, look):
    numbers: list[list[int]] = [[] for _ in range(4)]

    def work(peer: int) -> None:
        for i in range(500):
            number = recorder.begin(0, "send", peer=peer, tag=peer, sequence=i)
            recorder.completed(number)
            numbers[peer].append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # else one thread is done before the next one runs
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    all_of_them = sorted(number for own in numbers for number in own)
    assert len(set(all_of_them)) == 2000
    record = look()
    # A thread that is put aside for a whole round of the ring takes a later number.
    assert record.live[Live.NUM_OPERATIONS] == all_of_them[-1] + 1
    assert (record.operations["state"] == State.COMPLETED).all()
    assert len(record.operations) == NUM_OPERATIONS
    for row in record.operations:
        assert row["peer"] == row["tag"]
        assert numbers[row["peer"]][row["sequence"]] == row["record"]


def test_a_live_ring_shows_the_oldest_pending_operation(recorder, ring):
    live = LiveRing(ring.path)
    try:
        assert live.pending() == (0, 0)
        done, pending = recorder.begin(0, "barrier"), recorder.begin(0, "barrier")
        recorder.started(pending)
        recorder.completed(done)
        recorder.begin(0, "barrier")
        since, count = live.pending()
        assert count == 2
        assert 0 < since <= live.words()[Live.PROGRESS_MONO_NS]
    finally:
        live.close()


def test_a_pending_operation_outlives_its_slot(recorder, ring, look):
    group = recorder.group("pp", (0, 3))
    hung = recorder.begin(
        group, "recv", p2p_sequence=7, peer=0, dtype="int8", shapes=((9,),), flags=Flag.P2P
    )
    recorder.started(hung)
    for i in range(3 * NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "barrier", sequence=i))
    live = LiveRing(ring.path)
    try:
        record = look()
        row = record.operations[0]
        assert len(record.operations) == NUM_OPERATIONS + 1
        assert (row["record"], row["state"], row["p2p_sequence"]) == (hung, State.STARTED, 7)
        assert row["started_mono_ns"] > 0
        assert record.strings[row["operation"]] == "recv"
        assert record.signatures[row["signature"]] == Signature("int8", ((9,),))
        assert record.groups[row["group"]] == Group("pp", (0, 3))
        assert live.pending() == (row["created_mono_ns"], 1)
        assert live.words()[Live.NUM_KEPT] == 1
        ended = live.sight(3).num_ended
        recorder.completed(hung)
        assert live.pending() == (0, 0)
        assert live.sight(3).num_ended == ended + 1
        assert look().operations["record"].tolist() == list(
            range(2 * NUM_OPERATIONS + 1, 3 * NUM_OPERATIONS + 1)
        )
        assert live.words()[Live.NUM_KEPT] == 0
    finally:
        live.close()


def test_a_pending_operation_may_start_once_it_has_no_slot(recorder, look):
    late = recorder.begin(0, "send", peer=1)
    for _ in range(NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "barrier"))
    assert look().operations[0]["state"] == State.CREATED
    recorder.started(late)
    row = look().operations[0]
    assert (row["record"], row["state"]) == (late, State.STARTED)
    recorder.failed(late, OSError("gone"))
    assert late not in look().operations["record"]


def test_a_kept_operation_keeps_its_signature(recorder, ring, look):
    recorder.begin(0, "all_gather", dtype="float16", shapes=((4, 4),))
    for _ in range(NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "barrier"))
    for i in range(2000):
        ring.texts.recent(f"{i} {'y' * 600}")
    recorder.completed(recorder.begin(0, "barrier"))
    record = look()
    assert record.strings[record.operations[0]["operation"]] == "all_gather"
    assert record.signatures[record.operations[0]["signature"]] == Signature("float16", ((4, 4),))


def test_more_pending_operations_than_places_are_counted(recorder, look):
    for i in range(NUM_KEPT + NUM_OPERATIONS + 5):
        recorder.begin(0, "send", p2p_sequence=i, peer=1)
    record = look()
    assert record.live[Live.NUM_KEPT] == NUM_KEPT
    assert record.live[Live.KEPT_REFUSED] == 5
    assert len(record.operations) == NUM_KEPT + NUM_OPERATIONS
    # The newest ones were not recorded: no pending operation gave way to them.
    assert record.operations["record"].tolist() == list(range(NUM_KEPT + NUM_OPERATIONS))
    assert set(record.operations["state"].tolist()) == {State.CREATED}


def test_later_operations_pass_by_a_slot_that_cannot_be_taken(recorder, ring, look):
    hung = [recorder.begin(0, "send", tag=i) for i in range(NUM_KEPT + 3)]
    for i in range(5 * NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "all_reduce", sequence=i))
    record = look()
    assert record.live[Live.KEPT_REFUSED] == 0
    assert set(hung) <= set(record.operations["record"].tolist())
    newest = [row for row in record.operations if row["state"] == State.COMPLETED]
    assert newest[-1]["sequence"] == 5 * NUM_OPERATIONS - 1
    assert [row["sequence"] for row in newest] == list(
        range(newest[0]["sequence"], 5 * NUM_OPERATIONS)
    )
    for number in hung:
        recorder.completed(number)
    live = LiveRing(ring.path)
    assert live.pending() == (0, 0)
    live.close()


def test_a_signal_handler_that_records_a_whole_round_takes_nothing_away(ring, look):
    """Between the number of an operation and its slot, others go round the whole ring."""
    recorder = Recorder(ring, in_c=False)
    handled = []

    class Late:
        """A field whose conversion stands for a handler that runs between two instructions."""

        def __index__(self) -> int:
            if not handled:
                handled.append(True)
                for i in range(NUM_OPERATIONS + 1):
                    recorder.completed(recorder.begin(0, "barrier", sequence=i))
            return 5

        __int__ = __index__

    outer = recorder.begin(0, "send", sequence=Late())
    rows = look().operations
    assert rows["record"].tolist() == list(range(3, NUM_OPERATIONS + 3))
    assert rows["record"][-1] == outer
    assert rows["sequence"].tolist() == [*range(2, NUM_OPERATIONS + 1), 5]


def test_a_closed_ring_raises_nothing(ring):
    recorder = Recorder(ring, in_c=False)
    number = recorder.begin(0, "barrier")
    ring.close()
    recorder.started(number)
    recorder.completed(number)
    recorder.failed(number, ValueError("late"))
    assert recorder.begin(0, "barrier") == -1


def test_members_of_a_large_group_come_back(recorder, look):
    ranks = tuple(range(0, 16384, 8))
    recorder.begin(recorder.group("dp", ranks), "barrier")
    recorder.begin(recorder.group("odd", (5, 2, 9)), "barrier")
    record = look()
    assert record.groups == [Group("dp", ranks), Group("odd", (5, 2, 9))]


def test_what_a_caller_gets_wrong_never_raises_into_training(recorder, look):
    recorder.begin(0, "send", tag=1 << 40, peer=2)
    recorder.begin(0, "all_reduce", num_bytes=-(1 << 70))
    recorder.completed(recorder.begin(0, "barrier", timeout_s=float("inf")))
    rows = look().operations
    assert len(rows) == 3
    assert rows["state"].tolist()[-1] == State.COMPLETED


@pytest.mark.parametrize(
    "wrong",
    [
        {"shapes": ((1 << 63,),)},
        {"shapes": [[3], [4]]},
        {"shapes": 5},
        {"dtype": ["float32"]},
        {"timeout_s": "soon"},
        {"sequence": "x"},
    ],
    ids=str,
)
def test_what_is_no_argument_at_all_raises_nothing_either(recorder, look, wrong):
    recorder.completed(recorder.begin(0, "all_reduce", **wrong))
    recorder.completed(recorder.begin(0, "barrier"))
    assert look().operations["state"].tolist()[-1] == State.COMPLETED


def test_an_operation_has_no_start_of_the_one_before_it_in_its_slot(recorder, look):
    for i in range(2 * NUM_OPERATIONS):
        number = recorder.begin(0, "barrier", is_started=i < NUM_OPERATIONS)
        recorder.completed(number)
    assert look().operations["started_mono_ns"].tolist() == [0] * NUM_OPERATIONS


@pytest.mark.parametrize("change", ["started", "completed"])
def test_what_happens_to_an_operation_while_it_moves_out_is_not_lost(
    ring, look, monkeypatch, change
):
    """Another thread's call, at the moment when the slot was copied and not yet taken."""
    recorder = Recorder(ring, in_c=False)
    moving = recorder.begin(0, "recv", tag=7)
    keep, changed = ring.kept.keep, []

    def keep_while_it_changes(slot: int) -> bool:
        is_kept = keep(slot)
        if not changed:
            changed.append(slot)
            getattr(recorder, change)(moving)
        return is_kept

    monkeypatch.setattr(ring.kept, "keep", keep_while_it_changes)
    for _ in range(NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "barrier"))
    assert changed == [0]
    record = look()
    assert record.live[Live.NUM_KEPT] == (change == "started")
    rows = {int(row["record"]): State(row["state"]) for row in record.operations}
    assert rows.get(moving) == (State.STARTED if change == "started" else None)
    assert rows[NUM_OPERATIONS] == State.COMPLETED


def test_a_signal_handler_that_records_while_an_operation_moves_out_takes_no_place(
    ring, look, monkeypatch
):
    recorder = Recorder(ring, in_c=False)
    pending = [recorder.begin(0, "recv", tag=i) for i in range(NUM_OPERATIONS)]
    keep, refused = ring.kept.keep, []

    def keep_and_be_interrupted(slot: int) -> bool:
        if not refused:
            refused.append(recorder.begin(0, "send"))
        return keep(slot)

    monkeypatch.setattr(ring.kept, "keep", keep_and_be_interrupted)
    number = recorder.begin(0, "barrier")
    assert refused == [-1]
    assert sorted(look().operations["record"].tolist()) == sorted([*pending, number])


def test_an_operation_ends_once(recorder, ring, look):
    """A thread that marks the start may come after the one that marks the end."""
    number = recorder.begin(0, "barrier")
    recorder.completed(number, 1000)
    recorder.started(number)
    recorder.failed(number, OSError("late"))
    recorder.completed(number, 2000)
    row = look().operations[0]
    assert (row["state"], row["started_mono_ns"], row["completed_mono_ns"]) == (
        State.COMPLETED,
        0,
        1000,
    )
    for _ in range(NUM_OPERATIONS):
        recorder.completed(recorder.begin(0, "barrier"))
    assert number not in look().operations["record"]
    assert look().live[Live.NUM_KEPT] == 0
