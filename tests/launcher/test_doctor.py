"""`echelon doctor`: a line a check, honest about what is denied."""

from __future__ import annotations

import os
import socket

import pytest

from echelon.launcher import doctor
from tests.ranks import run_echelon


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
        assert any(
            line == f"{name} ready" or line.startswith(f"{name} not ready: ") for line in lines
        ), done.stdout
    assert done.stderr == ""
