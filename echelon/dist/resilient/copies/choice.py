"""Decide where copies are kept, and which of them the survivors of a loss restore. Pure functions.

Two ranks are at one place if they can map each other's memory: on one host, in one PID namespace.
What a rank copies into shared memory outlives it as long as any other rank of its place lives. So a
second copy is needed only against the loss of a whole place, and is kept at another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass


def partners_of(places: Sequence[Hashable]) -> list[int | None]:
    """Return for each rank the rank at another place that keeps the second copy of its shards.

    The ranks of one place copy to the next place in order of first appearance, cyclically, and are
    divided evenly among the ranks there.

    Args:
        places: the place of each rank.

    Returns:
        The partners; None for all ranks if there is only one place.

    Example:
        >>> partners_of(["a", "a", "b", "b"])
        [2, 3, 0, 1]
        >>> partners_of(["a", "a"])
        [None, None]
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        members[place].append(rank)
    if len(members) == 1:
        return [None] * len(places)
    order = list(members)
    found: list[int | None] = []
    for rank, place in enumerate(places):
        others = members[order[(order.index(place) + 1) % len(order)]]
        found.append(others[members[place].index(rank) % len(others)])
    return found


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """One state, as it was divided among the ranks of one epoch.

    Attributes:
        step: the first step that has not been done in this state.
        epoch: the epoch whose ranks divided the state.
    """

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One copy of one rank's shards that a survivor can read.

    Attributes:
        version: the state that the copy belongs to.
        owner: the rank whose shards these are, as numbered by the launcher.
    """

    version: Version
    owner: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The state that all survivors restore.

    Attributes:
        version: the newest state of which every shard is held by a survivor.
        holders: for each rank that the state was divided among, a survivor that can read its copy.
    """

    version: Version
    holders: Mapping[int, int]


class CopiesLostError(Exception):
    """No state is complete: all copies of some rank's shards are gone."""


def choose(offers: Mapping[int, Iterable[Offer]], rosters: Mapping[int, Sequence[int]]) -> Choice:
    """Return the newest state of which every shard is held by some survivor.

    All survivors pass the same values, and so choose the same.

    Args:
        offers: what each survivor can read.
        rosters: the ranks of each epoch that is offered.

    Raises:
        CopiesLostError: no step is left of which every shard has a copy.
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
