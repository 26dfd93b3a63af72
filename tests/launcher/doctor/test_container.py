"""The report of `echelon doctor` on a container: each fact, with the option that changes it."""

from __future__ import annotations

import getpass
import tempfile

import pytest

from echelon.host.cgroup import Limits
from echelon.launcher.doctor import container, doctor


def test_a_user_without_a_name_is_said_and_stops_no_check(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1234560")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert "set USER" in container.user().text
    assert "/dev/shm" in doctor.shared_memory().text


def test_a_machine_without_a_temporary_folder_is_said(monkeypatch):
    def none():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    check = container.temporary_folder()
    assert not check.ok
    assert "TMPDIR" in check.text


@pytest.mark.parametrize(
    ("found", "ok", "said"),
    [
        (Limits(), True, "no limits"),
        (Limits(memory_bytes=10**9, memory_limit_bytes=4 * 10**9), True, "1.0 of 4.0 GB"),
        (Limits(memory_bytes=39 * 10**8, memory_limit_bytes=4 * 10**9), False, "3.9 of 4.0 GB"),
        (
            Limits(memory_limit_bytes=10**9, oom_kills=3),
            True,
            "(3 processes killed for memory so far)",
        ),
        (Limits(num_processes=60, max_processes=64), False, "--pids-limit"),
        (Limits(num_processes=6, max_processes=32768), True, "6 of 32768 processes"),
    ],
)
def test_limits_of_the_control_group(monkeypatch, found, ok, said):
    monkeypatch.setattr(container, "limits", lambda *_: found)
    check = container.limits_check()
    assert (check.ok, said in check.text) == (ok, True), check


@pytest.mark.parametrize(
    ("inode", "said"),
    [(0, "not permitted"), (0xEFFFFFFC, "the host's own"), (0xEFFFFFFD, "fr-analyze --attach")],
)
def test_the_namespace_of_pids(monkeypatch, inode, said):
    monkeypatch.setattr(container, "pid_namespace", lambda: inode)
    assert said in container.pid_namespace_check().text


def test_a_small_shared_memory_names_the_option(monkeypatch):
    usage = doctor.shutil.disk_usage("/")
    monkeypatch.setattr(
        doctor.shutil, "disk_usage", lambda _: usage._replace(total=64 << 20, free=60 << 20)
    )
    monkeypatch.setattr(doctor, "file_system", lambda _: "tmpfs")
    assert "--shm-size" in doctor.shared_memory().text


def test_tracing_is_tried_and_a_refusal_is_said(monkeypatch):
    monkeypatch.setattr(container, "can_spy", lambda: False)
    assert "permitted" in container.tracing().text
    assert "SYS_PTRACE" not in container.tracing().text

    def refuse(_pid, denied):
        denied.append("mem")
        return ""

    monkeypatch.setattr(container, "native_stacks", refuse)
    assert "SYS_PTRACE" in container.tracing().text
