"""Determine how far each operation progressed.

The fields `state` and `retired` of an entry depend on the recorder that wrote it:

- NCCL's and XCCL's own recorders, and a hook on a backend that reports completions (`nccl2`), track
  the state. `retired` means that the operation was observed to complete or to time out.
- Gloo's own recorder, up to torch 2.13, always writes the state "scheduled". `retired` means that
  the operation ended.
- torchcomms (`torch.comms`) always writes "scheduled". `retired` means that the operation
  completed.
- A hook on a backend that reports no completions (`mpi`, `ucc`, others) always writes "scheduled".
  `retired` means only that the operation was called.

The entries show which recorder wrote them. The name of an operation begins with its backend's name,
and torchcomms describes a group by its backend. A recorder that tracks states has written at least
one state other than "scheduled". If a recorder tracks only calls, `TorchGroups` compares the calls
between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.recorder.format.schema import Flag, State

_OWN_RECORDERS = frozenset({"nccl", "xccl", ""})
_GLOO = "gloo"
_FIRST = 1  # torch counts from 1, torchcomms from 0


class NotComparableError(Exception):
    """Raised if a dump's operation numbers cannot be compared with those of other ranks."""


@dataclass(frozen=True, slots=True)
class Source:
    """The recorder that wrote an entry."""

    backend: str
    is_comms: bool

    @property
    def counts_in_status(self) -> bool:
        """True if `pg_status` counts the collectives of each group separately."""
        return not self.is_comms and self.backend in (*_OWN_RECORDERS, _GLOO)


def settle_states(
    rows: npt.NDArray[Any],
    retired: npt.NDArray[np.bool_],
    source: npt.NDArray[np.int64],
    sources: Sequence[Source],
) -> npt.NDArray[np.bool_]:
    """Set the state of each row; return which rows prove only that an operation was called.

    Args:
        rows: one rank's rows with their original states, modified in place.
        retired: the original `retired` field of each row.
        source: for each row, an index into `sources`.
    """
    called = np.zeros(len(rows), bool)
    states = rows["state"]
    for number in np.unique(source).tolist():
        mine, kind = source == number, sources[number]
        knows = bool((states[mine] != State.CREATED).any())
        if kind.backend == _GLOO or kind.is_comms:
            # An operation in Gloo's queue waits for no device, so it counts as started.
            states[mine & (states == State.CREATED)] = State.STARTED
            if not knows:
                states[mine & retired] = State.COMPLETED
        elif not knows and kind.backend not in _OWN_RECORDERS:
            called |= mine & retired
            states[mine & retired] = State.COMPLETED
    return called


def number_by_group(rows: npt.NDArray[Any]) -> None:
    """Renumber torchcomms' entries separately for each group.

    Raises:
        NotComparableError: the oldest entries are missing, so the numbers are unknown.
    """
    is_message = (rows["flags"] & Flag.P2P) > 0
    pairs = np.unique(rows["group"])
    if not np.array_equal(rows["sequence"], np.arange(len(rows))):
        if len(pairs) == 1 and not is_message.any():
            rows["sequence"] += _FIRST
            return
        raise NotComparableError(
            "torchcomms numbers the operations of all groups in one sequence, and the oldest "
            "operations are missing, so the ranks cannot be compared. Increase "
            "TORCHCOMM_FR_BUFFER_SIZE, and dump all entries"
        )
    for pair in pairs.tolist():
        for name, mine in (("sequence", ~is_message), ("p2p_sequence", is_message)):
            counted = (rows["group"] == pair) & mine
            rows[name][counted] = np.arange(counted.sum()) + _FIRST
