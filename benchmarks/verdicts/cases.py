"""Generate cases: a folder of dumps and a truth from a family, a program, a world size and a seed.

The same seed yields the same bytes. `truth.json` states which answers are right or acceptable, and
whether the case is decidable; the dumps contain none of this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.verdicts.engine import Engine
from benchmarks.verdicts.families.scene import Family, Scene, Truth
from benchmarks.verdicts.faults import FAMILIES, is_decidable
from benchmarks.verdicts.layouts import RANKS_PER_HOST
from benchmarks.verdicts.programs import PROGRAMS, draw_shape
from benchmarks.verdicts.recorder import FORMATS, Manner, Recorder, moves

SIZES = (8, 16, 32, 64)
LARGE = 1024
LARGE_CASES = (
    ("healthy_in_flight", "tp_dp"),
    ("host_hang", "ddp"),
    ("host_hang_subgroup", "hsdp"),
    ("dead_host", "fsdp2"),
    ("device_unnoticed", "tp_dp"),
    ("p2p_missing", "pp_dp"),
)
STEPS = 6
_TRIES = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The parameters of a case."""

    number: int
    family: Family
    program: str
    world_size: int
    seed: str

    @property
    def name(self) -> str:
        """The name of the case's folder."""
        return f"{self.number:04d}_{self.family.name}_{self.program}_{self.world_size}"


def plan(num_cases: int, seed: str, num_large: int = 0) -> Iterator[Case]:
    """Yield cases that cycle through families, programs and world sizes."""
    random = Random(f"{seed}/plan")
    offset = {family.name: random.randrange(64) for family in FAMILIES}
    by_name = {family.name: family for family in FAMILIES}
    for number in range(num_cases):
        family = FAMILIES[number % len(FAMILIES)]
        turn = number // len(FAMILIES) + offset[family.name]
        program = family.programs[turn % len(family.programs)]
        size = _size(random, program)
        yield _case(number, family, program, size, seed)
    for number in range(num_cases, num_cases + num_large):
        name, program = LARGE_CASES[(number - num_cases) % len(LARGE_CASES)]
        yield _case(number, by_name[name], program, LARGE, seed)


def _case(number: int, family: Family, program: str, world_size: int, seed: str) -> Case:
    return Case(
        number=number,
        family=family,
        program=program,
        world_size=world_size,
        seed=f"{seed}/{number}",
    )


def _size(random: Random, program: str) -> int:
    sizes = (8, 16) if PROGRAMS[program].backend == "gloo" else SIZES
    return random.choice(sizes)


def write_case(case: Case, folder: Path) -> dict[str, object]:
    """Run a case and write its dumps and its truth; return the truth.

    A draw that shows nothing is repeated from the same seed: the job ended before the fault, or a
    healthy job made no visible progress between the dumps.
    """
    for attempt in range(_TRIES):
        made = _Made(case, Random(f"{case.seed}/{attempt}"), attempt)
        if made.shows:
            return made.write(folder)
    raise RuntimeError(f"{case.name}: no draw of {_TRIES} shows the fault")


def _run_ahead(random: Random, ring: int) -> int:
    """Draw how far a host may run ahead, limited so that pending operations fit into the ring."""
    return random.choice([8] if ring < 60 else [16] if ring < 200 else [16, 64])


