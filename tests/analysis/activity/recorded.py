"""Stacks of real programs, as `tests/data/stacks/make.py` took them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from echelon.recorder.format.schema import HostChild, HostThread

FOLDER = Path(__file__).parents[2] / "data/stacks"
_CHILD = re.compile(r"=== child (\d+) (\w) (\S+) (.*)\n")


@dataclass(frozen=True)
class Recorded:
    stacks: str
    native: str
    call: str
    children: tuple[HostChild, ...]

    def facts(self) -> dict[str, object]:
        """Return it as what a host saw of a rank, both times alike."""
        return {
            "stacks": self.stacks,
            "later_stacks": self.stacks,
            "later_gap_s": 2.0,
            "native_stacks": self.native,
            "threads": (HostThread(name="python", call=self.call),),
            "children": self.children,
            "num_children": len(self.children),
        }


def recorded(name: str) -> Recorded:
    text = (FOLDER / f"{name}.txt").read_text()
    stacks, _, rest = text.partition("\n=== in C\n")
    native, _, rest = rest.partition("\n=== main thread's call: ")
    call, _, rest = rest.partition("\n")
    parts = _CHILD.split(rest)[1:]
    children = tuple(
        HostChild(pid=int(pid), state=state, call=call, command=command, stacks=below.strip("\n"))
        for pid, state, call, command, below in zip(*[iter(parts)] * 5, strict=True)
    )
    return Recorded(stacks, native, call, children)
