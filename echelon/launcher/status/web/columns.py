"""Summarize a rank's time as a string with one letter per time interval."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.launcher.goodput.accounting import Category, Segment

LETTERS = {
    Category.USEFUL: "u",
    Category.WAITING: "w",
    Category.DATA: "d",
    Category.CHECKPOINT: "c",
    Category.REPEATED: "p",
    Category.STALL: "s",
    Category.RESTART: "r",
    Category.START_UP: "b",
    Category.IDLE: "i",
    Category.UNMARKED: "m",
}


def columns(segments: Sequence[Segment], wall_ns: int, num: int) -> str:
    """Return one letter for each of `num` equal intervals of the time from 0 to `wall_ns`.

    Each letter stands for the category that takes up the largest part of the interval. An interval
    without segments is shown as a space.

    Args:
        segments: the segments from `accounting.segments` for one rank.
    """
    if wall_ns <= 0:
        return ""
    amounts: list[dict[Category, float]] = [{} for _ in range(num)]
    for segment in segments:
        length = segment.ended_ns - segment.began_ns
        first = segment.began_ns * num // wall_ns
        last = min((segment.ended_ns * num - 1) // wall_ns, num - 1)
        for i in range(first, last + 1):
            begin, end = i * wall_ns / num, (i + 1) * wall_ns / num
            part = (min(end, segment.ended_ns) - max(begin, segment.began_ns)) / length
            for category, ns in segment.parts.items():
                amounts[i][category] = amounts[i].get(category, 0.0) + ns * part
    most = (max(amount, key=lambda one: amount[one], default=None) for amount in amounts)
    return "".join(" " if one is None else LETTERS[one] for one in most)
