"""Every schedule against its closed form, and that it runs outside the form's domain too.

p ranks, m micro-batches, v chunks a rank; f, i, w: costs of one chunk's action.
"""

import itertools

import pytest

from echelon.dist.pipeline import schedule, simulate
from echelon.dist.pipeline.plan.catalog import NAMES
from echelon.dist.pipeline.plan.check import check_plan
from echelon.dist.pipeline.plan.deadlock import find_deadlock
from echelon.dist.pipeline.plan.lower import add_messages, add_sharding

RANKS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 32)
CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
COSTS = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (1, 1, 2)]


# Bubble time of a rank, numbers and costs for which that holds, peak activations of rank r.
FORMS = {
    "gpipe": ("(p-1)*(f+i+w)", "True", "True", "m"),
    "1f1b": ("(p-1)*(f+i+w)", "True", "True", "min(m, p-r)"),
    "interleaved_1f1b": (
        "(p-1)*(f+i+w)", "v >= 2 and m % p == 0", "True", "min(v*m, (v-1)*p + 2*(p-1-r) + 1)",
    ),
    "looped_bfs": ("(p-1)*(f+i+w)", "m >= p", "True", "v*m"),
    "interleaved_zero_bubble": (
        "(p-1)*(f+i+w - 2*w)", "v >= 2 and m % p == 0", "w <= i", "v*p",
    ),
    "zbv": ("(p-1)*(f+i+w - 2*w)", "m >= 2*p-1", "f == i == w", "2*p"),
    "dualpipev": ("(p-1)*(f+i+w + i+w - 3*w)", "m >= 2*p", "f == i == w", "2*p+1"),
}  # fmt: skip


def _chunks(name):
    return (1, 2, 3, 4) if name in CHUNKED else (None,)


@pytest.mark.parametrize("name", NAMES)
def test_the_closed_form_holds_throughout_its_domain(name):
    bubble, in_domain, costs_fit, peak = (compile(text, name, "eval") for text in FORMS[name])
    num_cases = 0
    for p, m, chunks in itertools.product(RANKS, MICROBATCHES, _chunks(name)):
        v = chunks or schedule(name, 1, 1).num_chunks
        if not eval(in_domain, {}, {"p": p, "m": m, "v": v}):
            continue
        plan = schedule(name, p, m, chunks)
        for f, i, w in COSTS[: 4 if m <= 12 else 1]:
            numbers = {"p": p, "m": m, "v": v, "f": f, "i": i, "w": w}
            if not eval(costs_fit, {}, numbers):
                continue
            found = simulate(plan, f, i, w)
            work, idle = m * v * (f + i + w), eval(bubble, {}, numbers)
            assert found.makespan == work + idle, numbers
            assert found.bubble == pytest.approx(idle / (work + idle)), numbers
            num_cases += 1
        peaks = [eval(peak, {"min": min}, {**numbers, "r": r}) for r in range(p)]
        assert found.peak_activations == peaks, numbers
    assert num_cases > 40


def test_the_fractions_of_the_table():
    """At F = I = W the closed forms as shares of the makespan."""
    p, m = 4, 8
    for name, v, share in [
        ("gpipe", 1, (p - 1) / (m + p - 1)),
        ("1f1b", 1, (p - 1) / (m + p - 1)),
        ("interleaved_1f1b", 3, (p - 1) / (3 * m + p - 1)),
        ("looped_bfs", 3, (p - 1) / (3 * m + p - 1)),
        ("interleaved_zero_bubble", 3, (p - 1) / (3 * 3 * m + p - 1)),
        ("zbv", 2, (p - 1) / (3 * 2 * m + p - 1)),
        ("dualpipev", 2, 2 * (p - 1) / (3 * 2 * m + 2 * (p - 1))),
    ]:
        plan = schedule(name, p, m, v if name in CHUNKED else None)
        assert simulate(plan).bubble == pytest.approx(share), name


@pytest.mark.parametrize(
    ("p", "m", "makespans"),
    [
        (4, 8, (33.0, 33.0, 28.5, 28.5, 25.5, 25.5, 27.0)),
        (8, 32, (117, 117, 106.5, 106.5, 99.5, 99.5, 103)),
        (2, 4, (15, 15, 13.5, 13.5, 12.5, 12.5, 13.0)),
    ],
)
def test_makespans_that_are_known(p, m, makespans):
    for name, makespan in zip(NAMES, makespans, strict=True):
        plan = schedule(name, p, m)
        cost = 1 / plan.num_chunks
        assert simulate(plan, cost, cost, cost).makespan == makespan, name


OUTSIDE = {
    ("interleaved_1f1b", 4, 6, 2): 45,
    ("interleaved_1f1b", 4, 3, 2): 30,
    ("interleaved_1f1b", 4, 9, 3): 90,
    ("looped_bfs", 4, 2, 2): 27,
    ("interleaved_zero_bubble", 4, 6, 2): 39,
    ("interleaved_zero_bubble", 8, 3, 4): 69,
    ("zbv", 4, 6, None): 39,
    ("zbv", 4, 1, None): 18,
    ("zbv", 8, 4, None): 46,
    ("dualpipev", 4, 7, None): 50,
    ("dualpipev", 4, 1, None): 21,
    ("dualpipev", 8, 5, None): 57,
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_makespans_outside_the_domains_stay_as_they_are(case):
    assert simulate(schedule(*case)).makespan == OUTSIDE[case]


@pytest.mark.parametrize("name", NAMES)
def test_no_schedule_deadlocks_even_where_sends_block(name):
    """The strictest machine: a send ends only when its receive runs, and both ranks wait."""
    for p in (1, 2, 3, 4, 5, 8):
        for m in (1, 2, 3, 5, 8, 9, 13, 16, 32):
            for chunks in _chunks(name):
                if p * m * (chunks or 1) > 200 and chunks not in (None, 2):
                    continue  # the same shapes as smaller ones, many times over
                plan = schedule(name, p, m, chunks)
                lowered = add_messages(plan)
                assert find_deadlock(lowered, rendezvous=True) is None, (name, p, m, chunks)
                if p * m <= 40:
                    check_plan(add_sharding(lowered))


def test_stages_lie_where_the_schedule_says():
    assert schedule("interleaved_1f1b", 3, 3, 2).rank_of_stage == (0, 1, 2, 0, 1, 2)
    assert schedule("zbv", 3, 5).rank_of_stage == (0, 1, 2, 2, 1, 0)
    assert schedule("dualpipev", 2, 4).stages_of(0) == (0, 3)
    assert [str(action) for action in schedule("1f1b", 2, 2).rows[1]] == [
        "1F0",
        "1B0",
        "1F1",
        "1B1",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f2b", 2, 2), "unknown schedule '1f2b'"),
        (("1f1b", 0, 2), "num_ranks must be an integer >= 1, got 0"),
        (("1f1b", 2, 2.0), "num_microbatches must be"),
        (("gpipe", 2, 2, 3), r"num_chunks must be 1 for gpipe, got 3"),
        (("interleaved_1f1b", 2, 2, 0), "num_chunks must be"),
    ],
)
def test_numbers_that_no_schedule_has_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        schedule(*arguments)
