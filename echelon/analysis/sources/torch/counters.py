"""Read torch's counters, which show each rank's progress in each group.

`pg_status` is keyed by local group numbers, which increase in the order in which the rank created
its groups. The entries of the dump map these numbers to names. If a group has no entries, its name
is taken from `pg_config`: numeric names have the same order as the numbers, and other names are
matched through the descriptions in other ranks' dumps.

Each entry contains two counters of its group, one for collectives and one for messages. `pg_status`
contains the counter that changed last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Pair = int  # index of a (name, description)
WORLD = "default_pg"  # torch's name for the group of all ranks


@dataclass(slots=True)
class Tops:
    """The highest counter values seen in one rank's entries for one group."""

    collectives: int = 0
    messages: int = 0
    local_number: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """The counters in one rank's entries and in `pg_status`."""

    tops: Mapping[Pair, Tops] = field(default_factory=dict)
    status: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()  # (name, description) of `pg_config`


def join_numbers(
    counters: Counters, described: Mapping[int, frozenset[str]], pairs: list[tuple[str, str]]
) -> dict[int, tuple[str, str]]:
    """Map the local group numbers in a rank's `pg_status` to group names and descriptions."""
    found = {tops.local_number: pairs[pair] for pair, tops in counters.tops.items()}
    left = [number for number in sorted(counters.status) if number not in found]
    names = [one for one in counters.names if one not in set(found.values())]
    if not left or not names:
        return found
    if all(name.isdigit() for name, _ in counters.names):
        names.sort(key=lambda one: int(one[0]))
        every = sorted(counters.names, key=lambda one: int(one[0]))
        if len(counters.status) == len(every):
            return {**found, **dict(zip(sorted(counters.status), every, strict=True))}
        for number in left:
            if number < len(every) and _agrees(every[number], described.get(number)):
                found[number] = every[number]
        return found
    for number in left:
        alike = [one for one in names if one[1] in described.get(number, frozenset())]
        if len(alike) == 1:
            found[number] = alike[0]
    return _by_elimination(found, counters)


def _by_elimination(
    found: dict[int, tuple[str, str]], counters: Counters
) -> dict[int, tuple[str, str]]:
    """Match the remaining group numbers and names by elimination."""
    if len(counters.status) != len(counters.names):
        return found
    taken = set(found.values())
    left = [number for number in sorted(counters.status) if number not in found]
    names = [one for one in counters.names if one not in taken]
    world = [one for one in names if one[1] == WORLD]
    if len(world) == 1 and left[:1] == [min(counters.status)]:
        found[left.pop(0)] = world[0]
        names.remove(world[0])
    if len(left) == 1 and len(names) == 1:
        found[left[0]] = names[0]
    return found


def _agrees(one: tuple[str, str], described: frozenset[str] | None) -> bool:
    return described is None or one[1] in described


def descriptions(
    all_counters: Iterable[Counters], pairs: list[tuple[str, str]]
) -> dict[int, frozenset[str]]:
    """Return the group descriptions found in the ranks' entries, keyed by local group number."""
    found: dict[int, set[str]] = {}
    for counters in all_counters:
        for pair, tops in counters.tops.items():
            found.setdefault(tops.local_number, set()).add(pairs[pair][1])
    return {number: frozenset(texts) for number, texts in found.items()}
