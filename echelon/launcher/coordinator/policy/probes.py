"""Define, for each cause of failure, the probes that a suspect node must pass.

`docs/restarts.md` shows the tables `ASKED` and `ANSWERS`. A cause that is not listed requires no
probe, because it does not depend on the machine. A node with a broken device or too little memory
is replaced after the first failed probe. A node with a network or disk fault gets more tries,
because the fault might affect the other nodes too.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.launcher.coordinator.policy.failure import DEAD, MEMORY, Failure
from echelon.launcher.doctor.probes import finding as probes

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
PATIENCE_S = 600.0  # then the restart happens all the same: a probe may be wrong, too


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A row of the table `ASKED`: the probes that certain causes require.

    Attributes:
        if_outside: whether the probes are required only for errors that point to the network or a
            file system.
    """

    causes: tuple[str, ...]
    probes: tuple[str, ...]
    if_outside: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A row of the table `ANSWERS`: the response to a probe that fails repeatedly.

    Attributes:
        tries: the number of failed probes after which the node is replaced, if possible.
        checks: a description of what the probe checks.
    """

    probe: str
    tries: int
    checks: str


ASKED = (
    Asked(causes=(MEMORY,), probes=(probes.MEMORY,)),
    Asked(causes=(DEAD, "frozen_process", "straggler"), probes=(probes.MEMORY, probes.DEVICE)),
    Asked(causes=("device_stuck",), probes=(probes.DEVICE,)),
    Asked(causes=("network", "store_wait"), probes=(probes.NETWORK,)),
    Asked(causes=("storage_stall", "data_starvation"), probes=(probes.STORAGE,)),
    Asked(causes=("exception",), probes=(probes.STORAGE, probes.NETWORK), if_outside=True),
)

ANSWERS = (
    Answer(
        probe=probes.STORAGE,
        tries=3,
        checks="writes, syncs and reads 1 MiB in the run directory and in `--checkpoint-dir`",
    ),
    Answer(
        probe=probes.NETWORK,
        tries=3,
        checks="latency, bandwidth both ways and clock, between the node and another one",
    ),
    Answer(
        probe=probes.MEMORY,
        tries=1,
        checks="256 MiB, or a tenth of the cgroup's limit, are available",
    ),
    Answer(
        probe=probes.DEVICE,
        tries=1,
        checks="each GPU answers NVML and reports no uncorrected memory error",
    ),
)


def probes_for(failure: Failure) -> tuple[str, ...]:
    """Return the names of the probes that a failure requires; () for none."""
    for row in ASKED:
        if failure.cause in row.causes and (failure.is_outside or not row.if_outside):
            return row.probes
    return ()


def tries_of(probe: str) -> int:
    """Return the number of failed probes after which a node is replaced."""
    return next(answer.tries for answer in ANSWERS if answer.probe == probe)


def wait_s(num_failed: int) -> float:
    """Return how many seconds to wait after `num_failed` successive failed probes."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(num_failed - 1, 30)))


def to_markdown() -> str:
    """Return the tables `ASKED` and `ANSWERS` as Markdown, exactly as in `docs/restarts.md`."""
    lines = ["| cause | probes |", "|---|---|"]
    for row in ASKED:
        causes = ", ".join(f"`{cause}`" for cause in row.causes)
        only = ", if the error names the network or a file system" if row.if_outside else ""
        lines.append(f"| {causes}{only} | {', '.join(row.probes)} |")
    lines += [
        "",
        "| probe | what is checked | another node takes its place after |",
        "|---|---|---|",
    ]
    for answer in ANSWERS:
        failed = "1 failed probe" if answer.tries == 1 else f"{answer.tries} failed probes"
        lines.append(f"| {answer.probe} | {answer.checks} | {failed} |")
    return "\n".join(lines) + "\n"
