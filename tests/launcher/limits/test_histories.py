"""The histories of whole jobs: hangs are detected early, and uneven jobs raise no alarm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from echelon.launcher.limits.history import FLOOR_S, MAX_PATIENCE, NUM_WARM_UP, History
from echelon.launcher.limits.rank import MAX_KEYS, RankLimits
from echelon.launcher.limits.rule import LimitRule, View
from echelon.launcher.limits.sketch import NUM_BUCKETS, Sketch
from echelon.recorder.read.tail import Key, News, Open

FIXED_S = 60.0
TRAIN, EVALUATION, SAVE = Key(1, 10), Key(1, 11), Key(7, 12, is_span=True)
LOOK_S = 0.5


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@dataclass(frozen=True)
class Step:
    """What one rank does: it computes, then waits in a collective or is in a phase."""

    wait_s: float
    compute_s: float = 0.0
    works: bool = False  # while this rank waits, another one visibly works
    key: Key = TRAIN


def looks(steps: Iterable[Step]) -> list[tuple[float, str]]:
    """Run a job of one watched rank; return when looks were due, and why."""
    limits, rule = RankLimits(FIXED_S, lambda _: True), LimitRule()
    now_s, found = 0.0, list[tuple[float, str]]()
    for number, step in enumerate(steps):
        now_s += step.compute_s
        began_s, waited_s = now_s, FLOOR_S - 2.0  # no look is due before
        while waited_s < step.wait_s:
            now_s = began_s + waited_s
            view = _view(limits, rule, step, began_s, now_s, number)
            look = rule.look([view], _ns(now_s))
            if look is not None:
                found.append((waited_s, look.reason))
            waited_s += LOOK_S
        now_s = began_s + step.wait_s
        lasted = np.array([_ns(step.wait_s)])
        limits.learn(News([(step.key, lasted)], [], [], {}), _ns(now_s))
    return found


def _view(limits, rule, step: Step, began_s: float, now_s: float, moves: int) -> View:
    one = Open(step.key, _ns(began_s), thread=1)
    pending, spans = ([], [one]) if step.key.is_span else ([one], [])
    judged = limits.judge(News([], pending, spans, {}), lambda then: now_s - then / 1e9)
    late = judged.late
    return View(
        seen_ns=_ns(now_s),
        worked_ns=_ns(now_s if step.works else began_s),
        num_moves=moves,
        is_excused=judged.is_excused,
        late_rank=-1 if late is None else 0,
        late_since_ns=_ns(began_s),
        limit_s=0.0 if late is None else late.limit_s,
    )


def _steady(num: int, wait_s: float = 0.4, compute_s: float = 0.1) -> list[Step]:
    return [Step(wait_s, compute_s)] * num


def _with_each(num: int, every: int, other: Step) -> Iterator[Step]:
    for step in range(1, num):
        yield other if step % every == 0 else Step(0.4, 0.1)


def _uneven(seed: int, median_s: float, sigma: float) -> Iterator[Step]:
    rng = np.random.default_rng(seed)
    for wait_s in median_s * np.exp(sigma * rng.standard_normal(4000)):
        yield Step(float(wait_s), 0.1)


HEALTHY = {
    "steady": _steady(2000),
    "evaluation every 100 steps, visibly working": _with_each(1100, 100, Step(25, works=True)),
    "evaluation every 100 steps that shows nothing": _with_each(1100, 100, Step(25)),
    "evaluation at a call site of its own": _with_each(1500, 400, Step(25, 0, True, EVALUATION)),
    "first evaluation late, visibly working": [*_steady(1500), Step(50, works=True)],
    "checkpoint that shows nothing, in its phase": _with_each(1500, 500, Step(50, key=SAVE)),
    "first step compiles": [Step(50), *_steady(1000)],
    "compiles again in the middle": [*_steady(800), Step(50, works=True), *_steady(200)],
    "slowly growing steps": [Step(0.1 * 1.006**n, 0.1) for n in range(850)],
    "bimodal steps": [Step(8.0 if n % 7 == 3 else 0.2, 0.1) for n in range(1500)],
    "rarely long steps": [Step(9.0 if n % 97 == 3 else 0.2, 0.1) for n in range(1500)],
    "fast steps, too short a history": [*_steady(5000, 0.004, 0.001), Step(50)],
    "few long steps": [Step(5.0, 1.0)] * 100 + [Step(50)],
    "too long for a limit": [Step(12.0, 1.0)] * 600 + [Step(50)],
    **{f"uneven, seed {seed}": _uneven(seed, 0.3, 1.0) for seed in range(3)},
    **{f"very uneven, seed {seed}": _uneven(seed, 0.1, 1.6) for seed in range(3)},
}


@pytest.mark.parametrize("job", HEALTHY)
def test_a_healthy_job_raises_no_early_look(job):
    assert looks(HEALTHY[job]) == []


@pytest.mark.parametrize(
    ("before", "limit_s"),
    [
        (_steady(600), FLOOR_S),
        ([Step(50), *_steady(600)], FLOOR_S),
        (_steady(600, 2.0, 1.0), FLOOR_S),
        (_steady(600, 5.0, 1.0), 15.0 * 1.06),
        ([Step(8.0 if n % 7 == 3 else 0.2, 0.1) for n in range(700)], 24.0 * 1.06),
    ],
    ids=["steady", "after a compile", "slow steps", "slower steps", "bimodal"],
)
def test_a_hang_is_looked_at_within_five_seconds_of_what_its_history_allows(before, limit_s):
    (found,) = looks([*before, Step(100)])
    assert limit_s - 1.0 <= found[0] <= limit_s + 5.0
    assert "longer than its history allows" in found[1]


def test_a_wait_for_the_loader_that_hangs_is_seen_by_the_phases_own_history():
    data_wait = Key(8, 13, is_span=True)
    before = [Step(0.01 if n % 2 else 0.3, 0.1, key=data_wait if n % 2 else TRAIN)
              for n in range(1200)]  # fmt: skip
    (found,) = looks([*before, Step(100, key=data_wait)])
    assert FLOOR_S - 1.0 <= found[0] <= FLOOR_S + 5.0


def test_a_habit_gets_the_stall_rules_patience_and_a_single_stall_does_not():
    def patience_s(durations_s: list[float], num_long: int) -> float:
        history = History(FIXED_S, num_long)
        history.add(np.array([_ns(one) for one in durations_s]), 1)
        return history.patience_s

    assert patience_s([90.0], 2) == 0.0
    assert patience_s([90.0, 0.1, 80.0], 2) == pytest.approx(180.0)
    assert patience_s([90.0], 1) == pytest.approx(180.0), "a phase says what it is for"
    assert patience_s([50.0, 50.0], 1) == 0.0
    assert patience_s([1e5, 1e5], 2) == MAX_PATIENCE * FIXED_S, "and it is bounded"


def test_the_first_samples_count_for_no_limit():
    history = History(FIXED_S, 2)
    history.add(np.full(NUM_WARM_UP, _ns(50.0)), 1)
    for at_s in range(600):
        history.add(np.full(1, _ns(0.1)), _ns(at_s + 1))
    assert history.limit_s == FLOOR_S


def test_a_rank_is_watched_at_so_many_call_sites_and_not_more():
    limits = RankLimits(FIXED_S, lambda _: True)
    for site in range(MAX_KEYS + 50):
        limits.learn(News([(Key(1, site), np.array([5]))], [], [], {}), 1)
    assert len(list(limits.watched())) == MAX_KEYS


def test_a_phase_with_collectives_inside_excuses_nothing():
    epoch = Open(Key(9, 14, is_span=True), _ns(1.0), thread=1)
    limits = RankLimits(FIXED_S, lambda _: True)

    def is_excused(last_call_ns: dict[int, int]) -> bool:
        return limits.judge(News([], [], [epoch], last_call_ns), lambda _: 5.0).is_excused

    assert is_excused({})
    assert is_excused({1: _ns(0.5), 2: _ns(3.0)})
    assert not is_excused({1: _ns(2.0)})


@pytest.mark.parametrize("scale_s", [1e-7, 1e-4, 0.3, 40.0])
def test_a_quantile_is_never_below_its_true_value_and_11_percent_above_at_most(scale_s):
    values = np.random.default_rng(3).lognormal(0.0, 1.5, 20_000) * scale_s
    sketch = Sketch()
    for part in np.array_split((values * 1e9).astype(np.int64), 7):
        sketch.add(part)
    for share in (0.5, 0.99, 0.999, 1.0):
        true_s = float(np.quantile(values, share, method="inverted_cdf"))
        assert true_s * 0.999 - 1e-9 <= sketch.quantile_s(share) <= max(true_s * 1.11, 1e-6)
    sketch.add(np.array([2**62]))
    assert sketch.quantile_s(1.0) > 86_400, "beyond the last edge, and no index error"
    assert sketch._counts.shape == (NUM_BUCKETS,)
