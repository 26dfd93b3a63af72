"""The definition of a family: a job that it modifies, and the truth about the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.verdicts.engine import NEVER, Call, Instruction
from benchmarks.verdicts.programs import PROGRAMS, Shape, Step

Programs = list[list[Step]]  # rank, step, instruction
NCCL = tuple(name for name, one in PROGRAMS.items() if one.backend == "nccl")
ALL = tuple(PROGRAMS)
PIPELINES = ("megatron", "pp_dp", "gpipe")
BATCHED = ("megatron", "pp_dp", "ring_attention")
COLLECTIVE = ("ddp", "fsdp2", "hsdp", "tp_dp", "gloo_ddp")
SUBGROUPS = ("hsdp", "tp_dp", "megatron", "moe", "ulysses")


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The truth about a case.

    Attributes:
        causes: the acceptable causes, the best one first; ("healthy",) if nothing is wrong.
        culprits: the acceptable sets of ranks, the best one first.
        lost: the ranks that left no dump.
        decidable: True if the dumps can single out the culprits; None: computed from the run.
    """

    causes: tuple[str, ...]
    culprits: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...] = ()
    decidable: bool | None = None
    note: str = ""


@dataclass(kw_only=True)
class Scene:
    """A job that a family can modify before it runs."""

    random: Random
    shape: Shape
    program: str
    programs: Programs
    steps: int
    cut_pairs: frozenset[frozenset[int]] = frozenset()
    cut_at: float = NEVER
    wants: dict[str, object] = field(default_factory=dict)  # requirements on the dumps

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self.shape.layout.world_size

    def rank(self) -> int:
        """Draw a rank."""
        return self.random.randrange(self.world_size)

    def step(self) -> int:
        """Draw a step that has at least two steps before it and is not the last."""
        return self.random.randint(2, self.steps - 2)

    def calls(self, rank: int, step: int, which: Callable[[Call], bool] | None = None) -> list[int]:
        """Return the indices of the calls in a rank's step, filtered by `which`."""
        return [
            index
            for index, one in enumerate(self.programs[rank][step])
            if isinstance(one, Call) and (which is None or which(one))
        ]

    def change(self, rank: int, step: int, index: int, *new: Instruction) -> None:
        """Replace one instruction of a rank with others."""
        old = self.programs[rank][step]
        self.programs[rank][step] = [*old[:index], *new, *old[index + 1 :]]

    def call(self, rank: int, step: int, index: int) -> Call:
        """Return the call at an index of a rank's step."""
        found = self.programs[rank][step][index]
        assert isinstance(found, Call), found
        return found


Fault = Callable[[Scene], Truth]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of case, and the programs to which it applies."""

    name: str
    make: Fault
    programs: tuple[str, ...]
