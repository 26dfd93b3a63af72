"""How much memory a cgroup leaves: what it caches of files can be had."""

from __future__ import annotations

import pytest

from echelon.host import cgroup
from echelon.host.cgroup import Limits
from echelon.launcher.doctor.probes import memory


@pytest.mark.parametrize(
    ("reclaimable", "is_broken"), [(0, True), (8 << 30, False)], ids=["all needed", "half cached"]
)
def test_cached_files_count_as_available(monkeypatch, reclaimable, is_broken):
    full = Limits(memory_bytes=16 << 30, memory_limit_bytes=16 << 30, reclaimable_bytes=reclaimable)
    monkeypatch.setattr(memory, "limits", lambda _pid, _denied: full)
    assert memory.probe_memory().is_broken is is_broken


@pytest.mark.parametrize("version", [1, 2])
def test_they_are_read_from_the_group_that_limits(tmp_path, monkeypatch, version):
    prefix = "total_" if version == 1 else ""
    used, limit = {
        1: ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        2: ("memory.current", "memory.max"),
    }[version]
    (tmp_path / used).write_text("1000\n")
    (tmp_path / limit).write_text("1200\n")
    stat = f"anon 200\n{prefix}inactive_file 300\n{prefix}active_file 400\nshmem 5\n"
    (tmp_path / "memory.stat").write_text(stat)
    monkeypatch.setattr(cgroup, "_folders", lambda _pid, _denied: [(version, str(tmp_path))])
    found = cgroup.limits(1, [])
    assert (found.memory_bytes, found.memory_limit_bytes) == (1000, 1200)
    assert found.reclaimable_bytes == 700
