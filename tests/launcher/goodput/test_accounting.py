"""Each nanosecond of each rank is in exactly one category: by example, and for random jobs."""

from __future__ import annotations

import random
import re

from echelon.launcher.goodput.accounting import Category, segments
from echelon.launcher.goodput.facts import Attempt, Job, Lap, RankRun, Spent, from_json, to_json
from echelon.launcher.goodput.shares import shares
from echelon.launcher.goodput.text import as_text

S = 1_000_000_000


def _lap(first, end, began_s, ended_s, waited_s=0, saving_s=0, data_s=0):
    spent = Spent(waited_ns=waited_s * S, checkpoint_ns=saving_s * S, data_ns=data_s * S)
    return Lap(
        first_step=first, end_step=end, began_ns=began_s * S, ended_ns=ended_s * S, spent=spent
    )


def _run(*laps, ended_s=None, **more):
    ended_ns = None if ended_s is None else ended_s * S
    return RankRun(host="a", laps=list(laps), ended_ns=ended_ns, **more)


def _attempt(number, began_s, ended_s=None, failed_s=None, stalls=(), reason="", **runs):
    return Attempt(
        number=number,
        began_ns=began_s * S,
        ended_ns=None if ended_s is None else ended_s * S,
        failed_ns=None if failed_s is None else failed_s * S,
        reason=reason,
        runs={int(name[1:]): run for name, run in runs.items()},
        stalls=[[began * S, ended if ended < 0 else ended * S] for began, ended in stalls],
    )


def _seconds(job, rank=0):
    account = shares(job)
    assert sum(account.ranks[rank].values()) == job.now_ns
    return {category: ns / S for category, ns in account.ranks[rank].items()}


def test_a_healthy_job():
    run = _run(_lap(0, 10, 3, 13, waited_s=2, saving_s=1, data_s=1), ended_s=15)
    job = Job(job_id="j", now_ns=16 * S, attempts=[_attempt(0, 1, ended_s=16, r0=run)])
    assert _seconds(job) == {
        Category.START_UP: 3,
        Category.CHECKPOINT: 1,
        Category.WAITING: 2,
        Category.DATA: 1,
        Category.USEFUL: 8,
        Category.IDLE: 1,
    }
    assert shares(job).goodput == 10 / 16


def test_a_rank_that_joined_later_was_idle_before():
    first = _run(_lap(0, 10, 2, 12), ended_s=13)
    late = _run(_lap(5, 10, 8, 12), ended_s=13, began_ns=6 * S)
    job = Job(job_id="j", now_ns=13 * S, attempts=[_attempt(0, 0, ended_s=13, r0=first, r1=late)])
    for one in (job, from_json(to_json(job))):
        found = _seconds(one, rank=1)
        assert found[Category.START_UP] == 2
        assert found[Category.USEFUL] == 4 + 1  # until it ended
        assert found[Category.IDLE] == 6


def _two_attempts(**second):
    first = _run(_lap(0, 8, 2, 10), ended_s=11, saved_step=4)
    again = _run(
        _lap(second.pop("begins", 4), second.pop("ends", 12), 15, 23), ended_s=23, **second
    )
    return Job(
        job_id="j",
        now_ns=24 * S,
        attempts=[
            _attempt(0, 0, ended_s=12, failed_s=11, reason="rank 0 was killed", r0=first),
            _attempt(1, 13, ended_s=24, r0=again),
        ],
    )


def test_steps_that_an_earlier_attempt_had_finished_are_repeated():
    job = _two_attempts()
    # 10-15: the step that was cut short, stopping, the start, and until the first step.
    assert _seconds(job) == {
        Category.START_UP: 2,
        Category.USEFUL: 12,
        Category.RESTART: 5,
        Category.REPEATED: 4,
        Category.IDLE: 1,
    }
    (loss,) = shares(job).losses
    assert (loss.restart_ns, loss.repeated_ns, loss.reason) == (5 * S, 4 * S, "rank 0 was killed")


def test_waiting_in_repeated_steps_is_repeated():
    job = _two_attempts()
    job.attempts[1].runs[0].laps = [_lap(4, 12, 15, 23, waited_s=4)]
    seconds = _seconds(job)
    assert (seconds[Category.REPEATED], seconds[Category.WAITING], seconds[Category.USEFUL]) == (
        4,
        2,
        10,
    )


def test_steps_that_count_from_0_again_continue_from_the_checkpoint_that_was_loaded():
    job = _two_attempts(begins=1, ends=9, num_loads=1)
    assert _seconds(job)[Category.REPEATED] == 3  # 5, 6 and 7 of 5 to 12
    job = _two_attempts(begins=1, ends=9)
    assert _seconds(job)[Category.REPEATED] == 7  # nothing was loaded: 1 to 7


def test_a_stall_is_not_waiting():
    run = _run(_lap(0, 1, 1, 2), _lap(1, 2, 2, 22, waited_s=19), _lap(2, 3, 22, 23), ended_s=23)
    job = Job(job_id="j", now_ns=23 * S, attempts=[_attempt(0, 0, 23, stalls=[(3, 20)], r0=run)])
    assert _seconds(job) == {
        Category.START_UP: 1,
        Category.USEFUL: 3,
        Category.STALL: 17,
        Category.WAITING: 2,
    }


