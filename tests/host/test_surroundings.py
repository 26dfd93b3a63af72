"""What limits a process and what its connections carry; and a machine that shows nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from echelon.host import cgroup, process, sockets
from echelon.recorder.format.schema import HostFacts, Identity, Socket
from echelon.recorder.read import read_dump
from echelon.recorder.read.dump import empty_record, write_dump


@pytest.fixture
def pair():
    """Two connected sockets of this process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with here, there:
            yield here, there


def name(one: socket.socket) -> str:
    return "{}:{}".format(*one.getsockname())


def seen(found, one: socket.socket) -> Socket:
    (match,) = [s for s in found if s.local == name(one) and s.state == "ESTABLISHED"]
    return match


def test_unread_bytes_and_what_has_moved_are_seen(pair):
    here, there = pair
    around = process.Surroundings(os.getpid())
    here.sendall(b"x" * 1000)
    facts = around.add_to(HostFacts(not_permitted=("wchan",)))
    mine, theirs = seen(facts.sockets, here), seen(facts.sockets, there)
    assert mine.peer == name(there)
    assert theirs.unread_bytes == 1000
    assert mine.unread_bytes == 0
    assert facts.not_permitted[0] == "wchan"
    if "sock_diag" not in facts.not_permitted:
        assert mine.moved_bytes == theirs.moved_bytes == 1000
        assert mine.retransmits == 0


def test_without_sock_diag_the_queues_are_still_seen(pair, monkeypatch):
    deny_netlink(monkeypatch)
    here, there = pair
    here.sendall(b"x" * 1000)
    denied: list[str] = []
    found = sockets.sockets(os.getpid(), denied)
    assert denied == ["sock_diag"]
    theirs = seen(found, there)
    assert (theirs.peer, theirs.unread_bytes) == (name(here), 1000)
    assert (theirs.sent_bytes, theirs.moved_bytes, theirs.retransmits) == (-1, -1, -1)


def test_ipv6_endpoints_are_spelled_as_people_do(monkeypatch):
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        expected = f"[::1]:{server.getsockname()[1]}"
        assert expected in {one.local for one in sockets.sockets(os.getpid(), [])}
        deny_netlink(monkeypatch)
        assert expected in {one.local for one in sockets.sockets(os.getpid(), [])}


def test_the_cgroup_of_a_process_is_read(tmp_path, monkeypatch):
    group = tmp_path / "job.slice"
    group.mkdir()
    for file, text in {
        "cpu.stat": "usage_usec 5\nnr_throttled 3\nthrottled_usec 2500\n",
        "memory.current": "4096\n",
        "memory.max": "max\n",
        "memory.events": "low 0\noom 2\noom_kill 1\n",
        "cgroup.events": "populated 1\nfrozen 1\n",
    }.items():
        (group / file).write_text(text)
    monkeypatch.setattr(cgroup, "_CGROUPS", str(tmp_path))
    real = cgroup.read_text
    monkeypatch.setattr(
        cgroup,
        "read_text",
        lambda path, *rest: "0::/job.slice\n" if path.endswith("/cgroup") else real(path, *rest),
    )
    found = cgroup.limits(1, [])
    assert found == cgroup.Limits(
        throttled_ns=2_500_000, memory_bytes=4096, oom_kills=1, frozen=True
    )


