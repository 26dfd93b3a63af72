"""The merged stacks: who stands where, whatever the number of ranks."""

from __future__ import annotations

import time

from echelon.analysis.evidence.stacks.frames import Frame
from echelon.analysis.evidence.stacks.tree import Branch, long_form, merge, short_form
from echelon.analysis.report.text import plain_lines
from tests.analysis.imagined_job import Job

_MAIN = Frame("/job/train.py", 151, "<module>")
_STEP = Frame("/job/train.py", 88, "step")
_LIBRARY = "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def test_equal_stacks_are_one_branch() -> None:
    assert merge(dict.fromkeys(range(3), ("a", "b"))) == (Branch(("a", "b"), (0, 1, 2)),)


def test_a_tree_forks_where_ways_part_and_the_larger_branch_is_first() -> None:
    tree = merge({0: ("a", "b", "c"), 1: ("a", "b", "d"), 2: ("a", "b", "c")})
    assert tree == (Branch(("a", "b"), (0, 1, 2), (Branch(("c",), (0, 2)), Branch(("d",), (1,)))),)


def test_a_stack_may_end_where_another_goes_on() -> None:
    tree = merge({0: ("a",), 1: ("a", "b")})
    assert tree == (Branch(("a",), (0, 1), (Branch(("b",), (1,)),)),)


def test_programs_of_different_kinds_are_different_trees() -> None:
    assert [branch.ranks for branch in merge({0: ("a",), 1: ("b",), 2: ("b",)})] == [(1, 2), (0,)]


def test_a_rank_without_a_stack_is_left_out() -> None:
    assert merge({0: (), 1: ("a",)}) == (Branch(("a",), (1,)),)
    assert merge({}) == ()


def test_the_short_form_keeps_the_users_frames_and_what_they_call() -> None:
    wait = Frame(_LIBRARY, 3245, "all_reduce")
    deep = Frame(_LIBRARY, 17, "_poll")
    assert short_form((deep, wait, _STEP, _MAIN)) == (
        "train.py:151 in <module>", "train.py:88 in step", "all_reduce()",
    )  # fmt: skip
    assert short_form((deep, wait)) == ("distributed_c10d.py:17 in _poll",)
    assert short_form(()) == ()


def test_the_long_form_leaves_out_the_lines_of_libraries() -> None:
    wait = Frame(_LIBRARY, 3245, "all_reduce")
    assert long_form((wait, _STEP)) == ("train.py:88 in step", "distributed_c10d.py in all_reduce")


def test_a_deep_recursion_is_cut_at_its_innermost_frames() -> None:
    deep = tuple(f"f{n}" for n in range(5000))
    (branch,) = merge({0: deep, 1: deep})
    assert branch.frames == deep[-100:]


def test_4096_stacks_that_all_differ_are_merged_in_bounded_time() -> None:
    common = tuple(f"f{n}" for n in range(60))
    began = time.process_time()
    tree = merge({rank: (*common, f"line {rank}", "leaf") for rank in range(4096)})
    assert time.process_time() - began < 5  # 0.05 s; quadratic work would take minutes
    assert len(tree) == 1
    assert len(tree[0].children) == 4096


def hung(size: int, culprit: int) -> Job:
    """One rank reads, the others are inside an all_reduce that they called from `step`."""
    job = Job(size).train(2)
    for rank in job.others(culprit):
        rank.all_reduce(inside=True)
        rank.host["stacks"] = (
            f"Thread {hex(rank.rank)} (most recent call first):\n"
            f'  File "{_LIBRARY}", line {rank.rank} in all_reduce\n'
            '  File "/job/train.py", line 88 in step\n'
            '  File "/job/train.py", line 151 in <module>\n'
        )
    job[culprit].stands("data.py", 12, "fetch")
    return job


def stack_section(job: Job) -> list[str]:
    lines = plain_lines(job.report())
    first = next(place for place, line in enumerate(lines) if line.startswith("  stacks"))
    last = next(place for place, line in enumerate(lines) if place > first and line[2:3] != " ")
    return [line.removeprefix("  stacks").strip() for line in lines[first:last]]


def test_the_text_says_how_many_ranks_stand_where() -> None:
    assert stack_section(hung(24, 7)) == [
        "24 ranks (0-23): train.py:151 in <module>",
        "rank 7: train.py:140 in main > data.py:12 in fetch > get()",
        "23 ranks (0-6 and 8-23): train.py:88 in step > all_reduce()",
    ]


def test_the_text_stays_short_though_every_rank_stands_elsewhere() -> None:
    job = Job(64).train(2)
    for rank in job.others(5):
        rank.all_reduce(inside=True)
    for rank in range(64):
        job[rank].stands("data.py", 100 + rank, "fetch")
    lines = stack_section(job)
    assert len(lines) == 8
    assert lines[1] == "rank 5: data.py:105 in fetch > get()"
    assert lines[-1] == "58 ranks at 58 more places (--html)"


def test_the_report_holds_the_tree() -> None:
    (root,) = hung(4, 2).report().stacks
    assert root.ranks == (0, 1, 2, 3)
    assert [branch.ranks for branch in root.children] == [(0, 1, 3), (2,)]
    assert root.children[0].frames[-1] == "all_reduce()"


def test_a_healthy_report_shows_no_stacks() -> None:
    job = Job(4).train(2)
    assert job.report().stacks == ()
