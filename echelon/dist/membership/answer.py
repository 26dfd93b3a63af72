"""Define a rank's answer to a liveness check, and use the answers to find the ranks at fault.

A receive that times out shows only that the peer did not send. The peer might be waiting for
another rank. An error must therefore name the rank at the end of the chain of waits.
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
    """The calls that a rank has made so far, and what its threads are waiting for.

    Attributes:
        num_called: number of the group's collectives that the rank has called.
        peers: group ranks whose messages the rank is waiting for.
        collectives: numbers of the collectives in which the rank is waiting.
    """

    num_called: int
    peers: Sequence[int] = ()
    collectives: Sequence[int] = ()


def answer_of(state: GroupState) -> str:
    """Encode this rank's answer. Safe to call from any thread."""
    waits = state.waits()
    return json.dumps(
        {
            "called": state.num_collectives,
            "peers": [one.peer for one in waits if one.is_message and one.peer >= 0],
            "collectives": [one.sequence for one in waits if not one.is_message],
        }
    )


def read(text: str | bytes) -> Answer:
    """Decode an answer that `answer_of` encoded."""
    told = json.loads(text)
    return Answer(told["called"], told["peers"], told["collectives"])


def origins(
    me: int, late: Sequence[int], answers: Mapping[int, Answer], silent: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Follow the chains of waiting ranks, starting from the ranks that did not send.

    Args:
        me: the group rank of this rank, which is waiting for `late`.
        late: the group ranks that did not send.
        answers: the answers, keyed by group rank, including this rank's answer.
        silent: group ranks that did not answer; chains end there.

    Returns:
        The group ranks at the ends of the chains, and the group ranks in between. A cycle has no
        end. If all chains are cycles, the result is `late` and an empty list.
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
    """Return the ranks that a rank is waiting for, according to the liveness check's answers."""
    if rank not in answers:
        return []
    mine = answers[rank]
    needed = list(mine.peers)
    for number in mine.collectives:
        needed += [other for other, one in answers.items() if one.num_called <= number]
        needed += silent
    return [other for other in needed if other != rank]
