"""Any machine that knows the job's secret can request the state of a running job; and TLS."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import pytest

from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_SCRIPT = """
import signal
import numpy as np
import echelon.dist as dist
from echelon import recorder
world = dist.init(timeout_s=60, backend="gloo")
x = np.ones(4)
for step in range(5):
    recorder.step()
    world.all_reduce(x)
with recorder.span("data_wait"):
    print("waiting", flush=True)
    signal.pause()
"""
_SIMPLE = """
import signal
print("waiting", flush=True)
signal.pause()
"""


def _environ(secret: str = "") -> dict[str, str]:
    rest = {name: value for name, value in os.environ.items() if name != "ECHELON_SECRET"}
    return rest | ({"ECHELON_SECRET": secret} if secret else {})


def test_all_nodes_ranks_are_shown_to_who_knows_the_secret(cluster, tmp_path):
    pytest.importorskip("torch")
    job = cluster(_SCRIPT)
    first = job.start("--nnodes", "2", rank=0, nproc=1)
    second = job.start("--nnodes", "2", rank=1, nproc=1)
    for node in (first, second):
        node.wait_for("waiting")
    shown = run_echelon("status", job.endpoint, env=_environ("a-secret-of-the-tests"))
    assert shown.returncode == 0, shown.stderr
    title, _, *rows = [line.split() for line in shown.stdout.splitlines() if line.strip()]
    assert f"{job.endpoint}:" in title
    assert [(row[0], row[2:5], row[-3]) for row in rows] == [
        ("0", ["data_wait", "all_reduce", "4"], "4"),
        ("1", ["data_wait", "all_reduce", "4"], "4"),
    ]
    stranger = run_echelon("status", job.endpoint, env=_environ("a-guess-of-a-stranger"))
    assert (stranger.returncode, stranger.stdout) == (1, "")
    assert "the secret does not match" in stranger.stderr
    runs = tmp_path / "home/runs/one"
    runs.mkdir(parents=True)
    shutil.copy(first.run_dir / "job.json", runs)
    found = run_echelon("status", job.endpoint, env=_environ(), cwd=tmp_path / "home")
    assert found.returncode == 0, found.stderr
    nothing = run_echelon("status", job.endpoint, env=_environ(), cwd=tmp_path)
    assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)


def test_a_job_that_gathers_says_who_it_waits_for(cluster):
    job = cluster(_SIMPLE)
    node = job.start("--nnodes", "2", rank=0)
    node.wait_for("ranks on each of 2 nodes")
    shown = run_echelon("status", job.endpoint, env=_environ("a-secret-of-the-tests"))
    assert "waiting for nodes: 1 of 2 connected" in " ".join(shown.stdout.split()), shown.stderr


def test_nobody_there_is_one_line(cluster):
    shown = run_echelon("status", "127.0.0.1:9", env=_environ("a-secret-of-the-tests"))
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
    assert "could not reach the coordinator at 127.0.0.1:9" in shown.stderr


def _openssl(*argv: str) -> None:
    subprocess.run(["openssl", *argv], check=True, capture_output=True, timeout=600)


@pytest.fixture
def certificates(tmp_path):
    """An authority and, signed by it, a certificate of this machine; and another authority."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path / "tls"
    folder.mkdir()
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "other"):
        _openssl("req", "-x509", *new_key, "-keyout", f"{folder}/{name}.key", "-out",
                 f"{folder}/{name}.pem", "-subj", f"/CN=test {name}", "-days", "2")  # fmt: skip
    _openssl("req", *new_key, "-keyout", f"{folder}/key.pem", "-out", f"{folder}/request",
             "-subj", "/CN=node")  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    _openssl("x509", "-req", "-in", f"{folder}/request", "-CA", f"{folder}/ca.pem", "-CAkey",
             f"{folder}/ca.key", "-CAcreateserial", "-extfile", f"{folder}/names", "-out",
             f"{folder}/cert.pem", "-days", "2")  # fmt: skip
    return folder


def test_nodes_speak_tls_with_certificates(cluster, certificates):
    tls = [
        "--rdzv-cert", f"{certificates}/cert.pem", "--rdzv-key", f"{certificates}/key.pem",
        "--rdzv-ca", f"{certificates}/ca.pem",
    ]  # fmt: skip
    job = cluster(_SIMPLE)
    first = job.start("--nnodes", "2", *tls, rank=0, nproc=1)
    first.wait_for("rank on each of 2 nodes")
    soon = ["--rdzv-conf", "join_timeout=2"]
    plain = job.start("--nnodes", "2", *soon, rank=1, nproc=1)
    without = job.start("--nnodes", "2", *soon, *tls[4:], rank=1, nproc=1)
    mistaken = job.start(
        "--nnodes", "2", *soon, *tls[:4], "--rdzv-ca", f"{certificates}/other.pem", rank=1, nproc=1
    )
    for stranger in (plain, without, mistaken):
        assert stranger.end() == 1, job.told()
        assert all("echelon: " in line for line in stranger.lines), stranger.lines
    assert all("echelon: " in line for line in first.lines), first.lines
    assert any("or TLS fails" in line for line in mistaken.lines), mistaken.lines
    second = job.start("--nnodes", "2", *tls, rank=1, nproc=1)
    second.wait_for("waiting")
    shown = run_echelon("status", job.endpoint, *tls, env=_environ("a-secret-of-the-tests"))
    assert shown.returncode == 0, shown.stderr
    assert "not recording" in shown.stdout
    first.process.terminate()
    assert (first.end(), second.end()) == (143, 143), job.told()
    assert read_json(first.run_dir / "report.json")["ended_by"] == "signal"


def test_the_silence_that_counts_as_a_loss_can_be_set(cluster):
    job = cluster(_SIMPLE)
    node = job.start("--nnodes", "2", "--rdzv-conf", "lost_after=4", rank=0, nproc=1)
    other = job.start("--nnodes", "2", "--rdzv-conf", "lost_after=60", rank=1, nproc=1)
    other.wait_for("waiting")
    other.process.send_signal(signal.SIGSTOP)
    node.wait_for("(no heartbeat for 4 s)")
