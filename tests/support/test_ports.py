"""Test the reservation of ports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port


def test_the_system_hands_out_none_of_these_ports_and_no_other_process_of_the_tests():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert not any(low <= port <= high for port in ports)
    script = f"from tests.support import ports; print([p for p in {ports} if ports._reserve(p)])"
    root = Path(__file__).parents[2]
    assert subprocess.check_output([sys.executable, "-c", script], cwd=root) == b"[]\n"