def test_the_cgroup_of_an_older_kernel_is_read(tmp_path, monkeypatch):
    for file, text in {
        "memory/job/memory.usage_in_bytes": "4096",
        "memory/job/memory.limit_in_bytes": "8192",
        "memory/job/memory.oom_control": "oom_kill_disable 0\noom_kill 2\n",
        "cpu/job/cpu.stat": "nr_throttled 3\nthrottled_time 7\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(cgroup, "_CGROUPS", str(tmp_path))
    real = cgroup.read_text
    table = "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/x\n"
    monkeypatch.setattr(
        cgroup,
        "read_text",
        lambda path, *rest: table if path.endswith("/cgroup") else real(path, *rest),
    )
    found = cgroup.limits(1, [])
    assert (found.throttled_ns, found.memory_bytes, found.memory_limit_bytes) == (7, 4096, 8192)
    assert found.oom_kills == 2


def _groups(tmp_path, monkeypatch, table: str, files: dict[str, str]) -> None:
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    monkeypatch.setattr(cgroup, "_CGROUPS", str(tmp_path))
    real = cgroup.read_text
    monkeypatch.setattr(
        cgroup,
        "read_text",
        lambda path, *rest: table if path.endswith("/cgroup") else real(path, *rest),
    )


def test_the_limit_of_a_group_above_counts_with_the_usage_there(tmp_path, monkeypatch):
    """A pod's or a Slurm job's limit: the rank's own group has none, or a looser one."""
    files = {
        "job/memory.current": "8000\n",
        "job/memory.max": "8192\n",
        "job/cpu.stat": "nr_throttled 3\nthrottled_usec 5\n",
        "job/step/memory.current": "100\n",
        "job/step/memory.max": "4096\n",
        "job/step/cpu.stat": "nr_throttled 0\nthrottled_usec 0\n",
        "job/step/pids.current": "7\n",
        "job/step/pids.max": "max\n",
        "job/step/memory.events": "oom_kill 1\n",
        "job/memory.events": "oom_kill 4\n",
    }
    _groups(tmp_path, monkeypatch, "0::/job/step\n", files)
    assert cgroup.limits(1, []) == cgroup.Limits(
        throttled_ns=5000,
        memory_bytes=8000,
        memory_limit_bytes=8192,
        num_processes=7,
        oom_kills=1,
    )


def test_a_container_of_an_older_kernel_sees_its_own_group_at_the_top(tmp_path, monkeypatch):
    """Docker names the host's path in /proc/PID/cgroup and mounts the group itself."""
    files = {
        "memory/memory.usage_in_bytes": "4096",
        "memory/memory.limit_in_bytes": "8192",
        "memory/memory.oom_control": "oom_kill_disable 0\noom_kill 2\n",
        "pids/pids.current": "63",
        "pids/pids.max": "64",
    }
    table = "4:memory:/docker/0123\n3:pids:/docker/0123\n"
    _groups(tmp_path, monkeypatch, table, files)
    found = cgroup.limits(1, [])
    assert (found.memory_bytes, found.memory_limit_bytes, found.oom_kills) == (4096, 8192, 2)
    assert (found.num_processes, found.max_processes) == (63, 64)


def test_what_was_seen_comes_back_from_a_dump(pair, tmp_path):
    around = process.Surroundings(os.getpid())
    facts = around.add_to(HostFacts(alive=True))
    assert facts.num_threads >= 1
    assert facts.sockets
    path = tmp_path / "rank_0"
    write_dump(empty_record(path, Identity(rank=0), facts), path)
    assert read_dump(path).host == facts


def deny_netlink(monkeypatch):
    real = socket.socket

    def make(family=-1, *rest, **more):
        if family == socket.AF_NETLINK:
            raise PermissionError(1, "Operation not permitted")
        return real(family, *rest, **more)

    monkeypatch.setattr(sockets.socket, "socket", make)


def test_a_machine_that_shows_nothing_is_named_and_nothing_is_guessed(pair, program, monkeypatch):
    """A restricted machine: no pidfd, no sock_diag, and none of the kernel's files."""
    one = program("print('ready', flush=True); input(); print('lived')")
    one.wait_for("ready")
    pid = one.process.pid
    around = process.Surroundings(pid)
    start_ticks = process.sample(pid).start_ticks
    asked: list[str] = []
    real_open = Path.open

    def denied(path, *rest, **more):
        if str(path).startswith(("/proc", "/sys")):
            asked.append(str(path))
            raise PermissionError(1, "Operation not permitted")
        return real_open(path, *rest, **more)

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "open", denied)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    deny_netlink(monkeypatch)

    sample = process.sample(pid)
    facts = around.add_to(HostFacts(process_state=sample.state, not_permitted=sample.not_permitted))
    assert asked
    assert sample == process.Sample(not_permitted=("stat", "status", "wchan"))
    assert facts == HostFacts(not_permitted=("stat", "status", "wchan", "cgroup", "pressure", "fd"))
    assert process.oom_kills(pid) is None
    assert not process.send(pid, start_ticks, 40)  # who it is cannot be checked: nobody is hit

    monkeypatch.undo()
    deny_netlink(monkeypatch)
    monkeypatch.setattr(Path, "open", denied)
    names: list[str] = []
    assert sockets.sockets(os.getpid(), names) == ()
    assert names == ["sock_diag", "net/tcp"]
    monkeypatch.undo()
    out, _ = one.process.communicate("\n", timeout=60)
    assert out == "lived\n"


def test_a_state_that_is_not_known_is_shown_as_its_number(pair, monkeypatch):
    deny_netlink(monkeypatch)
    real = sockets.read_text
    monkeypatch.setattr(sockets, "read_text", lambda *rest: real(*rest).replace(" 01 ", " 1F "))
    assert "31" in {one.state for one in sockets.sockets(os.getpid(), [])}
