"""When a job counts as stalled: looks at imagined ranks, at imagined times."""

from __future__ import annotations

import pytest

from echelon.recorder.stall.watchdog import Sight, StallRule

S = 1_000_000_000


def sight(rank=0, *, initialized=True, progress=0.0, pending=0.0, ended=0, seen=0.0):
    return Sight(
        rank=rank,
        seen_mono_ns=int(seen * S),
        initialized=initialized,
        progress_mono_ns=int(progress * S),
        pending_mono_ns=int(pending * S),
        num_ended=ended,
    )


def rule(timeout_s=10.0, started=100.0):
    return StallRule(timeout_s, int(started * S))


def test_a_stall_that_clears_rank_by_rank_is_not_a_second_one():
    """Rank 1's last report, of before the operation ended, is older than rank 0's progress."""
    one = rule()
    waits = [sight(r, progress=100, pending=100, ended=5, seen=109) for r in range(2)]
    assert one.look(waits, 110 * S) is not None
    moved = sight(0, progress=112, ended=6, seen=112)
    for now in (112, 113, 114):
        assert one.look([moved, waits[1]], now * S) is None, now
    assert not one.is_stalled
    still = sight(1, progress=100, pending=100, ended=5, seen=114)
    found = one.look([moved, still], 114 * S)
    assert found is not None
    assert "rank 1 has an operation pending" in found.reason


def test_what_is_read_just_now_counts_at_once_after_a_stall():
    one = rule()
    assert one.look([sight(r, progress=100, pending=100, ended=5) for r in range(2)], 110 * S)
    found = one.look([sight(0, progress=112, ended=6), sight(1, pending=100, ended=5)], 112 * S)
    assert found is not None


@pytest.mark.parametrize(
    ("sights", "now", "reason"),
    [
        ([], 10_000, None),
        ([sight(progress=109, pending=100)], 109.9, None),
        ([sight(progress=109, pending=100)], 110, "rank 0 has an operation pending for 10 s"),
        (
            [sight(0, progress=120, pending=119), sight(1, progress=120, pending=105)],
            120,
            "rank 1 has an operation pending for 10 s",
        ),
        ([sight(0, progress=100), sight(1, progress=105)], 114, None),
        ([sight(0, progress=100), sight(1, progress=105)], 115, "no rank recorded anything"),
        ([sight()], 109, None),
        ([sight()], 110, "no rank recorded anything for 10 s"),
        ([sight(initialized=False)], 149, None),
        ([sight(initialized=False)], 150, "no rank reached init for 50 s"),
        ([sight(initialized=False, progress=120)], 169, None),
        ([sight(0, initialized=False), sight(1, progress=105)], 115, "no rank recorded anything"),
    ],
    ids=[
        "nobody lives",
        "pending, not yet",
        "pending",
        "the oldest pending one is named",
        "one rank still records",
        "all silent",
        "silent since the start, not yet",
        "silent since the start",
        "before init, not yet",
        "before init",
        "before init but recording",
        "one rank has passed init",
    ],
)
def test_a_look(sights, now, reason):
    stall = rule().look(sights, int(now * S))
    if reason is None:
        assert stall is None
    else:
        assert stall is not None
        assert stall.reason.startswith(reason)


def test_a_stall_says_since_when():
    stall = rule().look([sight(progress=108, pending=102)], 115 * S)
    assert stall is not None
    assert stall.since_mono_ns == 102 * S


def test_one_stall_is_reported_once():
    watch = rule()
    stuck = [sight(0, pending=100, ended=7), sight(1, progress=101, ended=8)]
    assert watch.look(stuck, 110 * S)
    assert watch.is_stalled
    assert [watch.look(stuck, now * S) for now in range(111, 200, 10)] == [None] * 9


def test_the_next_stall_counts_after_progress():
    watch = rule()
    assert watch.look([sight(pending=100, ended=7)], 110 * S)
    assert watch.look([sight(progress=130, ended=8)], 131 * S) is None
    assert not watch.is_stalled
    assert watch.look([sight(progress=130, pending=130, ended=8)], 140 * S)


def test_another_call_is_no_progress_until_something_ends():
    watch = rule()
    assert watch.look([sight(progress=100, pending=100, ended=7)], 110 * S)
    assert watch.look([sight(progress=118, pending=100, ended=7)], 120 * S) is None
    assert watch.is_stalled


