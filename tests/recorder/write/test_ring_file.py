"""The file under a ring: made once, whole or not at all, and read while it is written."""

from __future__ import annotations

import os
import subprocess

import pytest

from echelon.recorder.format.layout import Layout
from echelon.recorder.format.schema import Identity, Live
from echelon.recorder.read import LiveRing
from echelon.recorder.write.ring.ring import Ring
from tests.recorder.conftest import NUM_OPERATIONS, NUM_SPANS, wait_until


def test_the_whole_file_is_reserved_at_the_start(ring):
    status = ring.path.stat()
    assert status.st_size == Layout(NUM_OPERATIONS, NUM_SPANS).file_bytes
    assert status.st_blocks * 512 >= status.st_size


def test_a_ring_that_is_there_is_never_overwritten(ring):
    before = ring.path.read_bytes()
    with pytest.raises(FileExistsError):
        Ring(ring.path, Identity(rank=4), num_operations=1, num_spans=1)
    assert ring.path.read_bytes() == before


def test_a_link_is_never_followed(tmp_path):
    (tmp_path / "ring").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="ring"):
        Ring(tmp_path / "ring", Identity(rank=0), num_operations=1, num_spans=1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Ring(tmp_path / "ring", Identity(rank=0), num_operations=1, num_spans=1)
    assert list(tmp_path.iterdir()) == []


def _mounted(folder) -> bool:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    try:
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_full_disk_is_one_warning_and_no_recording(program, tmp_path):
    disk = tmp_path / "disk"
    if not _mounted(disk):
        pytest.skip("needs root to mount a small tmpfs")
    try:
        one = program(
            """
from echelon.recorder import span, step
from echelon.recorder.current import current
for _ in range(3):
    step()
    with span("compute"):
        print(current())
""",
            ECHELON_RANK_DIR=str(disk / "rank"),
        )
        code, out, err = one.end()
        assert (code, out.split()) == (0, ["None"] * 3)
        assert err.count("not recording") == 1
        assert "No space left on device" in err
        assert list((disk / "rank").iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_made_is_one_warning(program, tmp_path):
    (tmp_path / "file").touch()
    one = program(
        "from echelon.recorder import step\nstep()\nstep()",
        ECHELON_RANK_DIR=str(tmp_path / "file" / "rank"),
    )
    code, _, err = one.end()
    assert code == 0
    assert err.count("not recording") == 1


def test_the_heartbeat_goes_on_by_itself(program):
    one = program(
        """
import time
from echelon.recorder import step
step()
print("ready", flush=True)
input()
"""
    )
    one.wait_for("ready")
    live = LiveRing(one.ring)
    try:
        first = live.words()
        beat = wait_until(
            lambda: (
                now
                if (now := live.words()[Live.HEARTBEAT_MONO_NS]) != first[Live.HEARTBEAT_MONO_NS]
                else 0
            ),
            "a second heartbeat",
        )
        assert beat > first[Live.HEARTBEAT_MONO_NS]
        assert live.words()[Live.PROGRESS_MONO_NS] == first[Live.PROGRESS_MONO_NS]
    finally:
        live.close()
