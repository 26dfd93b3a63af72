"""Measure the costs of a step on all ranks of a group: time, waits and memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.recorder.spent import spent

if TYPE_CHECKING:
    import numpy.typing as npt

    from echelon.dist.group import ProcessGroup

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes


@dataclass(frozen=True, slots=True)
class Moment:
    """A clock reading and the calling thread's cumulative waiting times, all in seconds.

    Subtracting one `Moment` from another yields the elapsed time and the waiting times between
    them.
    """

    time_s: float
    data_wait_s: float
    collectives_s: float

    @classmethod
    def now(cls, time_s: float) -> Moment:
        """Return the thread's waiting times so far, together with the clock reading `time_s`."""
        return cls(time_s, spent.spans_ns.get("data_wait", 0) / 1e9, spent.collectives_s)

    def __sub__(self, other: Moment) -> Moment:
        return Moment(
            self.time_s - other.time_s,
            self.data_wait_s - other.data_wait_s,
            self.collectives_s - other.collectives_s,
        )

    def __add__(self, other: Moment) -> Moment:
        return Moment(
            self.time_s + other.time_s,
            self.data_wait_s + other.data_wait_s,
            self.collectives_s + other.collectives_s,
        )


def peak_memory_bytes() -> int:
    """Return the process's peak memory on the GPU if it uses a GPU, or else on the host."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


def gather(costs: Moment, group: ProcessGroup | None) -> npt.NDArray[Any]:
    """Return the costs of all ranks as `[ranks, 4]`.

    The columns are the elapsed time, the data wait and the time in collectives, all in seconds, and
    the peak memory in bytes.

    Collective if a group is given; each rank sends 32 bytes.
    """
    own = np.array(
        [[costs.time_s, costs.data_wait_s, costs.collectives_s, peak_memory_bytes()]], np.float64
    )
    if group is None or group.size == 1:
        return own
    everyone = np.empty((group.size, own.shape[1]), np.float64)
    group.all_gather(everyone, own)
    return everyone
