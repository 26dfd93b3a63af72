"""`echelon doctor`: one line per check, honest about what is denied."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from echelon.launcher.control.messages import CheckIn
from echelon.launcher.doctor import doctor
from echelon.launcher.doctor.checkup import compare_versions
from tests.support.hosts import hosts, needs_hosts
from tests.support.ports import free_port
from tests.support.ranks import run_echelon


def _deny(*_args, **_kwargs):
    raise PermissionError(1, "Operation not permitted")


def test_a_denied_facility_is_said_with_what_is_used_instead(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", _deny)
    monkeypatch.setattr(os, "memfd_create", _deny)
    for check in (doctor.pidfd(), doctor.memfd()):
        assert "not permitted" in check.text
        assert "instead" in check.text


@pytest.mark.parametrize(
    ("addresses", "ok", "said"),
    [
        (["127.0.1.1"], True, "other nodes need this machine's address"),
        (["203.0.113.9"], False, "which is not this machine's"),
    ],
)
def test_the_host_name_is_looked_at_both_ways(monkeypatch, addresses, ok, said):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (a, 0)) for a in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    check = doctor.host_name()
    assert (check.ok, said in check.text) == (ok, True), check


@pytest.mark.parametrize(
    ("conf", "uid", "lingers", "removes"),
    [
        (None, 1000, False, True),
        ("[Login]\nRemoveIPC=no\n", 1000, False, False),
        ("[Login]\n#RemoveIPC=no\n", 1000, False, True),
        (None, 1000, True, False),
        (None, 0, False, False),
    ],
    ids=["default", "off", "commented out", "lingers", "root"],
)
def test_rings_that_vanish_at_logout(tmp_path, monkeypatch, conf, uid, lingers, removes):
    seats = tmp_path / "seats"
    seats.touch()
    path = doctor.Path
    monkeypatch.setattr(
        doctor, "Path", lambda name: seats if name == "/run/systemd/seats" else path(name)
    )
    monkeypatch.setattr(doctor, "_LOGIND", (str(tmp_path / "logind.conf"),))
    monkeypatch.setattr(doctor, "_LINGER", tmp_path)
    if conf is not None:
        (tmp_path / "logind.conf").write_text(conf)
    if lingers:
        (tmp_path / "someone").touch()
    assert doctor.removes_at_logout(uid, "someone") is removes


def test_a_name_that_does_not_resolve_is_said(monkeypatch):
    def fail(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert not doctor.host_name().ok


def test_the_way_to_an_endpoint():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert doctor.way_to(f"127.0.0.1:{port}").ok
    assert not doctor.way_to(f"127.0.0.1:{port}").ok
    assert not doctor.way_to("127.0.0.1:x").ok


@pytest.mark.ranks
def test_the_command_lists_every_backend():
    done = run_echelon("doctor")
    lines = done.stdout.splitlines()
    assert "shm ready" in lines, done.stdout
    for name in ("gloo", "nccl", "xccl"):
        begins = (f"{name} ready", f"{name} not ready: ")
        assert any(line.startswith(begins) for line in lines), done.stdout
    assert done.stderr == ""


@pytest.fixture
def without_torch(tmp_path) -> dict[str, str]:
    """The environment of a doctor that finds no torch: its backends would take 4 s to load."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}


def _doctor(
    *argv: str, environ: Mapping[str, str], before: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*before, sys.executable, "-m", "echelon", "doctor", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**environ, "ECHELON_SECRET": "a-secret-of-the-tests"},
    )  # fmt: skip


def _told(doctors: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        return [doctor.communicate(timeout=600)[0] for doctor in doctors]
    finally:
        for doctor in doctors:
            doctor.kill()
            doctor.wait()


@pytest.mark.ranks
def test_nodes_check_each_other_and_all_are_told(without_torch):
    endpoint = f"127.0.0.1:{free_port()}"
    meeting = ["--rdzv_endpoint", endpoint, "--nnodes", "3"]
    doctors = [
        _doctor(*meeting, "--node-rank", str(rank), environ=without_torch) for rank in range(3)
    ]
    for text in _told(doctors):
        lines = {line[2:17].strip(): line for line in text.splitlines()}
        assert lines["nodes"].startswith("  nodes           3 of 3 connected"), text
        assert "on all nodes" in lines["versions"], text
        assert " ms" in lines["clocks"], text
        assert "each of 3 nodes can reach every other node" in lines["connectivity"], text


@pytest.mark.ranks
def test_nodes_that_do_not_come_are_counted(without_torch):
    doctor = _doctor("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--node-rank", "0",
                     "--rdzv-conf", "join_timeout=3", environ=without_torch)  # fmt: skip
    (text,) = _told([doctor])
    assert "! nodes           1 of 2 connected" in text
    assert doctor.returncode == 1


@pytest.mark.netns
@needs_hosts
def test_a_way_that_is_closed_is_named(without_torch):
    """Each host reaches the other at the meeting's port, and at no other."""
    with hosts(2) as made:
        meeting = ["--rdzv-endpoint", f"{made[0].address}:29400"]
        for host in made:
            host.swallow(but_port=29400)
        doctors = [
            _doctor(
                *meeting, "--node-rank", str(rank), environ=without_torch, before=host.command()
            )
            for rank, host in enumerate(made)
        ]
        told = _told(doctors)
    for text, one in zip(told, doctors, strict=True):
        assert sum(line.startswith("! connectivity") for line in text.splitlines()) == 2, text
        assert f"{made[1].address} port" in text
        assert one.returncode == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rdzv-endpoint", "127.0.0.1:x"], "must be HOST:PORT, got"),
        (["--rdzv-endpoint", "127.0.0.1", "--rdzv-conf", "x=1"], "unknown setting 'x'"),
    ],
)
def test_bad_usage_is_one_line(argv, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        doctor.main(argv)
    assert exit_info.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_versions_that_differ_are_named():
    nodes = [
        CheckIn(host=host, port=1, versions=[["python", "3.11.7"], ["torch", torch]])
        for host, torch in (("a", "2.13.0"), ("b", "2.12.0"))
    ]
    assert [(one.ok, one.text) for one in compare_versions(nodes)] == [
        (False, "a has python 3.11.7, torch 2.13.0"),
        (False, "b has python 3.11.7, torch 2.12.0"),
    ]
    (alike,) = compare_versions(nodes[:1] * 2)
    assert alike.ok


@pytest.mark.ranks
def test_a_schedulers_endpoint_without_a_secret_is_a_line_and_no_end(without_torch):
    environ = {name: value for name, value in without_torch.items() if name != "ECHELON_SECRET"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0",
             "SLURM_JOB_NODELIST": "localhost,other"}  # fmt: skip
    done = run_echelon("doctor", env={**environ, **slurm})
    assert "! nodes           not checked: multi-node jobs need a shared secret" in done.stdout, (
        done.stdout
    )
    assert "shm ready" in done.stdout
