"""Define the data that the launcher exchanges with ranks that continue after others are lost.

- An epoch, in the job's store, lists the ranks that remain.
- A standing, in RANK_DIR/standing.json, reports to the launcher whether a rank can continue.
- A notice, posted in the job's store when an attempt is about to end, names the ranks whose nodes
  were lost. Without the notice, the other ranks would wait for the lost ranks.

Both the launcher and the ranks import this module.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

_FILE = "standing.json"
SHRINK = "shrink"  # of ECHELON_ON_LOSS: the launcher publishes epochs
REPLACE = "replace"  # the same, and starts a process in the place of each lost rank
BOARD = "echelon/board"  # the folder of the store that holds the notices, as BOARD/0, BOARD/1, ...
EVERY_GROUP = "*"
_MOST_NAMED = 64  # ranks in a notice, so that it fits into one write to the store's pipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """The ranks that continue an attempt after a loss or together with joining ranks.

    A newer epoch replaces all earlier epochs. An epoch with `joins` does not follow a loss. The
    ranks of the previous epoch finish their step and then enter the new epoch together with the
    joining ranks.

    Attributes:
        number: the epoch's number, counting from 1. Epoch 0, in which the attempt begins, is not
            published.
        roster: the ranks that continue, in ascending order.
        lost: the ranks that the attempt has lost so far, in ascending order.
        done: the ranks that have finished all steps.
        left: the ranks that exited before their last step. If this list is not empty, no rank can
            continue.
        joins: the ranks of the roster that join at the start of this epoch to replace lost ranks.
        dismissed: the ranks that were waiting to join but must exit, because the other ranks have
            finished.
        withdraws: the earlier epoch whose admissions this epoch cancels, because ranks died before
            they joined; 0 if none. A rank that has not yet reached the gate of the earlier epoch is
            not affected, and enters this epoch at the end of a step.
        lives: for each replaced rank of the roster, how many earlier processes ran as this rank, as
            [rank, number]. An earlier process that is cut off may still be running.
    """

    number: int
    roster: tuple[int, ...]
    lost: tuple[int, ...]
    done: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    joins: tuple[int, ...] = ()
    dismissed: tuple[int, ...] = ()
    withdraws: int = 0
    lives: tuple[tuple[int, int], ...] = ()

    def life_of(self, rank: int) -> int:
        """Return how many earlier processes held a rank; 0 if the rank was never replaced."""
        return dict(self.lives).get(rank, 0)

    def pack(self) -> str:
        """Return the epoch encoded as compact JSON."""
        return json.dumps({"format": 1, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def unpack(cls, text: str | bytes) -> Epoch:
        """Decode an epoch that `pack` encoded.

        Raises:
            ValueError: the string is not an encoded epoch.
        """
        try:
            told = json.loads(text)
            names = ("roster", "lost", "done", "left", "joins", "dismissed")
            lists = {name: tuple(map(int, told[name])) for name in names}
            lives = tuple((int(rank), int(life)) for rank, life in told["lives"])
            number, withdraws = int(told["number"]), int(told["withdraws"])
            return cls(number=number, withdraws=withdraws, lives=lives, **lists)
        except (KeyError, TypeError) as err:
            raise ValueError(f"the text does not describe an epoch: {text[:80]!r}") from err


def epoch_key(number: int) -> str:
    """Return the store key of an epoch."""
    return f"continuation/{number}/epoch"


def meeting_key(number: int) -> str:
    """Return the store key of the gate at which the ranks of an epoch wait for each other.

    The last rank to arrive opens the gate, or the launcher does if a newer epoch begins first.
    """
    return f"continuation/{number}/meeting"


def begun_key(rank: int) -> str:
    """Return the store key that a rank sets once it can continue after a loss.

    The ranks also report to the launcher that they can continue, but these reports are delayed. If
    a node is lost before it has sent them, the keys are still in the store.
    """
    return f"continuation/begun/{rank}"


def lost_notice(ranks: Sequence[int], text: str) -> str:
    """Return a notice about lost ranks, encoded as JSON without spaces, for the job's store.

    Args:
        ranks: the ranks that were lost with their nodes.
        text: the reason to state in the errors that the other ranks raise.
    """
    notice = {
        "group": EVERY_GROUP,
        "class": "lost",
        "ranks": list(ranks[:_MOST_NAMED]),
        "text": text,
        "operation": "abort",
        "sequence": -1,
        "by": -1,
    }
    return json.dumps(notice, separators=(",", ":")).replace(" ", "\\u0020")


class State(Enum):
    """The state of a rank within an epoch."""

    PROTECTED = "protected"  # it holds what it takes to continue without another rank
    DONE = "done"  # it has finished all steps
    JOINING = "joining"  # it takes the place of a lost rank, and has no state yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A rank's report of its own state.

    Attributes:
        epoch: the number of the rank's epoch.
        step: the first step of this epoch.
        repeats: the number of steps that must be repeated in this epoch; at most 1, unless copies
            of shards were incomplete or the ranks rolled back to a checkpoint.
        ready_mono_ns: the time at which the rank was ready to compute the step.
        ready_there_ns: the same time on the clock of the rank's node, if the launcher received the
            report from another node; 0 otherwise.
        meets: the epoch that the rank is entering together with joining ranks; 0 if none.
    """

    state: State
    epoch: int = 0
    step: int = 0
    repeats: int = 0
    ready_mono_ns: int = 0
    ready_there_ns: int = 0
    meets: int = 0


def note_standing(standing: Standing) -> bool:
    """Report this rank's standing to the launcher; return whether the report was written."""
    folder = os.environ.get("ECHELON_RANK_DIR", "")
    if not folder:
        return False
    told = {"format": 1, **asdict(standing), "state": standing.state.value}
    part = Path(folder) / f".{_FILE}.{os.getpid()}.part"
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(told))
        part.replace(part.with_name(_FILE))
        return True
    return False


def read_standing(rank_dir: Path) -> Standing | None:
    """Return the latest standing that a rank has reported, or None if it cannot be read."""
    try:
        told = json.loads((rank_dir / _FILE).read_text())
        return Standing(
            state=State(told["state"]),
            epoch=int(told["epoch"]),
            step=int(told["step"]),
            repeats=int(told["repeats"]),
            ready_mono_ns=int(told["ready_mono_ns"]),
            meets=int(told["meets"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
