"""Metrics as Prometheus reads them, and the endpoint that serves them."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest

from echelon.launcher.goodput.facts import Attempt, Job, Lap, RankRun, Spent
from echelon.launcher.notices.exporter import Exporter
from echelon.launcher.notices.metrics import CONTENT_TYPE, as_metrics

S = 1_000_000_000


def _job() -> Job:
    lap = Lap(
        first_step=0, end_step=4, began_ns=2 * S, ended_ns=10 * S, spent=Spent(waited_ns=2 * S)
    )
    first = Attempt(
        number=0, began_ns=0, failed_ns=11 * S, ended_ns=12 * S, cause="dead_process",
        runs={0: RankRun(host="a", laps=[lap], ended_ns=11 * S)}, stalls=[[5 * S, 6 * S]],
    )  # fmt: skip
    again = Lap(
        first_step=4, end_step=8, began_ns=14 * S, ended_ns=18 * S, spent=Spent(waited_ns=S)
    )
    runs = {
        0: RankRun(host="a", laps=[again], step=8, progress_ns=19 * S),
        1: RankRun(host="b"),
        2: RankRun(host="b", ended_ns=19 * S),
    }
    second = Attempt(number=1, began_ns=13 * S, runs=runs)
    return Job(job_id='a "b" \\ c\nd', now_ns=20 * S, attempts=[first, second])


def _samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_every_sample():
    samples = _samples(as_metrics(_job()))
    assert ("echelon_job_info", ('a "b" \\ c\nd', samples_version(samples))) in samples
    assert samples["echelon_job_running", ()] == 1
    assert samples["echelon_ranks", ()] == 2
    assert samples["echelon_restarts_total", ("dead_process",)] == 1
    assert samples["echelon_stalls_total", ()] == 1
    assert samples["echelon_step", ("0",)] == 8
    assert samples["echelon_step_seconds", ("0",)] == 1.0
    assert samples["echelon_exposed_communication_ratio", ("0",)] == 0.25
    assert samples["echelon_lag_seconds", ("0",)] == 1.0
    assert ("echelon_step", ("1",)) not in samples
    by_category = {key: value for key, value in samples.items() if key[0] == "echelon_rank_seconds"}
    assert sum(by_category.values()) == 3 * 20
    assert 0 < samples["echelon_goodput_ratio", ()] < 1


def samples_version(samples) -> str:
    return next(labels[1] for name, labels in samples if name == "echelon_job_info")


def test_a_job_without_ranks_and_one_that_is_over_have_metrics():
    assert _samples(as_metrics(Job(job_id="j")))["echelon_ranks", ()] == 0
    over = Job(job_id="j", ended_by="worker", exit_code=0)
    assert _samples(as_metrics(over))["echelon_job_running", ()] == 0


def test_the_endpoint_serves_metrics_and_nothing_else():
    exporter = Exporter("127.0.0.1", 0, lambda: "echelon_x 1.0\n")
    try:
        with urllib.request.urlopen(exporter.url, timeout=30) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert answer.read() == b"echelon_x 1.0\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(exporter.url.replace("/metrics", "/job.json"), timeout=30)
        port = int(exporter.url.split(":")[2].split("/")[0])
        with socket.create_connection(
            ("127.0.0.1", port), 30
        ):  # says nothing: closing must not wait
            pass
    finally:
        exporter.close()


def test_a_port_that_is_taken_is_an_os_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            Exporter("127.0.0.1", taken.getsockname()[1], str)
