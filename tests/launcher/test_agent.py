"""The agent without a job."""

from __future__ import annotations

import os
import signal

from echelon.launcher.agent import _caught_signals


def test_a_signal_that_is_repeated_while_the_launcher_ends_does_not_change_its_exit_code():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with _caught_signals({signal.SIGUSR1}) as caught:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(caught, 8) == bytes([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)  # its default would end this process
    finally:
        signal.signal(signal.SIGUSR1, before)
