"""Decide what follows a failure, based on the earlier failures and the policy table.

A failure repeats an earlier failure if both have the same cause and site, and the job has completed
no new step in between. If the two occurred at different steps, the error might not be
deterministic, so the job gets one more attempt. Only new steps reset the count of repetitions;
other failures do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.table import Pause, Row, row_for

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
MAX_REMEMBERED = 64  # failures; older ones say little about the next attempt


class Action(Enum):
    """An action that can follow a failed attempt."""

    CONTINUE = "continue"  # with the nodes that remain; no restart is counted
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision on what follows a failed attempt.

    Attributes:
        reason: the reason for the decision, as one clause.
        pause_s: the pause before the next attempt, in seconds.
        exclude: the names of the nodes to avoid in later worlds.
    """

    action: Action
    reason: str
    pause_s: float = 0.0
    exclude: tuple[str, ...] = ()


def decide(
    failure: Failure, history: Sequence[Failure], *, exclude_after: int, can_replace: bool
) -> Decision:
    """Decide which action follows a failure.

    Args:
        history: the job's earlier failures, oldest first.
        exclude_after: the number of failures after which a node is avoided; 0 means never.
        can_replace: whether enough nodes are connected to replace the culprits' nodes.
    """
    row = row_for(failure)
    same = repeated(failure, history)
    limit = row.repeats
    if limit and len({one.last_step for one in (*same, failure)}) > 1:
        limit += 1
    if limit is not None and len(same) >= limit:
        return Decision(action=Action.STOP, reason=_why_stop(row, failure, same))
    reason, exclude = _about_nodes(failure, history, exclude_after, can_replace)
    return Decision(
        action=Action.RESTART,
        reason=reason,
        pause_s=_pause_s(row, failure, history),
        exclude=exclude,
    )


def repeated(failure: Failure, history: Sequence[Failure]) -> list[Failure]:
    """Return the earlier occurrences of a failure since the job last made progress."""
    return [one for one in _since_progress(failure, history) if failure.repeats(one)]


def _since_progress(failure: Failure, history: Sequence[Failure]) -> list[Failure]:
    """Of the earlier failures, return the first one at the highest step and all that followed it.

    The list is empty if the current failure occurred at a later step than all earlier failures.
    """
    furthest, stuck = -1, 0
    for place, one in enumerate(history):
        if one.last_step > furthest:
            furthest, stuck = one.last_step, place
    return [] if failure.last_step > furthest else list(history[stuck:])


def _why_stop(row: Row, failure: Failure, same: Sequence[Failure]) -> str:
    said = failure.said or failure.cause
    times = f", {len(same) + 1} times without progress" if same else ""
    at = f" at step {failure.last_step}" if same and failure.last_step >= 0 else ""
    return f"{said}{times}{at}: {row.why}"


def _pause_s(row: Row, failure: Failure, history: Sequence[Failure]) -> float:
    num_stuck = len(_since_progress(failure, history))
    doublings = num_stuck if row.pause is Pause.ALWAYS else num_stuck - 1
    if doublings < 0:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(doublings, 30)))


def _about_nodes(
    failure: Failure, history: Sequence[Failure], exclude_after: int, can_replace: bool
) -> tuple[str, tuple[str, ...]]:
    """Return the reason to give for a decision, and the names of the nodes to avoid."""
    reason = failure.said or failure.cause
    if not exclude_after or not _blames(failure):
        return reason, ()
    blamed = Counter(node for one in (*history, failure) if _blames(one) for node in set(one.nodes))
    bad = [node for node in failure.nodes if blamed[node] >= exclude_after]
    if not bad:
        return reason, ()
    names = dict(zip(failure.nodes, failure.hosts, strict=False))
    hosts = ", ".join(dict.fromkeys(names.get(node, node) for node in bad))
    counted = f"{max(blamed[node] for node in bad)} failures of {hosts}"
    if not can_replace:
        return f"{reason}; {counted}, but no other node could take its place", ()
    return f"{reason}; {counted}: excluded", tuple(bad)


def _blames(failure: Failure) -> bool:
    """Return whether a failure counts against the culprits' nodes."""
    return row_for(failure).blames_node and (failure.is_certain or failure.is_killed)
