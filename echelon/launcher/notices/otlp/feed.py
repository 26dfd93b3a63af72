"""Send a job's metrics and notices to the child process that exports them over OTLP.

OpenTelemetry's SDK runs in a child process, so that it cannot affect the launcher. One thread feeds
the child from a bounded queue. If the child is too slow, notices are dropped and counted, and
metrics are sent less often.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from echelon.launcher.goodput.facts import Job
from echelon.launcher.notices.metrics import metrics_of

ENVIRONMENT = "env"  # the --otlp value that leaves the endpoint to OTEL_* variables
_EVERY_S = 10.0  # between metrics, unless OTEL_METRIC_EXPORT_INTERVAL is set
_MAX_WAITING = 64
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def why_not(endpoint: str, environ: Mapping[str, str]) -> str:
    """Return a line that explains why this process cannot export, or "" if it can."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "--otlp has no effect: OTEL_SDK_DISABLED is set"
    if not all(map(_is_installed, _PACKAGES)):
        return "--otlp has no effect: OpenTelemetry is not installed (pip install 'echelon[otlp]')"
    protocol = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    if endpoint == ENVIRONMENT and protocol not in ("", "http/protobuf"):
        return f"--otlp has no effect: only http/protobuf is supported, not {protocol}"
    return ""


class Feed:
    """A sender of one job's metrics and notices to a collector.

    Args:
        endpoint: the collector's base URL, or "env" for the endpoint in the OTEL_* variables.
        resource: attributes that are sent with all data.
        snapshot: a function that returns the record of how the job spends its time. It is called on
            the feed's own thread.
        say: a thread-safe function that prints a line.
        every_s: the interval between exports of metrics, in seconds.

    Raises:
        OSError: the child process cannot be started.
    """

    def __init__(
        self,
        endpoint: str,
        resource: Mapping[str, str],
        snapshot: Callable[[], Job],
        say: Callable[[str], None],
        every_s: float | None = None,
    ) -> None:
        self._snapshot, self._say = snapshot, say
        self._every_s = _interval_s(os.environ) if every_s is None else every_s
        self._waiting: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_MAX_WAITING)
        self._num_dropped = 0
        self._is_closing = False
        self._child = subprocess.Popen(
            [sys.executable, "-m", "echelon.launcher.notices.otlp.export"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end it before the job's end was sent
        )
        begin = {"endpoint": endpoint, "resource": dict(resource)}
        self._thread = threading.Thread(
            target=self._serve, args=(begin,), name="echelon-otlp", daemon=True
        )
        self._reader = threading.Thread(target=self._read, name="echelon-otlp-lines", daemon=True)
        self._thread.start()
        self._reader.start()

    def send(self, notice: Mapping[str, Any]) -> None:
        """Queue a notice without blocking; drop the notice if 64 are already waiting."""
        try:
            self._waiting.put_nowait(notice)
        except queue.Full:
            self._num_dropped += 1

    def close(self, wait_s: float) -> None:
        """Send the queued notices and the final metrics within `wait_s` seconds; stop the child."""
        deadline_s = time.monotonic() + wait_s
        self._is_closing = True
        with contextlib.suppress(queue.Full):  # then the thread ends once the queue is empty
            self._waiting.put_nowait(None)
        self._thread.join(wait_s)
        try:
            self._child.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._child.kill()  # which also ends a write to it
            self._child.wait()
            self._say(f"--otlp: not finished within {wait_s:g} s; abandoned")
        else:
            if code := self._child.returncode:
                self._say(f"--otlp: the process that sends ended with code {code}")
        self._thread.join()
        self._reader.join()
        if self._num_dropped:
            self._say(f"--otlp: {self._num_dropped} notices were not sent")

    def _serve(self, begin: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # the child ended; its last line says why
            self._write(begin)
            self._feed()
        with contextlib.suppress(OSError):
            self._child.stdin.close()

    def _feed(self) -> None:
        due_s = time.monotonic()
        while True:
            try:
                notice = self._waiting.get(timeout=max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                self._write_metrics()
                due_s = time.monotonic() + self._every_s
                continue
            if notice is not None:
                self._write({"notice": notice})
            if notice is None or (self._is_closing and self._waiting.empty()):
                self._write_metrics()  # the last ones
                return

    def _write_metrics(self) -> None:
        job = self._snapshot()
        now_ns = time.time_ns()
        self._write(
            {
                "began_wall_ns": now_ns - job.now_ns,
                "now_wall_ns": now_ns,
                "metrics": [asdict(metric) for metric in metrics_of(job)],
            }
        )

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message).encode() + b"\n")
        self._child.stdin.flush()

    def _read(self) -> None:
        """Forward the lines that the child prints about failed exports."""
        assert self._child.stdout is not None
        with self._child.stdout as lines:
            for line in lines:
                self._say(f"--otlp: {line.decode(errors='replace').strip()}")


def _interval_s(environ: Mapping[str, str]) -> float:
    """Return the export interval from OpenTelemetry's environment variable, in seconds."""
    try:
        return max(0.1, float(environ["OTEL_METRIC_EXPORT_INTERVAL"]) / 1000)
    except (KeyError, ValueError):
        return _EVERY_S


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # a parent package is missing
        return False
