"""Metrics and notices as an OpenTelemetry collector gets them, and collectors that fail."""

from __future__ import annotations

import json
import os
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from echelon.launcher.goodput.facts import Job
from echelon.launcher.notices.otlp import feed
from echelon.launcher.notices.otlp.feed import Feed, why_not
from echelon.launcher.options.options import parse
from tests.support.ranks import run_echelon

DEADLINE_S = 120.0
END = {
    "event": "end", "time_s": 5.5, "ended_by": "worker", "exit_code": 1, "error": "rank 1 failed",
    "restarts": 0,
}  # fmt: skip


class Collector:
    """A collector on loopback: it decodes what it gets, and answers with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.got: list[tuple[str, Any]] = []
        self.headers: list[Any] = []
        self.release = threading.Event()
        self.arrived = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.got.append((self.path, _decode(self.path, body)))
                collector.headers.append(self.headers)
                collector.arrived.set()
                if status:
                    self.send_response(status)
                    self.end_headers()
                else:
                    collector.release.wait(DEADLINE_S)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def metrics(self) -> dict[str, Any]:
        """Return the last value of each metric, by name."""
        return {
            metric.name: metric
            for path, request in self.got
            if path.endswith("/v1/metrics")
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def logs(self) -> dict[str, Any]:
        """Return the log events by name."""
        return {
            record.event_name: record
            for path, request in self.got
            if path.endswith("/v1/logs")
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        }


def _decode(path: str, body: bytes) -> Any:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics

    is_logs = path.endswith("/v1/logs")
    request = ExportLogsServiceRequest() if is_logs else metrics.ExportMetricsServiceRequest()
    request.ParseFromString(body)
    return request


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def collector(installed: None) -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def _attributes(of: Any) -> dict[str, Any]:
    return {one.key: one.value for one in of.attributes}


def _touch_once_arrived(collector: Collector, file: Path) -> None:
    """Let the job end only after its first metrics: on a busy machine, imports take long."""
    collector.arrived.wait(DEADLINE_S)
    file.touch()


@pytest.mark.ranks
def test_a_collector_gets_the_metrics_and_events_of_a_job(tmp_path, collector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=c1")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import sys
            import time
            from pathlib import Path
            from echelon import recorder
            recorder.step()
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise ValueError("a bad batch")
            while not Path(sys.argv[1]).exists():
                time.sleep(0.05)
            """
        )
    )
    run = tmp_path / "run"
    about = (collector, tmp_path / "arrived")
    threading.Thread(target=_touch_once_arrived, args=about, daemon=True).start()
    done = run_echelon(
        "run", "--max-restarts", "1", "--run-dir", str(run), "--otlp", "env", str(script),
        str(tmp_path / "arrived"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--otlp" not in done.stderr
    metrics, logs = collector.metrics(), collector.logs()
    [running] = metrics["echelon_job_running"].gauge.data_points
    assert running.as_double == 0, "the last metrics are those of the job's end"
    restarts = metrics["echelon_restarts_total"].sum
    assert restarts.is_monotonic
    assert _attributes(restarts.data_points[0])["cause"].string_value == "exception"
    assert metrics["echelon_job_seconds"].unit == "s"
    assert {"echelon_goodput_ratio", "echelon_rank_seconds", "echelon_job_info"} <= set(metrics)
    assert set(logs) == {"echelon.incident", "echelon.restart", "echelon.end"}
    incident = logs["echelon.incident"]
    told = _attributes(incident)
    assert told["echelon.cause"].string_value == "exception"
    assert [one.int_value for one in told["echelon.culprit_ranks"].array_value.values] == [0]
    assert json.loads(told["echelon.notice"].string_value)["verdict"]["cause"] == "exception"
    assert "a bad batch" in incident.body.string_value
    assert incident.severity_text == "ERROR"
    assert logs["echelon.end"].severity_text == "INFO"
    [resource] = collector.got[-1][1].resource_metrics
    about = {key: value.string_value for key, value in _attributes(resource.resource).items()}
    assert (about["service.name"], about["cluster"]) == ("echelon", "c1")
    assert about["echelon.run_dir"] == str(run)
    assert all(headers["x-team"] == "blue" for headers in collector.headers)


@pytest.mark.usefixtures("installed")
def test_failures_are_counted_and_told_without_the_url():
    collector, said = Collector(404), []
    try:
        secret = collector.url.replace("http://", "http://user:secret@") + "/secret"
        one = Feed(secret, {}, lambda: Job(job_id="j"), said.append, every_s=DEADLINE_S)
        one.send(END)
        one.close(DEADLINE_S)
    finally:
        collector.close()
    assert collector.got, said
    assert said[0] == "--otlp: an export failed: HTTP 404 Not Found"
    num = len(collector.got)
    assert said[1:] == [f"--otlp: {num} of {num} exports failed"]


@pytest.mark.usefixtures("installed")
def test_a_collector_that_hangs_delays_nothing_beyond_the_deadline():
    collector, said = Collector(0), []
    try:
        one = Feed(collector.url, {}, lambda: Job(job_id="j"), said.append, every_s=DEADLINE_S)
        assert collector.arrived.wait(DEADLINE_S), said
        big = {**END, "error": "x" * 100_000}  # so that the pipe to the child is full, too
        for _ in range(100):
            one.send(big)
        one.close(0.2)
    finally:
        collector.close()
    assert said[0] == "--otlp: not finished within 0.2 s; abandoned"
    assert said[1].endswith(" notices were not sent"), said


@pytest.mark.usefixtures("installed")
def test_a_child_that_dies_is_told():
    said: list[str] = []
    one = Feed("http://127.0.0.1:9", {}, lambda: Job(job_id="j"), said.append, every_s=DEADLINE_S)
    one._child.kill()
    one.close(DEADLINE_S)
    assert said == ["--otlp: the process that sends ended with code -9"]


def test_the_reason_that_nothing_can_be_sent_is_one_line(monkeypatch):
    monkeypatch.setattr(feed, "_is_installed", lambda _: True)
    assert why_not("env", {}) == ""
    assert "OTEL_SDK_DISABLED" in why_not("env", {"OTEL_SDK_DISABLED": "True"})
    assert "not grpc" in why_not("env", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert why_not("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == ""
    monkeypatch.setattr(feed, "_is_installed", lambda _: False)
    assert "pip install 'echelon[otlp]'" in why_not("env", {})


def test_a_package_that_is_missing_is_not_installed():
    assert not feed._is_installed("echelon.no_such_module")
    assert not feed._is_installed("no_such_package.module")


def test_the_endpoint_is_a_url_or_env(capsys):
    assert parse(["--otlp", "env", __file__], {}).otlp == "env"
    assert parse([__file__], {"PET_OTLP": "https://c/otlp"}).otlp == "https://c/otlp"
    for wrong in ("collector:4318", "http://", "http://a b"):
        with pytest.raises(SystemExit):
            parse(["--otlp", wrong, __file__], {})
    assert "expected an http:// or https:// URL or 'env', got" in capsys.readouterr().err
