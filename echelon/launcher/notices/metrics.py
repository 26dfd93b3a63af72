"""Compute a job's metrics, and format them in the Prometheus text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echelon import __version__
from echelon.launcher.goodput.facts import Attempt, Job, RankRun
from echelon.launcher.goodput.shares import shares

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Samples = Iterator[tuple[Mapping[str, object], float]]


@dataclass(frozen=True)
class Metric:
    """One metric and its samples.

    Attributes:
        name: the name in Prometheus and in OTLP.
        kind: "counter" if the metric never decreases, else "gauge".
        text: the help text of the metric.
        samples: (labels, value) pairs.
    """

    name: str
    kind: str
    text: str
    samples: Sequence[tuple[Mapping[str, object], float]]


def as_metrics(job: Job) -> str:
    """Return a job's metrics as of `job.now_ns` in the Prometheus text format."""
    lines: list[str] = []
    for metric in metrics_of(job):
        lines.append(f"# HELP {metric.name} {metric.text}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines.extend(_sample(metric.name, labels, value) for labels, value in metric.samples)
    return "\n".join(lines) + "\n"


def metrics_of(job: Job) -> list[Metric]:
    """Return a job's metrics as of `job.now_ns`."""
    account = shares(job)
    now = job.attempts[-1] if job.attempts else None
    running = {} if now is None else _running(now)
    metrics: list[Metric] = []

    def add(name: str, kind: str, text: str, samples: _Samples) -> None:
        metrics.append(Metric(f"echelon_{name}", kind, text, list(samples)))

    info = {"job_id": job.job_id, "version": __version__}
    add("job_info", "gauge", "The job; always 1.", iter([(info, 1)]))
    add("job_running", "gauge", "1 until the job ends.", iter([({}, not job.ended_by)]))
    add("job_seconds", "gauge", "Time since the job began.", iter([({}, job.now_ns / 1e9)]))
    add("ranks", "gauge", "Number of running ranks.", iter([({}, len(running))]))
    add(
        "restarts_total", "counter", "Failed attempts that were followed by another one, by cause.",
        (({"cause": cause}, num) for cause, num in sorted(_restarts(job).items())),
    )  # fmt: skip
    add(
        "stalls_total", "counter", "Detected stalls.",
        iter([({}, sum(len(one.stalls) for one in job.attempts))]),
    )  # fmt: skip
    add(
        "goodput_ratio", "gauge", "Share of all ranks' time in steps that count.",
        iter([({}, account.goodput)]),
    )  # fmt: skip
    add(
        "rank_seconds", "gauge", "Total time of all ranks, by category.",
        (({"category": one.value}, ns / 1e9) for one, ns in account.totals.items()),
    )  # fmt: skip
    add(
        "step", "gauge", "Current step of a rank.",
        (({"rank": rank}, run.step) for rank, run in running.items() if run.step >= 0),
    )  # fmt: skip
    add(
        "step_seconds", "gauge", "Mean duration of a rank's last steps.",
        (({"rank": rank}, value) for rank, run in running.items()
         if (value := _step_s(run)) is not None),
    )  # fmt: skip
    add(
        "exposed_communication_ratio", "gauge",
        "Share of a rank's last steps in which it was blocked in communication.",
        (({"rank": rank}, value) for rank, run in running.items()
         if (value := _waiting(run)) is not None),
    )  # fmt: skip
    add(
        "lag_seconds", "gauge", "Time since a rank last began or ended an operation, span or step.",
        (({"rank": rank}, max(0, job.now_ns - run.progress_ns) / 1e9)
         for rank, run in running.items() if run.progress_ns is not None),
    )  # fmt: skip
    return metrics


def _running(attempt: Attempt) -> dict[int, RankRun]:
    if attempt.ended_ns is not None:
        return {}
    return {rank: run for rank, run in attempt.runs.items() if run.ended_ns is None}


def _restarts(job: Job) -> Counter[str]:
    return Counter(attempt.cause or "unknown" for attempt in job.attempts[:-1])


def _step_s(run: RankRun) -> float | None:
    for lap in reversed(run.laps):
        if lap.end_step > lap.first_step:
            return (lap.ended_ns - lap.began_ns) / 1e9 / (lap.end_step - lap.first_step)
    return None


def _waiting(run: RankRun) -> float | None:
    for lap in reversed(run.laps):
        if lap.ended_ns > lap.began_ns:
            return min(1.0, lap.spent.waited_ns / (lap.ended_ns - lap.began_ns))
    return None


def _sample(name: str, labels: Mapping[str, object], value: float) -> str:
    shown = ",".join(f'{key}="{_escaped(str(text))}"' for key, text in labels.items())
    return f"{name}{{{shown}}} {float(value)!r}" if shown else f"{name} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
