"""Parse `--rdzv-conf`, which configures the rendezvous and the detection of lost nodes.

All of torchrun's keys are accepted. For each key that has no effect in echelon, a note is added to
`Conf.notes`. An unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

JOIN_TIMEOUT_S = 600.0
LOST_AFTER_S = 15.0
_MIN_LOST_AFTER_S = 1.0
BEAT_S = 0.5
# Reports per second, from all nodes. A report and the host's beat in return cost it about 600 us.
_NODES_PER_BEAT = 170
# Beats that may be missing before a node counts as lost. A connection delays beats but never drops
# any, so two within that time are enough.
_BEATS_LOST = 2.5
_TORCHRUNS = frozenset(
    {
        "close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt",
        "protocol", "rank", "read_timeout", "store_type", "use_agent_store", "use_libuv",
    }
)  # fmt: skip
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Conf:
    """The settings from `--rdzv-conf`."""

    is_host: bool | None = None  # None: decided by node rank, otherwise by address
    join_timeout_s: float = JOIN_TIMEOUT_S
    last_call_s: float | None = None  # None: adaptive
    lost_after_s: float = LOST_AFTER_S  # of silence
    failover: bool = False  # another node hosts the job if the hosting one is lost
    notes: tuple[str, ...] = ()


def read_conf(settings: Mapping[str, str]) -> Conf:
    """Convert the key-value pairs of `--rdzv-conf` to a `Conf`.

    Raises:
        ValueError: a key is unknown, or a value is malformed or out of range.
    """
    unknown = settings.keys() - _TORCHRUNS - {
        "is_host", "join_timeout", "timeout", "last_call_timeout", "lost_after", "failover"
    }  # fmt: skip
    if unknown:
        raise ValueError(
            f"--rdzv-conf: unknown setting {min(unknown)!r}; use is_host, join_timeout, "
            "last_call_timeout, lost_after or failover"
        )
    last_call = settings.get("last_call_timeout")
    return Conf(
        is_host=_truth("is_host", settings["is_host"]) if "is_host" in settings else None,
        failover=_truth("failover", settings.get("failover", "false")),
        join_timeout_s=_seconds(
            "join_timeout", settings.get("join_timeout", settings.get("timeout", JOIN_TIMEOUT_S))
        ),
        last_call_s=None if last_call is None else _seconds("last_call_timeout", last_call, 0.0),
        lost_after_s=_seconds(
            "lost_after", settings.get("lost_after", LOST_AFTER_S), _MIN_LOST_AFTER_S
        ),
        notes=tuple(
            f"--rdzv-conf {name} has no effect: it is torchrun's own"
            for name in sorted(settings.keys() & _TORCHRUNS)
        ),
    )


def beat_s(num_nodes: int, lost_after_s: float) -> float:
    """Return the interval between a node's heartbeats, in seconds; it grows with `num_nodes`."""
    return max(BEAT_S, min(num_nodes / _NODES_PER_BEAT, lost_after_s / _BEATS_LOST))


def _truth(name: str, text: str) -> bool:
    try:
        return _TRUTH[text.lower()]
    except KeyError:
        raise ValueError(f"--rdzv-conf {name}={text}: must be true or false") from None


def _seconds(name: str, value: str | float, least: float = 1e-3) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not least <= number < float("inf"):
        raise ValueError(f"--rdzv-conf {name}={value}: must be at least {least:g} s")
    return number
