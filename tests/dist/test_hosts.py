"""Two hosts of two ranks each, as network namespaces: the default backend keeps the contract."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from echelon.store import StoreServer

_ROOT = Path(__file__).parents[2]
_RANK = """
import os
import echelon.dist as dist
from tests.dist import contract
world = dist.init(timeout_s=60)
assert world.backend == "shm+gloo", world.backend
checks = contract.CHECKS
if os.environ["CHECKS"] == "few":  # those that move much, or rely on the way between hosts
    checks = [contract.check_large, contract.check_movement, contract.check_async,
              contract.check_messages, contract.check_message_order, contract.check_objects,
              contract.check_split, contract.check_barrier]
for check in checks:
    check(world, contract.Traits(ordered=False, is_slow=True))
dist.shutdown()
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


def _may_make_namespaces() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    name = f"p{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode == 0:
        _ip("netns", "del", name)
    return made.returncode == 0


@pytest.fixture
def hosts():
    """Yield (address of a bridge, names of two namespaces on it)."""
    tag = uuid.uuid4().hex[:6]
    octet = int(tag[:2], 16)
    names = [f"{tag}n{host}" for host in range(2)]
    made: list[tuple[str, ...]] = []
    try:
        _ip("link", "add", f"{tag}br", "type", "bridge")
        made.append(("link", "del", f"{tag}br"))
        _ip("addr", "add", f"10.91.{octet}.1/24", "dev", f"{tag}br")
        _ip("link", "set", f"{tag}br", "up")
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            made.append(("netns", "del", name))
            _ip("link", "add", f"{tag}v{host}", "type", "veth", "peer", "name", f"{tag}e{host}")
            _ip("link", "set", f"{tag}e{host}", "netns", name)
            _ip("link", "set", f"{tag}v{host}", "master", f"{tag}br", "up")
            inside = ("netns", "exec", name, "ip")
            _ip(*inside, "addr", "add", f"10.91.{octet}.{10 + host}/24", "dev", f"{tag}e{host}")
            _ip(*inside, "link", "set", f"{tag}e{host}", "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield f"10.91.{octet}.1", names
    finally:
        for undo in reversed(made):
            subprocess.run(["ip", *undo], check=False, capture_output=True, timeout=20)


@pytest.mark.netns
@pytest.mark.skipif(not _may_make_namespaces(), reason="needs root and ip, to make namespaces")
@pytest.mark.parametrize("checks", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_two_hosts_of_two_ranks_keep_the_contract(hosts, checks):
    pytest.importorskip("torch")
    address, names = hosts
    with StoreServer(address, 0) as server:
        env = {
            **os.environ, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": address,
            "MASTER_PORT": str(server.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), "CHECKS": checks,
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", names[rank // 2], sys.executable, "-c", _RANK],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]
        try:
            ends = [(rank.communicate(timeout=400)[1], rank.returncode) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    assert [code for _, code in ends] == [0] * 4, "\n".join(text for text, _ in ends)
