"""The trainings that must end with the same bits: each layout, number of ranks and engine.

A cell with `HSDP` shards every unit over two ranks; on an odd number of ranks, its shard groups
have a single rank. A cell with changes trains in 21 parts, each from the checkpoint of the previous
part, with a random layout and number of ranks. All cells of an engine have the same seed, so a cell
is the same in every run of the command.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.train.same_bits.staged import Layout

SIZES = (1, 2, 3, 4, 6, 8)
NUM_CHANGES = 20
CHANGES = f"{NUM_CHANGES} changes of size"
ENGINES = {"shm, C": ("shm", "native"), "shm, Python": ("shm", "python"), "gloo": ("gloo", "")}
_SEED = 21
_TWO_STAGES_EACH = "interleaved_1f1b"
_LAYOUTS = {
    "replicated": dict.fromkeys(SIZES, Layout("replicated")),
    "sharded": dict.fromkeys(SIZES, Layout("sharded")),
    "HSDP": dict.fromkeys(SIZES, Layout("hsdp")),
    "pipeline x replicas": {
        1: Layout("replicated", 2, _TWO_STAGES_EACH),
        2: Layout("replicated", 2),
        3: Layout("replicated", 3, "gpipe"),
        4: Layout("replicated", 4, _TWO_STAGES_EACH),
        6: Layout("replicated", 3),
        8: Layout("replicated", 2),
    },
    "pipeline x shards": {
        1: Layout("sharded", 2, _TWO_STAGES_EACH),
        2: Layout("sharded", 2),
        3: Layout("sharded", 1),
        4: Layout("sharded", 2),
        6: Layout("sharded", 2),
        8: Layout("sharded", 4, "zbv"),
    },
    "pipeline x HSDP": {
        2: Layout("hsdp", 2, _TWO_STAGES_EACH),
        4: Layout("hsdp", 2, _TWO_STAGES_EACH),
        6: Layout("hsdp", 3),
        8: Layout("hsdp", 2),
    },
}
KINDS = (*_LAYOUTS, CHANGES)


@dataclass(frozen=True)
class Part:
    """A range of a training's steps, from `start` up to, but not including, `stop`."""

    layout: Layout
    num_ranks: int
    start: int
    stop: int


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        kind: one of `KINDS`.
        num_ranks: the number of ranks; 0 if it changes between parts.
        engine: one of `ENGINES`.
    """

    kind: str
    num_ranks: int
    engine: str

    @property
    def name(self) -> str:
        """The cell's name in records."""
        ranks = f" on {self.num_ranks}" if self.num_ranks else ""
        return f"{self.kind}{ranks}, {self.engine}"

    def parts(self, num_steps: int) -> list[Part]:
        """Return the parts of the training in order."""
        if self.num_ranks:
            layout = _LAYOUTS[self.kind][self.num_ranks]
            return [Part(layout, self.num_ranks, 0, num_steps)]
        drawn = random.Random(f"{_SEED} {self.engine}")
        ends = [*sorted(drawn.sample(range(1, num_steps), NUM_CHANGES)), num_steps]
        every = [(layout, size) for some in _LAYOUTS.values() for size, layout in some.items()]
        parts = []
        for start, stop in zip([0, *ends], ends, strict=False):
            before = parts[-1].num_ranks if parts else 0
            layout, size = drawn.choice([one for one in every if one[1] != before])
            parts.append(Part(layout, size, start, stop))
        return parts


REFERENCE = Cell("replicated", 1, "shm, C")


def cells() -> list[Cell]:
    """Return all cells: the reference first, then the others from small to large."""
    found = [
        Cell(kind, size, engine)
        for size in SIZES
        for kind, layouts in _LAYOUTS.items()
        for engine in ENGINES
        if size in layouts
    ]
    found += [Cell(CHANGES, 0, engine) for engine in ENGINES]
    return sorted(found, key=lambda cell: cell != REFERENCE)
