"""The policy's memory reaches the node that takes over. Pure."""

from __future__ import annotations

import json

import pytest

from echelon.launcher.coordinator.policy.failure import Failure
from echelon.launcher.coordinator.policy.memory import MOST_KEPT, Memory, pack, unpack

_FAILURE = Failure(
    attempt=3, cause="exception", is_likely=True, is_certain=True, said="rank 1 raised ValueError",
    site="ValueError at train.py:88 in step", culprit_ranks=(1, 2), nodes=("b-1",), hosts=("b",),
    last_step=57, is_outside=True, owns_memory=None,
)  # fmt: skip
_DECISION = {"attempt": 3, "action": "restart", "cause": "exception", "last_step": 57}


def test_a_memory_is_read_as_it_was_written():
    memory = Memory(
        failures=(_FAILURE,), avoided=("b-1",), decisions=(_DECISION,), over=3, suspected=_FAILURE
    )
    assert unpack(pack(memory)) == memory
    assert unpack("") == Memory()


def test_the_latest_failures_and_decisions_are_kept():
    failures = tuple(Failure(attempt=number) for number in range(1000))
    decisions = tuple({"attempt": number} for number in range(1000))
    kept = unpack(pack(Memory(failures=failures, decisions=decisions)))
    assert [one.attempt for one in kept.failures] == [*range(1000 - MOST_KEPT, 1000)]
    assert [one["attempt"] for one in kept.decisions] == [*range(1000 - MOST_KEPT, 1000)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("failures",), {}),
        (("avoided",), "b"),
        (("decisions",), [3]),
        (("failures", 0, "attempt"), "3"),
        (("failures", 0, "attempt"), True),
        (("failures", 0, "cause"), None),
        (("failures", 0, "is_killed"), 1),
        (("failures", 0, "owns_memory"), "yes"),
        (("failures", 0, "nodes"), [3]),
        (("failures", 0, "culprit_ranks"), ["1"]),
        (("failures", 0, "unknown_field"), 1),
        (("avoided", 0), 3),
        (("over",), "3"),
        (("suspected",), "b"),
        (("suspected",), {"attempt": "3"}),
    ],
)
def test_a_malformed_memory_is_an_error(path, value):
    top = json.loads(pack(Memory(failures=(_FAILURE,), avoided=("b",), decisions=(_DECISION,))))
    place = top
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(ValueError, match="malformed"):
        unpack(json.dumps(top))


@pytest.mark.parametrize("text", ["[", "[]", "3", '{"failures": []}', "[" * 5000])
def test_what_is_not_a_memory_is_an_error(text):
    with pytest.raises(ValueError, match="malformed"):
        unpack(text)
