"""The file store: several writers, writers that die, files that are something else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from echelon.errors import StoreError, StoreTimeoutError
from echelon.store import FileStore
from echelon.store.deadline import Deadline
from echelon.store.wire import protocol as p

WRITER = """
import sys
from echelon.store import FileStore
from echelon.store.wire import protocol as p
from echelon.store.deadline import Deadline
path, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
with FileStore(path, timeout=60.0) as store:
    for number in range(rounds):
        store.add("count", 1)
        store.append("log", name)
        store.queue_push("queue", f"{name}{number}")
        while True:
            held = store.get("swaps").decode()
            mine = f"{int(held.split()[0]) + 1} by {name}"  # what nobody else would swap in
            if store.compare_set("swaps", held, mine) == mine.encode():
                break
"""


def test_no_change_is_lost_among_concurrent_writers(tmp_path):
    path, rounds, names = tmp_path / "store", 20, "abcd"
    with FileStore(path, timeout=20.0) as store:
        store.set("swaps", "0")
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(path), name, str(rounds)])
            for name in names
        ]
        assert [writer.wait(60) for writer in writers] == [0] * len(names)
        total = rounds * len(names)
        assert store.add("count", 0) == total
        assert sorted(store.get("log").decode()) == sorted(names * rounds)
        popped = [store.queue_pop("queue").decode() for _ in range(total)]
        for name in names:
            mine = [item for item in popped if item[0] == name]
            assert mine == [f"{name}{number}" for number in range(rounds)]
        assert int(store.get("swaps").split()[0]) == total


def test_a_half_written_record_is_cut_off(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", b"v")
        whole = path.read_bytes()
        store.set("k", b"lost")
    for size in range(len(whole), path.stat().st_size):
        torn = tmp_path / "torn"
        torn.write_bytes(path.read_bytes()[:size])
        with FileStore(torn) as store:
            assert store.get("k") == b"v"
            store.set("l", b"w")
        with FileStore(torn) as store:
            assert store.multi_get(["k", "l"]) == [b"v", b"w"]


def test_damage_is_an_error_that_says_where(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", b"value")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with FileStore(path) as store, pytest.raises(StoreError, match="damaged at byte 21"):
        store.get("k")


def test_no_damaged_byte_loses_a_key(tmp_path):
    """Wherever a byte is wrong, the file is left as it is and the error names a place."""
    path = tmp_path / "store"
    with FileStore(path) as store:
        for number in range(3):
            store.set(f"k{number}", b"value")
    whole = path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x40
        path.write_bytes(data)
        with FileStore(path) as store, pytest.raises(StoreError, match=r"damaged at|not a store"):
            store.list_keys()
        assert path.read_bytes() == bytes(data), at


def test_a_read_that_is_cut_short_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.multi_set(["a", "b"], [b"1", b"2"])
        store.set("c", b"3")
    whole = path.read_bytes()
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: real(fd, min(size, 25), at))
    with FileStore(path) as store:
        assert sorted(store.list_keys()) == ["a", "b", "c"]
    assert path.read_bytes() == whole


def test_a_command_that_changes_nothing_is_damage(tmp_path):
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("k", b"v")
        with store._locked(Deadline(5.0)):
            store._append_record(p.encode(p.GET, b"k"))
    with FileStore(path) as store, pytest.raises(StoreError, match="damaged at"):
        store.list_keys()


def test_no_link_and_no_file_of_another_user_is_taken(tmp_path):
    path = tmp_path / "store"
    FileStore(path).close()
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(StoreError, match="cannot open the file"):
        FileStore(link)
    path.chmod(0o622)
    with pytest.raises(StoreError, match="other users can write to the file"):
        FileStore(path)
    if os.geteuid() == 0:
        path.chmod(0o600)
        os.chown(path, 65534, -1)
        with pytest.raises(StoreError, match=r"belongs to another user \(UID 65534\)"):
            FileStore(path)
    with pytest.raises(StoreError, match="not a regular file"):
        FileStore("/dev/null")


def test_a_foreign_file_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("important")
    with FileStore(path) as store, pytest.raises(StoreError, match="the file is not a store"):
        store.set("k", b"v")
    assert path.read_text() == "important"


def test_a_file_that_cannot_be_opened_is_one_line(tmp_path):
    with pytest.raises(StoreError, match="cannot open the file: No such file"):
        FileStore(tmp_path / "missing" / "store")


def test_the_file_is_its_owners_alone(tmp_path):
    path = tmp_path / "store"
    FileStore(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_held_by_a_stopped_process_is_a_timeout(tmp_path):
    import fcntl

    path = tmp_path / "store"
    with FileStore(path, timeout=0.1) as store:
        store.set("k", b"v")
        other = os.open(path, os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreTimeoutError, match="locked by another process"):
            store.set("k", b"w")
        os.close(other)
        assert store.get("k") == b"v"


def test_a_forked_child_has_a_lock_of_its_own(tmp_path):
    with FileStore(tmp_path / "store", timeout=20.0) as store:
        store.set("n", "0")
        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    for _ in range(20):
                        store.add("n", 1)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        assert store.add("n", 0) == 60
