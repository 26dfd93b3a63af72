"""A client inside a job: it finds the job's secret and records its waits by itself."""

from __future__ import annotations

import json

import pytest

from echelon.errors import StoreConnectionError
from echelon.store import StoreServer, TCPStore
from echelon.store.environment import job_secret

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Act as a worker of a job whose store runs; return the store's server."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"secret": SECRET}))
    with StoreServer(secret=SECRET) as server:
        monkeypatch.setenv("ECHELON_JOB_FILE", str(path))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(server.port))
        yield server


def test_the_jobs_store_is_joined_without_naming_its_secret(job, closing):
    store = closing(TCPStore("127.0.0.1", job.port, timeout=20.0))
    store.set("k", b"v")
    assert closing(store.clone()).get("k") == b"v"


def test_other_names_of_the_jobs_store_are_the_jobs_store(job, closing):
    assert closing(TCPStore("localhost", job.port, timeout=20.0)).add("n", 1) == 1


def test_no_other_server_is_offered_the_secret(job, server, closing):
    store = closing(TCPStore("127.0.0.1", server.port, timeout=20.0))
    assert store.add("n", 1) == 1
    assert job_secret("192.0.2.1", job.port) is None


def test_a_server_without_the_secret_is_not_taken_for_the_jobs(job, server, closing, monkeypatch):
    """Nobody who gets the job's port when its store has died can serve its ranks."""
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    with pytest.raises(StoreConnectionError, match="does not know this client's secret"):
        TCPStore("127.0.0.1", server.port, timeout=20.0)


def test_a_secret_that_was_given_is_the_one_that_counts(job):
    with pytest.raises(StoreConnectionError, match="does not know this client's secret"):
        TCPStore("127.0.0.1", job.port, timeout=20.0, secret="another secret that is long")


def test_a_job_file_that_cannot_be_read_is_an_error(job, tmp_path):
    (tmp_path / "job.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read ECHELON_JOB_FILE="):
        TCPStore("127.0.0.1", job.port, timeout=20.0)
