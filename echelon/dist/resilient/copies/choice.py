"""Decide where copies are stored, and which copies are restored after a loss.

Two ranks are at the same place if they run on one host, in the same PID namespace and the same
network namespace; they can then map each other's memory. A copy in shared memory exists until the
last rank at its place has ended. A second copy, at another place, protects against the loss of a
whole place. If there are several machines, the second copy is stored on another machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass


def partners_of(places: Sequence[Hashable], machines: Sequence[Hashable] = ()) -> list[int | None]:
    """Choose each rank's partner: the rank at another place to which it sends copies of its shards.

    The ranks of each place send their copies to the next place, and the ranks of the last place
    send them to the first. The copies are split evenly across the ranks of the receiving place. A
    place on the sender's own machine, such as another container, is skipped if there is a place on
    another machine.

    Args:
        places: the place of each rank. Ranks at one place can map each other's memory.
        machines: the machine of each rank; by default, each place counts as a machine.

    Returns:
        The partner of each rank; None for all ranks if there is only one place.

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
    """A state, identified by its step and by the epoch whose ranks held its shards.

    Attributes:
        step: the first step to run from this state.
        epoch: the epoch whose ranks held the shards of the state.
    """

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Offer:
    """One copy of one rank's shards that a survivor can read.

    Attributes:
        version: the version of the state that was copied.
        owner: the rank whose shards the copy contains, as numbered by the launcher.
    """

    version: Version
    owner: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The state that all survivors restore.

    Attributes:
        version: the newest state for which survivors hold copies of all shards.
        holders: one rank from each set of ranks that hold the same shards, mapped to a survivor
            that can read the copy of that rank's shards. Without replicas, each set consists of a
            single rank.
    """

    version: Version
    holders: Mapping[int, int]


class CopiesLostError(Exception):
    """All copies of some rank's shards have been lost, so no complete state can be restored."""


Sets = Sequence[Sequence[int]]  # of ranks with the same shards; one rank each without replicas


def without_replicas_elsewhere(
    partners: Sequence[int | None], sets: Sets, places: Sequence[Hashable]
) -> list[int | None]:
    """Drop the partner of each rank whose shards have a replica in another place.

    Args:
        partners: see `partners_of`.
        sets: the ranks, grouped into sets that hold the same shards.
        places: the place of each rank: its host or container, or its machine if there are several
            machines.

    Returns:
        The partner of each rank; None if another place has a replica of its shards.

    Example:
        >>> without_replicas_elsewhere([2, 3, 0, 1], [[0, 2], [1, 3]], ["a", "a", "b", "b"])
        [None, None, None, None]
        >>> without_replicas_elsewhere([2, 3, 0, 1], [[0, 1], [2, 3]], ["a", "a", "b", "b"])
        [2, 3, 0, 1]
    """
    found = list(partners)
    for alike in sets:
        if len({places[rank] for rank in alike}) > 1:
            for rank in alike:
                found[rank] = None
    return found


def choose(offers: Mapping[int, Iterable[Offer]], sets: Mapping[int, Sets]) -> Choice:
    """Return the newest state for which survivors hold copies of all shards.

    Args:
        offers: the copies that each survivor can read.
        sets: for each epoch of the offered copies, the epoch's ranks, grouped into sets that hold
            the same shards.

    Raises:
        CopiesLostError: there is no state for which survivors hold copies of all shards.
    """
    found: dict[Version, dict[int, int]] = defaultdict(dict)
    for survivor in sorted(offers):
        for offer in offers[survivor]:
            # An owner that lives reads its own memory; else the first that can.
            if offer.owner == survivor or offer.owner not in found[offer.version]:
                found[offer.version][offer.owner] = survivor
    for version in sorted(found, reverse=True):
        holders = found[version]
        owners = [_owner(alike, holders) for alike in sets[version.epoch]]
        if None not in owners:
            return Choice(version, {one: holders[one] for one in owners if one is not None})
    raise CopiesLostError(_missing(found, sets))


def _owner(alike: Sequence[int], holders: Mapping[int, int]) -> int | None:
    """Return the rank in `alike` whose copy is to be read, or None if all of their copies are lost.

    All ranks in `alike` have the same shards. A rank that can read its own copy is preferred.
    """
    offered = [rank for rank in alike if rank in holders]
    return min(offered, key=lambda rank: (holders[rank] != rank, rank), default=None)


def _missing(found: Mapping[Version, Mapping[int, int]], sets: Mapping[int, Sets]) -> str:
    if not found:
        return "no rank has a copy of any state"
    lost = {
        version: [
            rank
            for alike in sets[version.epoch]
            if _owner(alike, holders) is None
            for rank in alike
        ]
        for version, holders in found.items()
    }
    nearest = min(lost, key=lambda one: (len(lost[one]), -one.step, -one.epoch))
    ranks = sorted(lost[nearest])
    return f"all copies of the state of {named(ranks)} are lost (step {nearest.step})"


def named(ranks: Iterable[int]) -> str:
    """Format rank numbers as "rank 1" or "ranks 1, 2 and 3", and an empty list as "a rank"."""
    names = [str(rank) for rank in ranks]
    if len(names) < 2:
        return f"rank {names[0]}" if names else "a rank"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
