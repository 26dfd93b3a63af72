"""When ranks arrive: arrival lags at collectives, on one clock.

The lag of a rank at a collective is how much later it came than the first. Clocks of ranks on one
host are the same; across hosts the recorded offset and its error count. Where the offset was never
measured the lag is taken from the time spent inside instead: who came last waited least, and that
needs no common clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.analysis.evidence import Evidence
from echelon.analysis.lanes import Lanes
from echelon.recorder.schema import State


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """How late members came to the collectives that all of them completed.

    Attributes:
        members: global ranks. [num_members]
        lag_ns: how much later than the first. [num_members, num_collectives]
        created_ns: when the first member came. [num_collectives]
    """

    group: str
    members: npt.NDArray[np.int64]
    lag_ns: npt.NDArray[np.int64]
    created_ns: npt.NDArray[np.int64]

    @property
    def span_s(self) -> float:
        """From the first to the last of these collectives."""
        if len(self.created_ns) < 2:
            return 0.0
        return float(self.created_ns[-1] + self.lag_ns[:, -1].max() - self.created_ns[0]) / 1e9

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """Index of the member that came last, per collective. [num_collectives]"""
        return np.asarray(self.lag_ns.argmax(axis=0), np.int64)

    @property
    def cost_ns(self) -> npt.NDArray[np.int64]:
        """How much later the last came than the one before it, per collective."""
        if self.lag_ns.shape[0] < 2:
            return np.zeros(self.lag_ns.shape[1], np.int64)
        upper = np.partition(self.lag_ns, -2, axis=0)
        return np.asarray(upper[-1] - upper[-2], np.int64)


def arrivals(lanes: Lanes) -> Arrivals | None:
    """Return the arrival lags of one group, None if fewer than two members took part."""
    done = (lanes.state == State.COMPLETED).all(axis=0)
    if len(lanes.members) < 2 or not done.any() or lanes.strangers:
        return None
    created = lanes.column("created_ns", 0)[:, done]
    if clocks_are_common(lanes.evidence, lanes.members.tolist()):
        first = created.min(axis=0)
        lag = created - first
    else:
        inside: npt.NDArray[Any] = lanes.column("ended_ns", 0)[:, done] - created
        lag = inside.max(axis=0) - inside
        first = created[0]
    return Arrivals(group=lanes.name, members=lanes.members, lag_ns=lag, created_ns=first)


def clocks_are_common(evidence: Evidence, ranks: list[int]) -> bool:
    """Tell whether stamps of these ranks can be compared to well below a millisecond or so."""
    if evidence.foreign:
        return True  # wall clocks: all there is
    identities = [evidence.ranks[rank].identity for rank in ranks]
    if len({identity.boot_id or identity.host for identity in identities}) <= 1:
        return True
    return all(identity.rank == 0 or identity.clock_error_ns >= 0 for identity in identities)
