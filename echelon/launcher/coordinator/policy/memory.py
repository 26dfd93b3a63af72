"""Serialize what the restart policy knows about a job, for nodes that could take over as the host.

Without this knowledge, the node that takes over as the host would count restarts and failures from
zero, and would use suspect nodes without probing them first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from echelon.launcher.coordinator.policy.failure import Failure

MOST_KEPT = 16  # failures, and decisions: every node gets them


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The restart policy's memory of a job, as of the latest start or end of an attempt.

    Attributes:
        failures: the job's failures, oldest first.
        avoided: the names of the nodes that new worlds avoid.
        decisions: the restart decisions in report.json, oldest first.
        over: the number of the latest attempt that has ended; -1 if no attempt has ended.
        suspected: the failure whose nodes must be probed before the next attempt, or None.
    """

    failures: tuple[Failure, ...] = ()
    avoided: tuple[str, ...] = ()
    decisions: tuple[dict[str, Any], ...] = ()
    over: int = -1
    suspected: Failure | None = None


def pack(memory: Memory) -> str:
    """Serialize a `Memory` as a string, keeping only the latest failures and decisions."""
    kept = replace(
        memory,
        failures=memory.failures[-MOST_KEPT:],
        decisions=memory.decisions[-MOST_KEPT:],
    )
    return json.dumps(asdict(kept))


def unpack(text: str) -> Memory:
    """Deserialize the output of `pack`. An empty string yields an empty memory.

    Raises:
        ValueError: the text is malformed.
    """
    if not text:
        return Memory()
    try:
        top = json.loads(text)
        return Memory(
            failures=tuple(_failure(one) for one in _list(top["failures"])),
            avoided=tuple(_all(str, top["avoided"])),
            decisions=tuple(_all(dict, top["decisions"])),
            over=_number(top["over"]),
            suspected=None if top["suspected"] is None else _failure(top["suspected"]),
        )
    except (ValueError, TypeError, KeyError, RecursionError) as err:
        raise ValueError(
            f"the saved state of the restart policy is malformed: {err!r:.200}"
        ) from err


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {value!r:.50}")
    return value


def _failure(values: Any) -> Failure:
    """Build a failure from deserialized values, checking the type of each field."""
    if not isinstance(values, dict):
        raise TypeError(f"expected a JSON object with the fields of a failure, got {values!r:.50}")
    read: dict[str, Any] = {name: _CHECKS[name](value) for name, value in values.items()}
    return Failure(**read)


def _one(kind: type) -> Callable[[object], object]:
    def check(value: object) -> object:
        if type(value) is not kind:
            raise TypeError(f"expected {kind.__name__}, got {value!r:.50}")
        return value

    return check


def _maybe(value: object) -> object:
    return None if value is None else _one(bool)(value)


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r:.50}")
    return value


def _all(kind: type, value: object) -> list[Any]:
    return [_one(kind)(one) for one in _list(value)]


_CHECKS: dict[str, Callable[[Any], object]] = {
    **{one.name: _one(type(one.default)) for one in fields(Failure)},
    "attempt": _one(int),
    "culprit_ranks": lambda value: tuple(_all(int, value)),
    "idle_ranks": lambda value: tuple(_all(int, value)),
    "nodes": lambda value: tuple(_all(str, value)),
    "hosts": lambda value: tuple(_all(str, value)),
    "owns_memory": _maybe,
}
