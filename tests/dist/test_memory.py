"""The memory that ranks share where memfd is denied."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from echelon.dist.backends.shm import memory
from echelon.errors import CollectiveError

_SCRIPT = """
import os
from echelon.dist.backends.shm import memory
from echelon.errors import CollectiveError

def denied(*_):
    raise PermissionError

os.memfd_create = denied
os.close(memory.anonymous_file(1 << 20))
try:
    memory.anonymous_file(64 << 20)
except CollectiveError as err:
    assert "--shm-size" in str(err), err
    raise SystemExit(7)
"""


def test_a_full_dev_shm_is_an_error_and_no_bus_error_later():
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root for a /dev/shm of its own")
    command = 'mount -t tmpfs -o size=4m none /dev/shm && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, sys.executable, _SCRIPT],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr


def test_the_file_has_its_size_and_no_name(monkeypatch):
    def denied(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", denied)
    fd = memory.anonymous_file(100_000)
    try:
        found = os.fstat(fd)
        assert (found.st_size, found.st_nlink) == (100_000, 0)
        assert found.st_blocks * 512 >= 100_000
    finally:
        os.close(fd)


def test_a_full_folder_is_named_where_shm_does_not_exist(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(memory, "_FILES", str(tmp_path / "shm"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "memfd_create", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CollectiveError, match=f"shared memory in {tmp_path} .*free space there"):
        memory.anonymous_file(1 << 20)
