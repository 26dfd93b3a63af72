"""What a call on a device is told of the meeting on the hosts that comes before it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from echelon.dist.backends.interface import EndedElsewhere, Members
from echelon.dist.backends.router import Router
from echelon.dist.errors import build
from echelon.dist.operation.operation import Operation
from echelon.errors import CollectiveTimeoutError

MEMBERS = Members(name="world", rank=0, ranks=range(2))


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_meeting_that_fails_speaks_of_what_the_user_called(is_elsewhere):
    def execute(meeting, watch):
        error = build.timed_out(MEMBERS, meeting, [1])
        raise EndedElsewhere(error) if is_elsewhere else error

    router = Router(MEMBERS, None, SimpleNamespace(execute=execute, name="shm", device="cpu"))
    with pytest.raises((CollectiveTimeoutError, EndedElsewhere)) as caught:
        router._compare(Operation("all_reduce", 7, device="cuda"), None)
    error = caught.value.error if is_elsewhere else caught.value
    assert error.operation == "all_reduce"
    assert str(error).startswith("all_reduce #7 in group 'world' (2 ranks) timed out")
