"""Worlds of many ranks on one host: more than a machine word of them, and more than the C core's.

One program forks all ranks: they share its modules, so that each costs a few MiB.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from echelon.dist.backends.shm import native
from echelon.store import StoreServer

_PROGRAM = """
import ctypes, os, signal, sys, traceback
import numpy as np
import echelon.dist as dist
import echelon.dist.backends.shm.backend

size = int(sys.argv[1])

def be_a_rank(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    world = dist.init("shm", timeout_s=400)
    for _ in range(3):
        world.barrier()
    x = np.array([rank + 1.0])
    world.all_reduce(x)
    assert x[0] == size * (size + 1) / 2, x
    world.barrier()
    dist.shutdown()

pids = []
for rank in range(size):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # end with the program
            be_a_rank(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    pids.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print("failed", [rank for rank, code in enumerate(codes) if code])
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("size", "is_native"),
    [
        (65, True),
        # 257 processes on two cores: ten seconds, and far more on a busy machine
        pytest.param(257, False, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_pass_the_barrier(size, is_native):
    assert not native.available() or (size <= native.max_ranks()) == is_native
    with StoreServer("127.0.0.1", 0) as server:
        environ = {
            **os.environ,
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(size)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout == "failed []\n", done.stderr[:4000]
