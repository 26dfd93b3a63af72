"""A span that has begun."""

from __future__ import annotations

from echelon.recorder.write.ring import SPAN_FIXED_STRUCT


class OpenSpan:
    """What is needed to write the span's end."""

    __slots__ = (
        "depth",
        "detail",
        "name",
        "number",
        "place",
        "site",
        "started",
        "step",
        "thread",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        started: int,
        step: int,
        name: int,
        detail: int,
        site: int,
        thread: int,
        depth: int,
        place: int,
    ) -> None:
        self.number = number
        self.started = started
        self.step = step
        self.name = name
        self.detail = detail
        self.site = site
        self.thread = thread
        self.depth = depth
        self.place = place

    def pack(self, ended: int) -> bytes:
        """Return its record; `ended` is a stamp, or 0 while it is open."""
        return SPAN_FIXED_STRUCT.pack(
            self.number, self.started, ended, self.step, self.name, self.detail, self.site,
            self.thread, self.depth, 0,
        )  # fmt: skip