def test_a_stall_that_ends_in_a_stop_lasts_until_then():
    run = _run(_lap(0, 5, 1, 6), ended_s=20)
    attempt = _attempt(0, 0, ended_s=21, failed_s=20, stalls=[(8, -1)], r0=run)
    job = Job(job_id="j", now_ns=21 * S, attempts=[attempt])
    assert _seconds(job) == {
        Category.START_UP: 1,
        Category.USEFUL: 5,
        Category.RESTART: 3,
        Category.STALL: 12,
    }


def test_a_rank_that_the_next_world_has_no_place_for_is_idle():
    lost = _run(_lap(0, 8, 2, 10), ended_s=11)
    job = _two_attempts()
    job.attempts[0].runs[1] = lost
    assert _seconds(job, 1) == {
        Category.START_UP: 2,
        Category.USEFUL: 8,
        Category.RESTART: 3,
        Category.IDLE: 11,
    }


def test_a_program_that_marks_no_steps_is_unmarked():
    job = Job(job_id="j", now_ns=9 * S, attempts=[_attempt(0, 1, 9, r0=_run(ended_s=8))])
    assert _seconds(job) == {Category.START_UP: 1, Category.UNMARKED: 7, Category.IDLE: 1}


def test_a_job_whose_launcher_was_killed_counts_to_its_last_account():
    run = _run(_lap(0, 3, 1, 4))
    job = Job(job_id="j", now_ns=5 * S, attempts=[_attempt(0, 0, r0=run)])
    assert _seconds(job) == {Category.START_UP: 1, Category.USEFUL: 4}


def test_a_job_of_no_attempt_has_an_account():
    job = Job(job_id="j", now_ns=5 * S)
    assert shares(job).goodput == 0
    assert "0 ranks" in as_text(job, shares(job))


def _made_up(random_: random.Random) -> Job:
    """A job whose stamps need not make sense: clocks of nodes differ, messages are late."""
    job, at = Job(job_id="j"), 0
    for number in range(random_.randint(0, 4)):
        began = at + random_.randint(-3, 50)
        runs = {}
        for rank in range(random_.randint(0, 3)):
            laps, step, lap_at = [], random_.randint(0, 5), began + random_.randint(-5, 30)
            for _ in range(random_.randint(0, 6)):
                end, step_end = lap_at + random_.randint(0, 40), step + random_.randint(0, 4)
                spent = Spent(
                    waited_ns=random_.randint(0, 30),
                    checkpoint_ns=random_.randint(0, 30),
                    data_ns=random_.randint(0, 30),
                )
                laps.append(
                    Lap(first_step=step, end_step=step_end, began_ns=lap_at, ended_ns=end,
                        spent=spent)
                )  # fmt: skip
                lap_at, step = end, step_end
            ended = random_.choice([None, lap_at + random_.randint(-20, 20)])
            runs[rank] = RankRun(
                host="a", laps=laps, ended_ns=ended, saved_step=random_.randint(-1, 5),
                num_loads=random_.randint(0, 1),
            )  # fmt: skip
        ended = began + random_.randint(0, 150)
        failed = random_.choice([None, began + random_.randint(-5, 160)])
        stalls, stall_at = [], began
        for _ in range(random_.randint(0, 2)):
            since = stall_at + random_.randint(0, 30)
            stall_at = since + random_.randint(0, 30)
            stalls.append([since, stall_at])
        if stalls and random_.random() < 0.3:
            stalls[-1][1] = -1
        job.attempts.append(
            Attempt(
                number=number, began_ns=began, ended_ns=random_.choice([None, ended]),
                failed_ns=failed, runs=runs, stalls=stalls,
            )
        )  # fmt: skip
        at = ended
    job.now_ns = max(0, at + random_.randint(-30, 60))
    return job


def test_the_parts_of_each_rank_add_up_to_the_jobs_time():
    for seed in range(300):
        _check(_made_up(random.Random(seed)))


def _check(job: Job) -> None:
    for of_rank in segments(job).values():
        at = 0
        for segment in of_rank:
            assert segment.began_ns == at < segment.ended_ns
            assert sum(segment.parts.values()) == segment.ended_ns - segment.began_ns
            assert all(ns > 0 for ns in segment.parts.values())
            at = segment.ended_ns
        assert at == job.now_ns
    account = shares(job)
    assert all(sum(of.values()) == job.now_ns for of in account.ranks.values())
    assert account.totals[Category.REPEATED] == sum(
        of.get(Category.REPEATED, 0) for of in account.ranks.values()
    )
    as_text(job, account)
    assert from_json(to_json(job)) == job


def test_long_times_do_not_run_into_each_other():
    hour = 3600 * S
    first = Attempt(
        number=0, began_ns=0, failed_ns=hour, ended_ns=2 * hour, cause="network", reason="cut",
        runs={rank: RankRun(host="a", ended_ns=2 * hour) for rank in (0, 1)},
    )  # fmt: skip
    laps = [Lap(first_step=0, end_step=9, began_ns=3 * hour, ended_ns=4 * hour, spent=Spent())]
    second = Attempt(number=1, began_ns=2 * hour, runs={0: RankRun(host="a", laps=laps)})
    job = Job(job_id="j", now_ns=4 * hour, attempts=[first, second])
    text = as_text(job, shares(job))
    assert " min 00 s (rank " in text
    assert re.search(r"^ +0  \d+ [a-z0-9 ]+  +0\.0 s  network: cut$", text, re.MULTILINE), text
    assert not re.search(r"[a-z%)]\d", text.partition("\n\n")[2]), text
