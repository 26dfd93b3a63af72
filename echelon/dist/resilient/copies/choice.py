"""Decide where copies are kept, and which copies are restored after a loss.

Two ranks are at the same place if they can map each other's memory, which means that they run on
one host in one PID namespace. A copy in shared memory exists as long as any rank at that place is
alive. A second copy, at another place, protects against the loss of a whole place. If there are
several machines, the second copy is kept on another machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass


def partners_of(places: Sequence[Hashable], machines: Sequence[Hashable] = ()) -> list[int | None]:
    """Return, for each rank, the rank at another place that keeps the second copy of its shards.

    The ranks of each place send their copies to the next place, and the ranks of the last place
    send them to the first. The copies are divided evenly among the ranks of the receiving place. A
    place on the sender's own machine, such as another container, is skipped if there is a place on
    another machine.

    Args:
        places: the place of each rank.
        machines: the machine of each rank; by default, each place is a machine.

    Returns:
        The partners; None for all ranks if there is only one place.

    Example:
        >>> partners_of(["a", "a", "b", "b"])
        [2, 3, 0, 1]
        >>> partners_of(["a", "b", "c"], ["first", "first", "second"])
        [2, 2, 0]
        >>> partners_of(["a", "a"])
        [None, None]
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        members[place].append(rank)
    if len(members) == 1:
        return [None] * len(places)
    machine_of = dict(zip(places, machines or places, strict=True))
    found: list[int | None] = []
    for rank, place in enumerate(places):
        others = members[_next_place(place, list(members), machine_of)]
        found.append(others[members[place].index(rank) % len(others)])
    return found


def _next_place(
    place: Hashable, order: list[Hashable], machine_of: Mapping[Hashable, Hashable]
) -> Hashable:
    at = order.index(place)
    after = order[at + 1 :] + order[:at]
    return next((one for one in after if machine_of[one] != machine_of[place]), after[0])


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """A state, identified by its step and by the epoch whose ranks it was divided among.

    Attributes:
        step: the next step to run from this state.
        epoch: the epoch whose ranks divided the state.
    """

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One copy of one rank's shards that a survivor can read.

    Attributes:
        version: the state to which the copy belongs.
        owner: the rank whose shards the copy contains, as numbered by the launcher.
    """

    version: Version
    owner: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The state that all survivors restore.

    Attributes:
        version: the newest state for which survivors hold copies of all shards.
        holders: for each rank of the state's epoch, a survivor that can read a copy of the rank's
            shards.
    """

    version: Version
    holders: Mapping[int, int]


class CopiesLostError(Exception):
    """All copies of some rank's shards have been lost, so no state is complete."""


def choose(offers: Mapping[int, Iterable[Offer]], rosters: Mapping[int, Sequence[int]]) -> Choice:
    """Return the newest state for which survivors hold copies of all shards.

    Args:
        offers: the copies that each survivor can read.
        rosters: the ranks of each epoch from which copies are offered.

    Raises:
        CopiesLostError: no state has copies of all its shards.
    """
    found: dict[Version, dict[int, int]] = defaultdict(dict)
    for survivor in sorted(offers):
        for offer in offers[survivor]:
            # An owner that lives reads its own memory; else the first that can.
            if offer.owner == survivor or offer.owner not in found[offer.version]:
                found[offer.version][offer.owner] = survivor
    for version in sorted(found, reverse=True):
        if set(rosters[version.epoch]) <= set(found[version]):
            return Choice(version, found[version])
    raise CopiesLostError(_missing(found, rosters))


def _missing(
    found: Mapping[Version, Mapping[int, int]], rosters: Mapping[int, Sequence[int]]
) -> str:
    if not found:
        return "no rank has a copy of any state"
    newest = max(found)
    gone = sorted(set(rosters[newest.epoch]) - set(found[newest]))
    named = ", ".join(map(str, gone))
    return f"all copies of the shards of rank {named} are lost (step {newest.step})"
