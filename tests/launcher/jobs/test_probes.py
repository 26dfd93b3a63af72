"""Launched jobs whose nodes are checked before they are used again."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from tests.launcher.background import Node
from tests.support.hosts import hosts, needs_hosts
from tests.support.ranks import read_json

pytestmark = [pytest.mark.netns, needs_hosts]

_DISK = """
import os, sys
from pathlib import Path
from echelon import recorder

recorder.step(1)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0:
    Path(sys.argv[1], "data").write_bytes(bytes(8 << 20))  # raises: there is no space for it
raise ValueError("a fault of the second attempt")
"""


def test_a_full_disk_is_waited_for_and_is_evidence_of_the_next_verdict(tmp_path):
    script, disk = tmp_path / "train.py", tmp_path / "disk"
    script.write_text(textwrap.dedent(_DISK))
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], check=True)
    try:
        node = Node(tmp_path / "run", ["--max-restarts", "1", "--checkpoint-dir", str(disk),
                                       str(script), str(disk)])  # fmt: skip
        try:
            node.wait_for("failed: storage: cannot write in")
            (disk / "data").unlink()
            assert node.end() == 1, node.lines
        finally:
            node.close()
    finally:
        subprocess.run(["umount", disk], check=True)
    report = read_json(tmp_path / "run" / "report.json")
    probes = report["decisions"][0]["probes"]
    states = [one["state"] for one in probes if str(disk) in one["text"]]
    assert states[0] == "broken", probes
    assert states[-1] == "whole", probes
    verdict = report["incidents"][-1]["verdict"]
    told = [line for line in verdict["evidence"] if line.startswith("the probe before attempt 1")]
    assert any("failed" in line and "No space left on device" in line for line in told), verdict
    assert any("measured" in line and str(disk) in line for line in told), verdict


_LINK = """
import os, sys, time
from pathlib import Path
import echelon.dist as dist
from echelon import recorder

world = dist.init(timeout_s=60)
recorder.step(1)
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
    print("ready", flush=True)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    if world.rank == 1:
        raise ConnectionError("Network is unreachable")
    time.sleep(600)
world.barrier()
print("met again", flush=True)
dist.shutdown()
"""


@pytest.mark.slow
def test_a_blocked_link_is_waited_for(tmp_path):
    """The second host reaches the first one's launcher, and nothing else of it, until it heals."""
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(textwrap.dedent(_LINK))
    with hosts(2) as made:
        nodes = [
            Node(
                tmp_path / f"node_{rank}",
                ["--nnodes", "2", "--rdzv-endpoint", f"{made[0].address}:29400", "--max-restarts",
                 "1", "--node-rank", str(rank), str(script), str(go)],
                before=host.command(), environ={"ECHELON_SECRET": "a-secret-of-the-tests"},
            )
            for rank, host in enumerate(made)
        ]  # fmt: skip
        try:
            for node in nodes:
                node.wait_for("ready")
            made[1].swallow(but_port=29400)
            go.touch()
            nodes[0].wait_for("failed: network: no way to")
            heal = made[1].command("ip", "rule", "delete", "priority", "20")
            subprocess.run(heal, check=True)
            ends = [node.end() for node in nodes]
            assert ends == [0, 0], [node.lines for node in nodes]
        finally:
            for node in nodes:
                node.close()
    assert sum("met again" in line for node in nodes for line in node.lines) == 2
    report = read_json(tmp_path / "node_0" / "report.json")
    (decision,) = report["decisions"]
    states = [one["state"] for one in decision["probes"] if one["probe"] == "network"]
    assert states[0] == "broken", decision
    assert states[-1] == "whole", decision