def test_a_rank_that_ends_during_a_stall_is_no_progress():
    watch = rule()
    assert watch.look([sight(0, pending=100, ended=7), sight(1, ended=9)], 110 * S)
    assert watch.look([sight(0, pending=100, ended=7)], 120 * S) is None
    assert watch.is_stalled


def test_a_rank_that_comes_during_a_stall_is_progress():
    watch = rule()
    assert watch.look([sight(0, initialized=False)], 150 * S)
    looks = [sight(0, initialized=False), sight(1, initialized=False, progress=151)]
    assert watch.look(looks, 152 * S) is None
    assert not watch.is_stalled


def foreign(rank=0, *, met=True, progress=0.0, signs=0, dumps=0):
    """What is seen of a rank that records nothing."""
    return Sight(
        rank=rank,
        initialized=met,
        progress_mono_ns=int(progress * S),
        num_ended=signs,
        records=False,
        num_dumps=dumps,
    )


@pytest.mark.parametrize(
    ("sights", "now", "reason"),
    [
        ([foreign(0, progress=105), foreign(1)], 114, None),
        ([foreign(0, progress=105), foreign(1)], 115, "no rank computed, printed or sent anything"),
        ([foreign(met=False, progress=130)], 179, None),
        ([foreign(met=False, progress=130)], 180, "no rank reached init for 50 s"),
        ([foreign(0, progress=199), sight(1, progress=100)], 200, "no rank recorded anything"),
        (
            [foreign(0, progress=109, dumps=1)],
            109,
            "rank 0 wrote a dump of torch's flight recorder",
        ),
    ],
    ids=["active", "silent", "before it met the others", "never met", "others record", "a dump"],
)
def test_a_rank_that_records_nothing_is_judged_by_what_it_does(sights, now, reason):
    stall = rule().look(sights, now * S)
    assert (stall is None) if reason is None else (reason in stall.reason)


def test_a_dump_of_torchs_counts_once():
    watched = rule()
    assert watched.look([foreign(progress=101, dumps=1)], 101 * S) is not None
    assert watched.look([foreign(progress=101, dumps=1)], 102 * S) is None
    assert watched.look([foreign(progress=103, signs=1, dumps=1)], 103 * S) is None
    assert not watched.is_stalled
    assert watched.look([foreign(progress=104, signs=2, dumps=2)], 104 * S) is not None


def test_a_busy_rank_does_not_end_the_waiting_of_others():
    watched = rule()
    busy = foreign(1, progress=110, signs=5)

    def waits(signs, pending):
        return Sight(rank=0, initialized=True, progress_mono_ns=int(pending * S), num_ended=signs,
                     pending_mono_ns=int(pending * S), records=False)  # fmt: skip

    assert "rank 0 has an operation pending" in watched.look([waits(3, 100), busy], 111 * S).reason
    busy = foreign(1, progress=112, signs=6)
    assert watched.look([waits(3, 100), busy], 112 * S) is None
    assert watched.is_stalled
    assert watched.look([waits(4, 113), busy], 113 * S) is None
    assert not watched.is_stalled


def test_what_took_long_before_gets_more_time_than_anything_else():
    def stall(patient_until_s: float, now_s: float):
        waits = Sight(rank=0, initialized=True, pending_mono_ns=S, progress_mono_ns=S)
        saves = Sight(
            rank=1, initialized=True, progress_mono_ns=S,
            patient_until_mono_ns=int(patient_until_s * S),
        )  # fmt: skip
        return StallRule(60.0, 0).look([waits, saves], int(now_s * S))

    assert stall(0, 62) is not None
    assert stall(180, 179) is None
    assert stall(180, 181) is not None


def test_a_stall_that_was_acted_on_is_over_and_counts_again_after_the_whole_limit():
    """Without its culprit the others continue; if they do not, there is another culprit."""
    one = rule()
    waits = [sight(r, progress=100, pending=100, ended=5, seen=109) for r in range(2)]
    assert one.look(waits, 110 * S) is not None
    one.begin_again(113 * S)
    assert not one.is_stalled
    assert one.look(waits[:1], 122 * S) is None
    assert one.look(waits[:1], 123 * S) is not None