class _Made:
    """One draw of a case, run to its end."""

    def __init__(self, case: Case, random: Random, attempt: int) -> None:
        self._case, self._random = case, random
        program = PROGRAMS[case.program]
        shape = draw_shape(random, program, case.world_size)
        steps = 4 if case.world_size > 64 else STEPS
        ranks = range(case.world_size)
        scene = Scene(
            random=random,
            shape=shape,
            program=case.program,
            programs=[[program.step(shape, rank, step) for step in range(steps)] for rank in ranks],
            steps=steps,
        )
        self.truth: Truth = case.family.make(scene)
        self._wants = scene.wants
        self._layout = shape.layout
        self.manner = self._draw_manner(program.backend)
        programs = [[one for step in rank for one in step] for rank in scene.programs]
        self.engine = Engine(programs, run_ahead=_run_ahead(random, self.manner.ring))
        if scene.wants.get("cut"):
            dry = Engine(programs)
            self.engine.cut_pairs = scene.cut_pairs
            self.engine.cut_at = dry.run() * random.uniform(0.4, 0.7)
        self.end_s = self.engine.run()
        self._moments = self._draw_moments(attempt)

    @property
    def _is_healthy(self) -> bool:
        return self.truth.causes == ("healthy",)

    @property
    def _allowed(self) -> tuple[str, ...]:
        """The additional causes that these dumps do not distinguish from the true one.

        Dumps of active entries lack the sizes of members that have completed the operation.
        """
        is_split = self.truth.causes[0] == "split_mismatch"
        return ("device_stuck",) if is_split and self.manner.only_active else ()

    def _draw_manner(self, backend: str) -> Manner:
        random, wants = self._random, self._wants
        gloo = backend == "gloo"
        hosts = -(-self._case.world_size // RANKS_PER_HOST)
        ring = wants.get("ring", random.choice((60, 200, 2000)))
        if self._case.world_size >= LARGE:
            ring = 60
        assert isinstance(ring, int)
        only_active = bool(wants.get("only_active", not gloo and random.random() < 0.2))
        return Manner(
            version=random.choice(FORMATS),
            as_json=random.random() < 0.25,
            only_active=only_active,
            timing=bool(wants.get("timing", random.random() < 0.4)),
            eager=random.random() < 0.5,
            ring=ring,
            backend=backend,
            clock_skew_s=tuple(random.uniform(-3, 3) for _ in range(hosts)),
            ranks_per_host=RANKS_PER_HOST,
        )

    def _draw_moments(self, attempt: int) -> dict[int, float]:
        """Draw when each rank's dump is taken; dumps of one host are taken closer together."""
        random, end_s = self._random, self.end_s
        ranks = [r for r in range(self._case.world_size) if r not in self.truth.lost]
        spread_s = random.uniform(0.02, 0.12) * (1 + attempt / 4)
        moment = self._wants.get("moment", "end")
        if moment == "end":
            base_s = end_s + random.choice((2.0, 610.0))
        elif moment == "late_flight":
            base_s = end_s - spread_s * random.uniform(1.0, 2.0)
        else:
            base_s = end_s * random.uniform(0.3, 0.85)
        return {rank: base_s + random.uniform(0, spread_s) for rank in ranks}

    @property
    def shows(self) -> bool:
        """True if the fault occurred or, in a healthy case, the dumps show the job's health."""
        if self._is_healthy:
            if self._wants.get("moment") == "end":
                return all(one.finished_at < self.end_s + 1 for one in self.engine.ranks)
            groups = [group for found in self._layout.groups.values() for group in found]
            return moves(lambda rank: self.engine.ranks[rank], self._moments, groups)
        return any(
            one.ended is None
            for rank in self.engine.ranks
            if rank.rank not in self.truth.lost
            for one in rank.launches
        )

    def write(self, folder: Path) -> dict[str, object]:
        """Write the dumps and the truth."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank, moment_s in self._moments.items():
            Recorder(self.engine, self._layout, self.manner, rank).write(folder, moment_s)
        truth = self.as_json()
        (folder / "truth.json").write_text(json.dumps(truth, indent=1))
        return truth

    def as_json(self) -> dict[str, object]:
        """Return the truth as the contents of `truth.json`."""
        truth, manner = self.truth, self.manner
        return {
            "format": 1,
            "case": self._case.name,
            "family": self._case.family.name,
            "program": self._case.program,
            "world_size": self._case.world_size,
            "seed": self._case.seed,
            "healthy": self._is_healthy,
            "decidable": is_decidable(truth, self.engine),
            "cause": truth.causes[0],
            "acceptable_causes": [*truth.causes, *self._allowed],
            "culprit_ranks": list(truth.culprits[0]),
            "acceptable_culprits": [list(ranks) for ranks in truth.culprits],
            "lost": list(truth.lost),
            "dumps": {
                "version": manner.version,
                "json": manner.as_json,
                "only_active": manner.only_active,
                "timing": manner.timing,
                "eager": manner.eager,
                "ring": manner.ring,
                "backend": manner.backend,
            },
        }
