"""Ranks of one host in PID namespaces of their own, as containers of one pod are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from echelon.store import StoreServer

_ROOT = Path(__file__).parents[2]
_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _may_unshare() -> bool:
    if not shutil.which("unshare"):
        return False
    return not subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode


pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not _may_unshare(), reason="needs root and unshare, for PID namespaces"),
]


def _run(body: str, engine: str) -> list[subprocess.CompletedProcess[str]]:
    program = "import os, time\nimport numpy as np\nimport echelon.dist as dist\n"
    program += "from echelon.errors import PeerLostError\n" + textwrap.dedent(body)
    with StoreServer("127.0.0.1", 0) as server:
        env = {
            **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "ECHELON_SHM": engine,
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                [*(_UNSHARE if rank else []), sys.executable, "-c", program],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            texts = [rank.communicate(timeout=300)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [
        subprocess.CompletedProcess([], rank.returncode, "", text)
        for rank, text in zip(ranks, texts, strict=True)
    ]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_late_rank_of_another_pid_namespace_is_not_dead(engine):
    ends = _run(
        """
        world = dist.init(timeout_s=30)
        if world.rank == 1:
            time.sleep(1.0)  # ten times what a wait sleeps before it looks at its peers
        x = np.ones(3)
        world.all_reduce(x)
        assert x[0] == 2
        dist.shutdown()
        """,
        engine,
    )
    assert [end.returncode for end in ends] == [0, 0], [end.stderr for end in ends]


@pytest.mark.parametrize("engine", ["native", "python"])
def test_a_killed_rank_of_another_pid_namespace_is_named_at_once(engine):
    ends = _run(
        """
        world = dist.init(timeout_s=600)
        x = np.ones(3)
        world.all_reduce(x)
        if world.rank == 1:
            os._exit(9)  # a namespace's first process is not killed by a signal of its own
        try:
            world.all_reduce(x)
        except PeerLostError as err:
            assert err.ranks == (1,), err
        else:
            raise AssertionError("no error")
        dist.shutdown()
        """,
        engine,
    )
    assert [end.returncode for end in ends] == [0, 9], [end.stderr for end in ends]
