"""Jobs of two containers of one host that meet at the same address, each on its own loopback."""

from __future__ import annotations

import os
import subprocess
import uuid

import pytest

from echelon.host.identity import network_of
from echelon.launcher.attach.ranks import find_ranks
from tests.containers.box import needs_containers
from tests.recorder.conftest import wait_until

pytestmark = [pytest.mark.netns, needs_containers]


@pytest.mark.parametrize(
    ("address", "num_jobs"), [("127.0.0.1", 2), ("localhost", 2), ("10.0.0.1", 1)]
)
def test_equal_loopback_endpoints_of_two_containers_are_two_jobs(address, num_jobs):
    environ = {
        "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
    }  # fmt: skip
    started = [
        subprocess.Popen(
            ["unshare", "--net", "sleep", "600"], env={**os.environ, **environ, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    try:
        own = network_of(os.getpid())
        for one in started:
            wait_until(lambda one=one: network_of(one.pid) not in (0, own), "its namespace")
        pids = [one.pid for one in started]
        wait_until(lambda: len(find_ranks(pids).ranks) == 2, "the environment of both")
        jobs = find_ranks(pids).jobs()
        assert len(jobs) == num_jobs, jobs
    finally:
        for one in started:
            one.kill()
            one.wait()
