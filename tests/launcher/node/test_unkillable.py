"""A process that survives SIGKILL is reported with the reason why it is alive."""

from __future__ import annotations

import os

from echelon.host.process import Sample
from echelon.launcher.node import unkillable


def test_a_process_in_uninterruptible_sleep_is_reported_with_its_wait_channel(monkeypatch):
    monkeypatch.setattr(unkillable, "sample", lambda _: Sample(state="D", wait_channel="nvidia_x"))
    assert unkillable.why_it_lives(os.getpid()) == "uninterruptible sleep in nvidia_x"


def test_a_process_of_another_user_is_reported_with_that_user(monkeypatch):
    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    why = unkillable.why_it_lives(os.getpid())
    assert why == f"this launcher may not signal it: it runs as user {os.getuid()}"
