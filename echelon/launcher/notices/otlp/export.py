"""Read JSON objects from stdin, one per line, and export them over OTLP/HTTP until stdin closes.

`Feed` runs this module as a separate process. Each export is synchronous and takes at most
OTEL_EXPORTER_OTLP_TIMEOUT. Pending data is therefore stored only in the pipe and in the feed's
queue, which are both bounded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from echelon import __version__
from echelon.launcher.notices.otlp.feed import ENVIRONMENT

_SCOPE = "echelon"
_ORPHAN_S = 10  # to send what is left once the launcher was killed
_WHY_CHARS = 120
_URL = re.compile(r"\bhttps?://\S+|\burl: \S+")
_ERRNO = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
_STATUS = re.compile(r"code: (\d+), reason: ([\w ]*)")
_SEVERITIES = {"incident": SeverityNumber.ERROR, "restart": SeverityNumber.WARN}


class Failures(logging.Handler):
    """A counter of failed exports.

    The first failure is reported immediately, and the total at the end.

    The counter is also a logging handler that receives the SDK's log records about failed exports.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._num, self._num_failed, self._why = 0, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        """Store why an export failed, unless a reason has been stored since the previous export."""
        self._why = self._why or _reason(record.getMessage())

    def count(self, succeeded: bool) -> None:
        """Record whether an export succeeded."""
        self._num += 1
        if not succeeded:
            self._num_failed += 1
            if self._num_failed == 1:
                self.say(f"an export failed: {self._why or 'unknown reason'}")
        self._why = ""

    def conclude(self) -> None:
        """Print the number of failed exports if it is greater than 1."""
        if self._num_failed > 1:
            self.say(f"{self._num_failed} of {self._num} exports failed")

    @staticmethod
    def say(line: str) -> None:
        """Print a line for the launcher to show."""
        print(line, flush=True)


class _LogExporter(OTLPLogExporter):  # type: ignore[misc]
    failures: Failures

    def export(self, batch: Any) -> Any:
        result = super().export(batch)
        self.failures.count(result.name == "SUCCESS")
        return result


class Exporter:
    """An exporter of one job's metrics and logs.

    Args:
        endpoint: the collector's base URL, or "env" for the endpoint in the OTEL_* variables.
        resource: attributes that are sent with all data, in addition to those listed in
            OTEL_RESOURCE_ATTRIBUTES.
    """

    def __init__(self, endpoint: str, resource: Mapping[str, str], failures: Failures) -> None:
        self._failures = failures
        self._resource = _resource(resource)
        base = None if endpoint == ENVIRONMENT else endpoint.rstrip("/")
        self._metrics = self._logger = None
        if os.environ.get("OTEL_METRICS_EXPORTER") != "none":
            self._metrics = OTLPMetricExporter(base and f"{base}/v1/metrics")
        if os.environ.get("OTEL_LOGS_EXPORTER") != "none":
            logs = _LogExporter(base and f"{base}/v1/logs")
            logs.failures = failures
            provider = LoggerProvider(self._resource, shutdown_on_exit=False)
            provider.add_log_record_processor(SimpleLogRecordProcessor(logs))
            self._logger = provider.get_logger(_SCOPE, __version__)

    def send(self, message: Mapping[str, Any]) -> None:
        """Export the notice or the metrics that a JSON object from the launcher contains."""
        if "notice" in message and self._logger is not None:
            self._logger.emit(as_log(message["notice"]))
        elif "metrics" in message and self._metrics is not None:
            times = message["began_wall_ns"], message["now_wall_ns"]
            metrics = [as_metric(one, *times) for one in message["metrics"] if one["samples"]]
            scope = ScopeMetrics(InstrumentationScope(_SCOPE, __version__), metrics, "")
            data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
            self._failures.count(self._metrics.export(data).name == "SUCCESS")


def as_metric(metric: Mapping[str, Any], began_ns: int, now_ns: int) -> Metric:
    """Convert a metric to an OpenTelemetry metric. Counters start when the job begins.

    Args:
        metric: the fields of `echelon.launcher.notices.metrics.Metric`.
        began_ns: when the job began, in ns since 1970.
        now_ns: when the samples were taken, in ns since 1970.
    """
    points = [
        NumberDataPoint(
            attributes=labels,
            start_time_unix_nano=began_ns,
            time_unix_nano=now_ns,
            value=float(value),
        )
        for labels, value in metric["samples"]
    ]
    data: Any = Gauge(points)
    if metric["kind"] == "counter":
        data = Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
    unit = "s" if metric["name"].endswith("_seconds") else ""
    return Metric(metric["name"], metric["text"], unit, data)


def as_log(notice: Mapping[str, Any]) -> LogRecord:
    """Convert a notice to a log record that also contains the complete notice as JSON."""
    event = notice["event"]
    severity = _SEVERITIES.get(event, SeverityNumber.INFO)
    if notice.get("withdrawn"):
        severity = SeverityNumber.INFO
    elif event == "end" and notice["exit_code"]:
        severity = SeverityNumber.ERROR
    return LogRecord(
        timestamp=int(notice["time_s"] * 1e9),
        severity_number=severity,
        severity_text=severity.name,
        body=_sentence(notice),
        event_name=f"echelon.{event}",
        attributes={
            **{f"echelon.{name}": value for name, value in _attributes(notice)},
            "echelon.notice": json.dumps(notice),
        },
    )


def _sentence(notice: Mapping[str, Any]) -> str:
    event, verdict = notice["event"], notice.get("verdict")
    if event == "incident":
        return str(verdict["summary"] if verdict and "summary" in verdict else notice["reason"])
    if event == "restart":
        return str(notice["decision"])
    return str(notice["error"] or f"the job ended with exit code {notice['exit_code']}")


def _attributes(notice: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name in ("attempt", "kind", "folder", "withdrawn", "restarts", "ended_by", "exit_code"):
        if notice.get(name) is not None:
            yield name, notice[name]
    verdict = notice.get("verdict") or {}
    for name in ("cause", "confidence", "culprit_ranks"):
        if name in verdict:
            yield name, verdict[name]


def _resource(attributes: Mapping[str, str]) -> Resource:
    known = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in known
    named = {} if is_named else {"service.name": "echelon"}
    return Resource.create({**named, **attributes})


def _reason(text: str) -> str:
    """Extract the reason for a failure from a line of the SDK's log. URLs are removed."""
    if found := _ERRNO.search(text):
        return found[1].strip()
    if found := _STATUS.search(text):
        return f"HTTP {found[1]} {found[2]}".strip()
    if "timed out" in text:
        return "no answer in time"
    text = text.partition(" encountered")[0].removeprefix("Transient error ")
    return _URL.sub("...", text)[:_WHY_CHARS]


def main() -> None:
    """Read the settings from stdin's first line; export the JSON object on each later line."""
    failures = Failures()
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(failures)
    logger.propagate = False
    launcher = os.getppid()
    lines = sys.stdin.buffer
    begin = json.loads(lines.readline())
    exporter = Exporter(begin["endpoint"], begin["resource"], failures)
    for line in lines:
        if os.getppid() != launcher:
            launcher = os.getppid()
            signal.alarm(_ORPHAN_S)
        exporter.send(json.loads(line))
    failures.conclude()


if __name__ == "__main__":
    main()
