"""Draw each job's faults and their times, as a pure function of a seed.

`KINDS` lists what each kind of fault requires of a launcher. The kinds marked `held_back` were
written together with the others, but not run while launcher and policy were developed. The reported
figures are about them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STEP_S = 0.25
MEAN_GAP_S = 60.0
SAVE_EVERY = 10  # steps
_NUM_FAULTS = 3


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault.

    Attributes:
        restarts: the number of restarts that an omniscient launcher needs.
        granted: the number of restarts before a permanent fault can be recognized as such.
        stays: True if the fault recurs in each attempt, so that the job cannot continue.
        takes_node: True if a node is lost or unusable; the job continues if it has a spare one.
    """

    restarts: int = 1
    granted: int = 0
    stays: bool = False
    takes_node: bool = False
    held_back: bool = False


KINDS = {
    "kill": Kind(),
    "segfault": Kind(held_back=True),
    "exit": Kind(held_back=True),
    "stopped": Kind(),  # SIGSTOP
    "hang": Kind(),  # in the program's own code
    "spin": Kind(held_back=True),  # the same, using up a processor
    "exception": Kind(),
    "connection": Kind(held_back=True),  # an error that names the network
    "exception_always": Kind(restarts=0, granted=1, stays=True),
    "late_exception_always": Kind(restarts=0, granted=1, stays=True, held_back=True),  # other rank
    "memory": Kind(),
    "memory_always": Kind(restarts=0, granted=1, stays=True, held_back=True),
    "cut": Kind(restarts=0),  # a node's link, for 10 s
    "cut_for_good": Kind(takes_node=True, held_back=True),
    "bad_node": Kind(restarts=2, takes_node=True),  # kills its ranks soon after each start
    "node_killed": Kind(takes_node=True, held_back=True),
    "preempted": Kind(takes_node=True),  # SIGTERM to one node's launcher
    "slow_disk": Kind(restarts=0, held_back=True),  # for half a minute, then as before
    "checkpoint_hang": Kind(restarts=0, held_back=True),  # one write; those after it do not
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a job; `rank` is a rank of the world at that moment."""

    kind: str
    step: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One job. If it has three nodes, one of them is a spare."""

    name: str
    num_nodes: int
    num_steps: int
    faults: tuple[Fault, ...] = ()

    @property
    def stays(self) -> bool:
        """True if the job has a permanent fault."""
        return any(KINDS[one.kind].stays for one in self.faults)


def plan_of(seed: int, *, held_back: bool, mean_gap_s: float = MEAN_GAP_S) -> Plan:
    """Return a job's plan: every fourth job ends with a permanent fault, every eighth has none."""
    name = f"{'held' if held_back else 'seen'}_{seed}"
    rng = random.Random(name)
    num_nodes = 2 + seed % 2
    if seed % 8 == 0:
        return Plan(name=f"healthy_{name}", num_nodes=num_nodes, num_steps=_steps(3 * mean_gap_s))
    known = {kind: one for kind, one in KINDS.items() if one.held_back == held_back}
    passing = [kind for kind, one in known.items() if not one.stays and not one.takes_node]
    chosen = rng.sample(passing, min(_NUM_FAULTS, len(passing)))
    if num_nodes == 3:
        taking = [kind for kind, one in known.items() if one.takes_node]
        chosen[rng.randrange(_NUM_FAULTS)] = rng.choice(taking)
    if seed % 4 == 3:
        chosen[-1] = rng.choice([kind for kind, one in known.items() if one.stays])
    at, faults = 0, list[Fault]()
    for kind in chosen:
        at += _steps(min(max(rng.expovariate(1 / mean_gap_s), mean_gap_s / 4), 2.5 * mean_gap_s))
        faults.append(Fault(kind=kind, step=at, rank=rng.randrange(4)))
    return Plan(
        name=name, num_nodes=num_nodes, num_steps=at + _steps(mean_gap_s / 2), faults=tuple(faults)
    )


def _steps(seconds: float) -> int:
    return round(seconds / STEP_S)
