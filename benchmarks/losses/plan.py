"""Draw the losses of each training of the campaign, and their times, from its number alone.

A training on one host has five ranks; one on three hosts (network namespaces) has two on each. The
first host holds the job's store, so its launcher is never lost, but its ranks may be.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

TOTAL = 40  # steps
SAVE_EVERY = 4  # steps, where the model is sharded
STALL_S = 20
LOST_AFTER_S = 10

HOST, HOSTS, TORCHRUN = "one host", "three hosts", "torchrun"
LAYOUTS = (HOST, HOSTS, TORCHRUN)

_LONGEST_US = 40_000
_LONGEST_SAVE_US = 10_000
_MOMENTS = ("forward", "backward", "optimizer", "recovery", "us", "us")
_HANG_MOMENTS = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One loss.

    Attributes:
        how: "kill" or "stop" (a signal), "hang" (in a lock of the program), "kill node" (its
            launcher and all of its ranks) or "cut" (its link).
        ranks: all ranks that are lost; the first one's progress determines the time.
        nodes: the nodes whose launchers are killed or whose links are cut.
        moment: the place in the program, or "N us" after the start of a step, or "N us of a save".
        step: the step of the fault; it occurs in the first step from this one that reaches the
            place.
    """

    how: str
    ranks: tuple[int, ...]
    moment: str
    step: int
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training."""

    layout: str
    number: int
    num_nodes: int
    ranks_per_node: int
    is_sharded: bool
    faults: tuple[Fault, ...]

    @property
    def name(self) -> str:
        """The training's name in records."""
        return f"{self.layout} {self.number}"


def plan_of(layout: str, number: int) -> Plan:
    """Return the plan of one training; every second one is sharded."""
    draw = random.Random(f"{layout} {number}")
    is_sharded = number % 2 == 1 and layout != TORCHRUN
    faults = _Faults(draw, is_sharded=is_sharded)
    if layout == HOSTS:
        made = _both_copies(faults) if number % 4 == 3 else _nodes(faults)
        return Plan(
            layout=layout, number=number, num_nodes=3, ranks_per_node=2, is_sharded=is_sharded,
            faults=tuple(made),
        )  # fmt: skip
    made = _ranks(faults, number) if layout == HOST else iter([faults.kill(draw.randrange(5))])
    return Plan(
        layout=layout, number=number, num_nodes=1, ranks_per_node=5, is_sharded=is_sharded,
        faults=tuple(made),
    )  # fmt: skip


class _Faults:
    """A generator of one training's faults, each no earlier than the previous one."""

    def __init__(self, draw: random.Random, *, is_sharded: bool) -> None:
        self.draw = draw
        self._moments = (*_MOMENTS, "copy", "save") if is_sharded else _MOMENTS
        self._step = draw.randint(0, TOTAL // 4)
        self._is_first = True

    def kill(self, rank: int) -> Fault:
        return self._made("kill", (rank,), self._moments)

    def stop(self, rank: int) -> Fault:
        return self._made("stop", (rank,), self._moments)

    def hang(self, rank: int) -> Fault:
        return self._made("hang", (rank,), _HANG_MOMENTS)

    def node(self, ranks: tuple[int, ...], node: int) -> Fault:
        how = self.draw.choice(("kill node", "kill node", "cut"))
        return self._made(how, ranks, self._moments, (node,))

    def together(self, ranks: tuple[int, ...], nodes: tuple[int, ...]) -> Fault:
        self._step += 2  # no copies of an earlier world are left
        moments = tuple(one for one in self._moments if one != "recovery")
        return self._made("kill node" if nodes else "kill", ranks, moments, nodes)

    def _made(
        self,
        how: str,
        ranks: tuple[int, ...],
        moments: tuple[str, ...],
        nodes: tuple[int, ...] = (),
    ) -> Fault:
        if self._is_first:
            moments = tuple(one for one in moments if one != "recovery")
        elif self.draw.random() < 0.7:
            self._step += self.draw.randint(1, TOTAL // 6)
        self._is_first = False
        moment = self.draw.choice(moments)
        step = 0 if moment == "recovery" else self._step  # from its next recovery
        if moment == "us":
            moment = f"{self.draw.randint(0, _LONGEST_US)} us"
        elif moment == "save":
            moment = f"{self.draw.randint(0, _LONGEST_SAVE_US)} us of a save"
        return Fault(how=how, ranks=ranks, moment=moment, step=step, nodes=nodes)


def _ranks(faults: _Faults, number: int) -> Iterator[Fault]:
    """Lose three or four of five ranks; in two of three trainings, one by a stop or a hang."""
    draw = faults.draw
    first, *others = draw.sample(range(5), draw.randint(3, 4))
    yield (faults.kill, faults.stop, faults.hang)[number % 3](first)
    for rank in others:
        yield faults.kill(rank)


def _nodes(faults: _Faults) -> Iterator[Fault]:
    """Lose one or both of the nodes without the store, and ranks before and after."""
    draw = faults.draw
    left = {node: [2 * node, 2 * node + 1] for node in range(3)}
    order = draw.choice(((1,), (2,), (1, 2), (2, 1), (1, 2), (2, 1)))
    for node in order:
        if draw.random() < 0.8:
            yield _one_of(faults, left, draw)
        yield faults.node(tuple(left.pop(node)), node)
    if draw.random() < 0.5 and sum(map(len, left.values())) > 1:
        yield _one_of(faults, left, draw)


def _one_of(faults: _Faults, left: dict[int, list[int]], draw: random.Random) -> Fault:
    """Lose one rank of a node on which another rank remains."""
    ranks = left[draw.choice([node for node, ranks in left.items() if len(ranks) > 1])]
    rank = ranks.pop(draw.randrange(len(ranks)))
    return faults.hang(rank) if draw.random() < 0.2 else faults.kill(rank)


def _both_copies(faults: _Faults) -> Iterator[Fault]:
    """Lose all ranks of two of the three hosts at once, after losing some of them earlier.

    A rank's copies are on its own host and on the next one, so both copies of some shards are lost.
    """
    draw = faults.draw
    left = {node: [2 * node, 2 * node + 1] for node in range(3)}
    for _ in range(draw.randint(0, 2)):
        yield _one_of(faults, left, draw)
    nodes = draw.choice(((1, 2), (2, 1), (0, 1), (2, 0)))
    takes_launchers = 0 not in nodes and draw.random() < 0.5
    ranks = tuple(rank for node in nodes for rank in left[node])
    yield faults.together(ranks, nodes if takes_launchers else ())


def compared(layout: str, number: int) -> Plan:
    """Return a training in which one of three ranks is killed, the same in each layout.

    Separate from `plan_of`, whose draws must not change because records of them exist.
    """
    draw = random.Random(f"compared {number}")
    moment = draw.choice(("forward", "backward", "optimizer", "us", "us", "us"))
    if moment == "us":
        moment = f"{draw.randint(0, _LONGEST_US)} us"
    step = draw.randint(1, TOTAL // 2)
    kill = Fault(how="kill", ranks=(draw.randrange(3),), moment=moment, step=step)
    return Plan(
        layout=layout, number=number, num_nodes=1, ranks_per_node=3, is_sharded=False,
        faults=(kill,),
    )  # fmt: skip
