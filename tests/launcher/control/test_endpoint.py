"""Which node hosts the job, and which address it binds."""

from __future__ import annotations

import pytest

from echelon.launcher.control.endpoint import read_secret
from echelon.launcher.options.options import parse

_ENVIRON = {"ECHELON_SECRET": "a-secret-of-the-tests"}


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


@pytest.mark.parametrize(
    ("secret", "mode", "said"),
    [
        (b"short", 0o600, "the secret has 5 bytes, but at least"),
        (
            b"\xff" * 40,
            0o600,
            "the secret is not valid UTF-8; create one with openssl rand -hex 32",
        ),
        (b"a-secret-of-the-tests", 0o644, "other users can access the file; run chmod 600"),
    ],
)
def test_a_secret_that_can_be_guessed_or_read_is_refused(tmp_path, secret, mode, said):
    path = tmp_path / "secret"
    path.write_bytes(secret)
    path.chmod(mode)
    with pytest.raises(ValueError, match=said):
        read_secret(path, {})
