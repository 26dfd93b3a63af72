"""Where a ring lies: on the node, and in the rank's folder once its process has ended."""

from __future__ import annotations

import stat

import pytest

from echelon.recorder.format.schema import Live
from echelon.recorder.read import LiveRing, read_ring
from echelon.recorder.write.setup import place
from echelon.recorder.write.setup.place import (
    Place,
    bring_home,
    choose_place,
    claim_attempt,
    file_system,
)

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /home rw,relatime shared:1 - nfs4 server:/home rw,vers=4.2
31 30 0:26 / /home/scratch rw - tmpfs tmpfs rw
32 22 0:27 / /mnt/my\\040disk rw - fuse.sshfs me@there rw
33 22 0:28 / /data rw - ext4 /dev/vdb rw
34 22 0:29 / /data rw - lustre 10.0.0.1@tcp:/fs rw
nonsense
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/run/job", "ext4"),
        ("/home", "nfs4"),
        ("/home/me/runs", "nfs4"),
        ("/home/scratch/runs", "tmpfs"),
        ("/homestead/runs", "ext4"),
        ("/mnt/my disk/runs", "fuse.sshfs"),
        ("/data/runs", "lustre"),
    ],
)
def test_the_file_system_of_a_path(path, kind, tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_system(path, mounts) == kind


def test_without_a_mount_table_nothing_is_known(tmp_path):
    assert file_system(tmp_path, tmp_path / "missing") == ""


@pytest.mark.parametrize(
    ("kind", "remote"),
    [
        ("nfs4", True), ("lustre", True), ("fuse.sshfs", True), ("fuse", True), ("9p", True),
        ("ext4", False), ("tmpfs", False), ("overlay", False), ("fuseblk", False), ("", False),
        ("fuse.fuse-overlayfs", False),
    ],
)  # fmt: skip
def test_what_is_reached_through_a_network(kind, remote):
    assert place.is_remote(kind) is remote


def test_a_local_folder_holds_the_ring_itself(tmp_path):
    assert choose_place(tmp_path) == Place(tmp_path / "ring", tmp_path)


@pytest.mark.parametrize("kind", ["nfs4", "btrfs", "zfs", "bcachefs"])
def test_a_folder_that_cannot_hold_a_ring_gets_a_link_to_the_nodes_own(tmp_path, monkeypatch, kind):
    """It is remote, or an overwrite may need a new block there although the first was reserved."""
    monkeypatch.setattr(place, "file_system", lambda _: kind)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    rank_dir = tmp_path / "rank_3" / "attempt_0"
    rank_dir.mkdir(parents=True)
    chosen = choose_place(rank_dir)
    assert chosen.is_elsewhere
    assert kind in chosen.reason
    assert chosen.make().is_relative_to(tmp_path / "tmp")
    assert (rank_dir / "ring").readlink() == chosen.ring
    assert stat.S_IMODE(chosen.ring.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(chosen.ring.parent.parent.stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        choose_place(rank_dir).make()
    chosen.give_up()
    assert not (rank_dir / "ring").is_symlink()
    assert not chosen.ring.parent.exists()


def test_a_folder_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "file_system", lambda _: "nfs4")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    import os

    (tmp_path / f"echelon-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    rank_dir = tmp_path / "rank"
    rank_dir.mkdir()
    choose_place(rank_dir).make()
    assert list((tmp_path / "elsewhere").iterdir()) == []


RECORDS = """
from echelon.recorder import step
step(5)
print("ready", flush=True)
input()
"""


def test_a_ring_elsewhere_is_read_through_its_link_and_brought_home(program, tmp_path):
    one = program(RECORDS, ECHELON_RING_DIR=str(tmp_path / "local"))
    one.wait_for("ready")
    assert one.ring.is_symlink()
    assert one.ring.readlink().is_relative_to(tmp_path / "local")
    live = LiveRing(one.ring)
    record = read_ring(one.ring)
    assert record.live[Live.STEP] == 6
    assert record.identity.settings["ring"] == str(one.ring.readlink())
    one.process.kill()
    _, _, err = one.end()
    assert "rings are in" not in err  # whoever set ECHELON_RING_DIR knows
    assert bring_home(one.rank_dir)
    assert not one.ring.is_symlink()
    assert stat.S_IMODE(one.ring.stat().st_mode) == 0o600
    assert read_ring(one.ring).live[Live.STEP] == 6
    assert live.words()[Live.STEP] == 6  # an attached reader goes on
    live.close()
    assert list((tmp_path / "local").iterdir()) == []
    assert not bring_home(one.rank_dir)


def test_a_lost_local_ring_leaves_the_link_alone(tmp_path):
    (tmp_path / "ring").symlink_to(tmp_path / "gone" / "ring")
    assert not bring_home(tmp_path)
    assert (tmp_path / "ring").is_symlink()


def test_attempts_are_counted_per_rank_and_never_taken_twice(tmp_path):
    taken = [claim_attempt(tmp_path, rank) for rank in (0, 0, 1, 0)]
    assert taken == [
        (tmp_path / "rank_0" / "attempt_0", 0),
        (tmp_path / "rank_0" / "attempt_1", 1),
        (tmp_path / "rank_1" / "attempt_0", 0),
        (tmp_path / "rank_0" / "attempt_2", 2),
    ]


def test_the_zeros_of_a_ring_take_no_room_at_home(tmp_path):
    data = b"head" + bytes(3 << 20) + b"middle" + bytes(2 << 20) + b"x" + bytes(300_001)
    one = Place(tmp_path / "away" / "ring", tmp_path / "home")
    one.rank_dir.mkdir()
    one.make().write_bytes(data)
    assert bring_home(one.rank_dir)
    home = one.rank_dir / "ring"
    assert home.read_bytes() == data
    assert home.stat().st_blocks * 512 < 1 << 20


def test_a_ring_of_zeros_alone_keeps_its_length(tmp_path):
    one = Place(tmp_path / "away" / "ring", tmp_path / "home")
    one.rank_dir.mkdir()
    one.make().write_bytes(bytes(200_000))
    assert bring_home(one.rank_dir)
    assert (one.rank_dir / "ring").read_bytes() == bytes(200_000)
