"""Answer: what a rank says of itself in a liveness check, and which rank is then at fault.

A message that times out shows only that its peer did not send. The peer may wait in turn, for
another message or in a collective, and then the rank at the end of that chain is the one to name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.dist.progress.group_state import GroupState


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank has called, and what its threads wait for now.

    Attributes:
        num_called: collectives of the group.
        peers: group ranks whose messages it waits for.
        collectives: numbers of the collectives that it waits in.
    """

    num_called: int
    peers: Sequence[int] = ()
    collectives: Sequence[int] = ()


def answer_of(state: GroupState) -> str:
    """Return this rank's answer, as it travels; from any thread."""
    waits = state.waits()
    return json.dumps(
        {
            "called": state.num_collectives,
            "peers": [one.peer for one in waits if one.is_message and one.peer >= 0],
            "collectives": [one.sequence for one in waits if not one.is_message],
        }
    )


def read(text: str | bytes) -> Answer:
    """Return the answer that `answer_of` wrote."""
    told = json.loads(text)
    return Answer(told["called"], told["peers"], told["collectives"])


def origins(
    me: int, late: Sequence[int], answers: Mapping[int, Answer], silent: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Follow which rank waits for which, beginning with the ranks that did not send.

    Args:
        me: the group rank that asks, which waits for `late`.
        late: group ranks.
        answers: by group rank, of this rank too.
        silent: group ranks that did not answer: chains end there.

    Returns:
        The group ranks at the ends of the chains, and those between. A circle has no end: then
        `late` and none.
    """
    ends: list[int] = []
    between: list[int] = []
    seen = {me}
    following = list(late)
    while following:
        rank = following.pop(0)
        if rank in seen:
            continue
        seen.add(rank)
        needed = _needed(rank, answers, silent)
        if needed:
            between.append(rank)
            following += needed
        else:
            ends.append(rank)
    return (sorted(ends), sorted(between)) if ends else (list(late), [])


def _needed(rank: int, answers: Mapping[int, Answer], silent: Sequence[int]) -> list[int]:
    """Return the ranks for which a rank waits, as far as the answers show it."""
    if rank not in answers:
        return []
    mine = answers[rank]
    needed = list(mine.peers)
    for number in mine.collectives:
        needed += [other for other, one in answers.items() if one.num_called <= number]
        needed += silent
    return [other for other in needed if other != rank]
