"""Who hosts the job, and what it binds."""

from __future__ import annotations

import pytest

from echelon.launcher.endpoint import read_secret
from echelon.launcher.options import parse
from echelon.launcher.rundir import RunDirectory, write_json

_ENVIRON = {"ECHELON_SECRET": "x" * 16}


def _meeting(*options: str):
    argv = ["--nnodes", "2", *options, "--no-python", "true"]
    return parse(argv, _ENVIRON).rendezvous


@pytest.mark.parametrize(
    ("options", "is_host"),
    [
        ((), True),
        (("--node-rank", "1"), False),
        (("--node-rank", "1", "--rdzv-conf", "is_host=true"), True),
        (("--node-rank", "0", "--rdzv-conf", "is_host=false"), False),
    ],
)
def test_the_host_is_who_says_so_then_rank_0_then_who_has_the_address(options, is_host):
    assert _meeting("--rdzv-endpoint", "127.0.0.1:1", *options).is_host == is_host


def test_a_name_that_does_not_exist_yet_stops_only_who_must_know_its_place_by_it(capsys):
    endpoint = ("--rdzv-endpoint", "pod-0.service.invalid:29400")
    assert not _meeting(*endpoint, "--node-rank", "1").is_host
    host = _meeting(*endpoint, "--node-rank", "0")
    assert (host.is_host, host.bind) == (True, "0.0.0.0")
    with pytest.raises(SystemExit):
        _meeting(*endpoint)
    assert "cannot resolve 'pod-0.service.invalid'" in capsys.readouterr().err


def test_a_node_does_not_overwrite_the_hosts_job_file_in_a_shared_directory(tmp_path):
    directory = RunDirectory(tmp_path, "job")
    own = {"rendezvous": "a:1", "secret": "x"}
    assert not directory.has_job(own)
    write_json(directory.job_file, {**own, "endpoint": "a:2", "job_id": "job"})
    assert directory.has_job(own)
    assert not directory.has_job({**own, "secret": "of another job"})
    directory.job_file.write_text("garbage")
    assert not directory.has_job(own)


def test_a_secret_that_can_be_guessed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="ECHELON_SECRET: a secret of 6 bytes, at least 16"):
        read_secret(None, {"ECHELON_SECRET": "s3cret"})
    short = tmp_path / "secret"
    short.write_text("s3cret\n")
    short.chmod(0o600)
    with pytest.raises(ValueError, match="at least 16 are needed"):
        read_secret(short, {})
