"""Abort all groups that a step uses, on every rank, if the step fails on one rank.

This is necessary because other ranks might be waiting for the failed rank in these groups. The
errors on the other ranks name the failed rank.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from echelon.dist.errors.build import reported
from echelon.dist.group import ProcessGroup
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveError

_MAX_TEXT = 200


@contextlib.contextmanager
def ending_on_failure(
    call: str, number: int, rank: int, on_failure: Callable[[], Iterable[ProcessGroup]]
) -> Iterator[None]:
    """Abort groups if the block raises an error; the error is propagated unchanged.

    Args:
        call, number, rank: as in `end_groups`.
        on_failure: called after a failure; returns the groups in which other ranks might be
            waiting.
    """
    try:
        yield
    except BaseException as raised:
        end_groups(on_failure(), call, number, rank, raised)
        raise


def end_groups(
    groups: Iterable[ProcessGroup], call: str, number: int, rank: int, raised: BaseException
) -> None:
    """Abort groups because of an error on this rank.

    Does not block. Groups that have already been aborted or closed are not changed.

    Args:
        groups: the groups in which other ranks might be waiting for this rank.
        call: the call that failed: "step" or "evaluate".
        number: the number of the call, counted from 0.
        rank: this process's global rank.
        raised: the error that the call raised. If the error is a `CollectiveError`, the ranks that
            it names are reported as the failed ranks.
    """
    groups = list(dict.fromkeys(groups))
    ranks: tuple[int, ...] = (rank,)
    text = f"rank {rank} failed: {_described(raised)}"
    kind: type[CollectiveError] = CollectiveError
    if isinstance(raised, CollectiveError):
        # What was raised may only refuse an operation of a group that had ended before it.
        first = next((group.state.error for group in groups if group.state.error), raised)
        ranks, kind, text = tuple(first.ranks), type(first), str(first).partition("\n")[0]
    for group in groups:
        state = group.state
        if group.size > 1 and not state.is_closed and not state.is_foreign:
            state.fail(reported(state.members, Operation(call, number), kind, text, ranks))


def _described(raised: BaseException) -> str:
    """Return an error's type, the first line of its text, and the source line that raised it."""
    text = type(raised).__name__
    if str(raised):
        text += f": {str(raised).splitlines()[0][:_MAX_TEXT]}"
    frames = traceback.extract_tb(raised.__traceback__)
    return f"{text} (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text
