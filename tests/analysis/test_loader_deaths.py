"""A data loader's worker that died is a dead child of its rank, not an exception to fix."""

from __future__ import annotations

import pytest

from tests.analysis.imagined_job import Job


def job(message: str) -> Job:
    made = Job(2).train(3)
    made[0].all_reduce(inside=True)
    made[1].raised("builtins.RuntimeError", message, site="train.py:31 <module>")
    return made


@pytest.mark.parametrize(
    ("said", "how", "look"),
    [
        ("is killed by signal: Killed. ", "was killed by SIGKILL", "memory"),
        ("is killed by signal: Bus error. It is possible", "was killed by SIGBUS", "/dev/shm"),
        ("is killed by signal: Segmentation fault. ", "was killed by SIGSEGV", "dmesg"),
    ],
)
def test_a_killed_worker_is_named_with_its_pid_and_signal(said, how, look):
    verdict = job(f"DataLoader worker (pid 4712) {said}").report("failure").verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("dead_process", (1,))
    assert verdict.summary.startswith(f"rank 1 lost its data-loader worker (pid 4712), which {how}")
    assert look in verdict.next_action
    assert "Fix the exception" not in verdict.next_action
    assert any("RuntimeError" in line and "train.py:31" in line for line in verdict.evidence)


def test_a_worker_that_exited_is_named_too():
    said = "DataLoader worker (pid(s) 4712, 4713) exited unexpectedly"
    verdict = job(said).report("failure").verdict
    assert (verdict.cause, verdict.culprit_ranks) == ("dead_process", (1,))
    assert "data-loader worker (pid 4712), which exited unexpectedly" in verdict.summary


def test_an_exception_that_only_mentions_a_loader_is_one():
    verdict = job("DataLoader is not iterable").report("failure").verdict
    assert verdict.cause == "exception"
