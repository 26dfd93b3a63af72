"""Protect one training call per process from rank loss, under a launcher that supports this."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator

from echelon.dist import runtime
from echelon.dist.group import ProcessGroup
from echelon.dist.membership.environment import on_loss
from echelon.dist.resilient.copies.choice import named
from echelon.dist.resilient.epochs import News
from echelon.dist.resilient.joining import Joins
from echelon.errors import PeerLostError
from echelon.recorder.continuation import REPLACE, SHRINK, Epoch
from echelon.store import MemoryStore

_is_claimed = False  # by a protected call of this process


def is_protected(group: ProcessGroup, call: str) -> bool:
    """Return whether training survives the loss of a rank; warn if `--on-loss` rules this out.

    Only rank 0 issues the warning. A world of one rank is protected only if other ranks can join
    it.

    Args:
        group: the world.
        call: the name of the calling function, for the warning and the error text.

    Raises:
        ValueError: a protected call was already made in this process.
    """
    global _is_claimed
    if group.size == 1 and not _may_be_joined():
        return False
    if on_loss() not in (SHRINK, REPLACE):
        if group.rank == 0:
            warnings.warn(
                f"resilient.{call} gives no protection here: this job ends if a rank dies. Start "
                "the job with `echelon run --on-loss shrink`",
                stacklevel=3,
            )
        return False
    if _is_claimed:
        raise ValueError(
            f"resilient.{call} was already called in this process: with --on-loss shrink or "
            "replace, a single call must train all steps"
        )
    _is_claimed = True
    return True


def _may_be_joined() -> bool:
    return on_loss() == REPLACE and not isinstance(runtime.job_store(), MemoryStore)


@contextlib.contextmanager
def listening(joins: Joins) -> Iterator[None]:
    """Watch for new epochs during the `with` block; after a loss, abort the old world's groups."""
    runtime.expect_epochs()
    take = functools.partial(_take_news, joins)
    with News(runtime.job_store(), take, runtime.join_after() or 0):
        yield


def _take_news(joins: Joins, epoch: Epoch) -> None:
    """Abort all older worlds' groups if a new epoch follows a loss. Runs on the `News` thread."""
    if epoch.left or epoch.dismissed:
        return  # only ranks that miss the one which left have failed
    if joins.is_orderly(epoch):
        joins.note(epoch)
        return
    text = f"the launcher counts {named(epoch.lost)} as lost"
    error = PeerLostError(text, operation="loss", sequence=epoch.number, ranks=epoch.lost)
    runtime.end_world(error, epoch.number)
