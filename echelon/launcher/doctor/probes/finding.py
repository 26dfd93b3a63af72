"""Define the task and the result of a probe, both of which are sent as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

STORAGE, MEMORY, DEVICE, NETWORK, LISTEN = "storage", "memory", "device", "network", "listen"
DEADLINE_S = 15.0  # a disk that needs longer for 1 MiB is also useless for a job


class State(str, Enum):
    """The state of a probed resource: healthy, broken, or not checked."""

    WHOLE = "whole"
    BROKEN = "broken"
    SKIPPED = "not checked"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A probe to run.

    Attributes:
        folder: the folder to test (for `storage`).
        address, port: where the listener can be reached (for `network`).
        peer: the listener's host name (for `network`).
        token: a secret that proves that a client belongs to the job (for `network` and `listen`).
    """

    probe: str
    deadline_s: float = DEADLINE_S
    folder: str = ""
    address: str = ""
    port: int = 0
    peer: str = ""
    token: str = ""

    def pack(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Task:
        """Return the task that was encoded by `pack`.

        Raises:
            ValueError: the text is malformed.
        """
        return cls(**_checked(cls, text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result of a probe.

    Attributes:
        text: what was measured, what is wrong, or why nothing was checked.
        figures: the measurements by name. The suffix `_s` means seconds, and `_bytes` means bytes.
    """

    probe: str
    state: State
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_broken(self) -> bool:
        """True if the probe found that the tested resource is unfit for use."""
        return self.state is State.BROKEN

    def to_json(self) -> dict[str, Any]:
        """Return the JSON representation used in reports."""
        return {
            "probe": self.probe,
            "state": self.state.value,
            "text": self.text,
            "figures": dict(self.figures),
        }

    def pack(self) -> str:
        """Return the finding as one line of JSON."""
        return json.dumps(self.to_json())

    @classmethod
    def unpack(cls, text: str) -> Finding:
        """Return the finding that was encoded by `pack`.

        Raises:
            ValueError: the text is malformed.
        """
        values = _checked(cls, text)
        values["state"] = State(values.get("state"))
        figures = values.get("figures", {})
        if not all(type(one) in (int, float) for one in figures.values()):
            raise ValueError(f"a probe's figures must be numbers: {figures!r:.100}")
        return cls(**values)


_KINDS = {"str": str, "int": int, "float": (int, float), "State": str}


def _checked(kind: type[Task | Finding], text: str) -> dict[str, Any]:
    """Parse the JSON of a task or finding; return its values after checking their types.

    Raises:
        ValueError: the text is malformed.
    """
    values = json.loads(text)
    types = {one.name: str(one.type) for one in fields(kind)}
    if not isinstance(values, dict) or not values.keys() <= types.keys():
        raise ValueError(f"the message is not from a probe: {text:.100}")
    for name, value in values.items():
        wanted = _KINDS.get(types[name], dict)
        if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ValueError(f"field {name!r} of a probe's message is invalid: {value!r:.50}")
    if not {"probe", *(("state", "text") if kind is Finding else ())} <= values.keys():
        raise ValueError(f"the message is not from a probe: {text:.100}")
    return values
