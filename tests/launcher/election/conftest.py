"""Hosts of a job with failover."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.election.failing_over import FailingOver, WitnessProcess
from tests.support.hosts import hosts


@pytest.fixture
def begin(tmp_path) -> Iterator[object]:
    with contextlib.ExitStack() as stack:

        def make(
            count: int, *options: str, folder: Path = tmp_path, has_witness: bool = False
        ) -> FailingOver:
            folder.mkdir(exist_ok=True)
            made = stack.enter_context(hosts(count + has_witness))
            witness = None
            if has_witness:
                witness = stack.enter_context(contextlib.closing(WitnessProcess(made.pop())))
                options = (*options, "--rdzv-witness", witness.endpoint)
            job = FailingOver(folder, made, *options, witness=witness)
            stack.callback(job.cluster.close)
            return job

        yield make
