"""The cores that a process may use: its affinity, and its control groups' quotas."""

from __future__ import annotations

import os

import pytest

from echelon.host.cgroup import usable_cores


@pytest.mark.parametrize(
    ("own", "quotas", "expected"),
    [
        ("0::/\n", {"": "200000 100000"}, 2),  # in a container's own name space
        ("0::/a/b\n", {"a": "100000 100000", "a/b": "max 100000"}, 1),  # a limit further up counts
        ("0::/a\n", {"a": "50000 100000"}, 1),
        ("0::/a\n", {"a": "250000 100000"}, 2),
        ("0::/a\n", {"a": "max 100000"}, 8),
        ("0::/a\n", {"a": "nonsense"}, 8),
        ("4:cpu:/a\n", {}, 8),  # version 1, without a limit
        ("4:cpu,cpuacct:/a\n3:memory:/b\n", {"cpu/a": "300000 100000"}, 3),
        ("4:cpu:/a\n", {"cpu/a": "-1 100000", "cpu": "200000 100000"}, 2),
        (None, {}, 8),
    ],
)
def test_quotas_count_where_they_are_less_than_the_affinity(
    tmp_path, monkeypatch, own, quotas, expected
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu.max").write_text("100000 100000")  # above the mount: not ours
    root = tmp_path / "cgroup"
    root.mkdir()
    for path, text in quotas.items():
        (root / path).mkdir(parents=True, exist_ok=True)
        if path.startswith("cpu"):
            quota, period = text.split()
            (root / path / "cpu.cfs_quota_us").write_text(quota)
            (root / path / "cpu.cfs_period_us").write_text(period)
        else:
            (root / path / "cpu.max").write_text(text)
    file = tmp_path / "own"
    if own is not None:
        file.write_text(own)
    assert usable_cores(root, file) == expected
