"""Find the ranks of jobs on this machine from their environment variables.

torchrun, Slurm, MPI and users' shells pass each rank its rank number and the world size in the
environment. The kernel shows only the environment with which a program was started, so variables
that the program sets later cannot be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echelon.host.identity import network_of
from echelon.host.procfs import read_text
from echelon.host.threads import children, descendants, program_of
from echelon.recorder.continuation import REPLACE

_MAX_WORLD = 1 << 18
_WATCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "echelon"})


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables that one kind of launcher uses to identify a rank."""

    name: str
    rank: str
    size: str
    local_rank: str
    job: tuple[str, ...]  # variables whose values differ between jobs


_LAUNCHERS = (
    _Launcher(
        "torch", "RANK", "WORLD_SIZE", "LOCAL_RANK",
        ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"),
    ),
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
    ),
    _Launcher("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("PMI_ID", "PMI_JOB_ID")),
    _Launcher(
        "Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_JOB_ID", "SLURM_STEP_ID")
    ),
)  # fmt: skip


_STANDBY = "echelon-standby"  # waits to become a rank, with the environment of one
_STANDBY_FILE = f"/memfd:{_STANDBY}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRank:
    """A process that is a rank of a job."""

    pid: int
    rank: int
    world_size: int
    local_rank: int
    launcher: str
    job: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    is_guessed: bool = False  # numbered by its place among the processes, not by its environment

    @property
    def is_whole_world_here(self) -> bool:
        """True if the environment shows that all ranks of the world are on this machine."""
        if self.environ.get("ECHELON_ON_LOSS") == REPLACE and not _is_on_loopback(self.environ):
            return False  # ranks of a node that connected later may have joined
        local = self.environ.get("LOCAL_WORLD_SIZE", "")
        return local.isdigit() and int(local) >= self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """The ranks that were found, and the number of processes whose environment cannot be read."""

    ranks: tuple[FoundRank, ...]
    num_denied: int = 0

    def jobs(self) -> dict[tuple[str, ...], list[FoundRank]]:
        """Return the ranks, grouped by job."""
        found: dict[tuple[str, ...], list[FoundRank]] = {}
        for one in self.ranks:
            found.setdefault(one.job, []).append(one)
        return found


def find_ranks(pids: Iterable[int] | None = None) -> Search:
    """Find the ranks among the given processes; None means all processes on this machine."""
    denied: list[int] = []
    found: dict[int, FoundRank] = {}
    for pid in _all_processes() if pids is None else pids:
        one = rank_of(pid, denied)
        if one is not None:
            found[pid] = one
    tops = [one for one in found.values() if not _is_helper(one, found)]
    tops = [one for one in tops if not _starts_ranks(one, tops)]
    return Search(ranks=tuple(sorted(_newest(tops), key=_order)), num_denied=len(denied))


def rank_of(pid: int, denied: list[int] | None = None) -> FoundRank | None:
    """Return the rank that a process's environment describes; None if it describes none."""
    refused: list[str] = []
    environ = environment(pid, refused)
    if "ECHELON_STANDBY" in environ and _name(pid) == _STANDBY:
        return None
    if refused and denied is not None:
        denied.append(pid)
    for launcher in _LAUNCHERS:
        rank, size = environ.get(launcher.rank, ""), environ.get(launcher.size, "")
        if rank.isdigit() and size.isdigit() and int(rank) < int(size) <= _MAX_WORLD:
            local = environ.get(launcher.local_rank, "")
            return FoundRank(
                pid=program_of(pid),
                rank=int(rank),
                world_size=int(size),
                local_rank=int(local) if local.isdigit() else 0,
                launcher=launcher.name,
                job=(
                    launcher.name,
                    environ.get("ECHELON_JOB_ID", size),  # the ranks of a world that grew differ
                    *(environ.get(name, "") for name in launcher.job),
                    *_network(pid, environ),
                ),
                environ=environ,
            )
    return None


def _name(pid: int) -> str:
    return read_text(f"/proc/{pid}/comm", "comm", []).strip()


def _network(pid: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a process's network namespace, or () if its MASTER_ADDR is not a loopback address.

    The namespace distinguishes jobs that use the same loopback address.
    """
    return (str(network_of(pid)),) if _is_on_loopback(environ) else ()


def _is_on_loopback(environ: Mapping[str, str]) -> bool:
    """Return whether the master address in an environment is a loopback address."""
    address = environ.get("MASTER_ADDR", "")
    return address in ("localhost", "::1") or address.startswith("127.")


def ranks_below(pid: int) -> Search:
    """Return the ranks of the job that a process belongs to or has started.

    If the process is a rank, all ranks of its job are returned. If the process is a launcher, the
    ranks below it in the process tree are returned. If the environment variables do not contain the
    rank numbers, the children of the process are numbered in the order of their pids.
    """
    own = rank_of(pid)
    if own is not None:
        search = find_ranks()
        return Search(
            ranks=tuple(one for one in search.ranks if one.job == own.job),
            num_denied=search.num_denied,
        )
    below = find_ranks(descendants(pid))
    if below.ranks:
        return below
    spawned = [child for child in sorted(children(pid)) if _is_spawned(child)]
    return Search(ranks=numbered(spawned if len(spawned) > 1 else [pid]))


def numbered(pids: Iterable[int]) -> tuple[FoundRank, ...]:
    """Return the given processes as ranks, numbered in the given order."""
    listed = list(pids)
    return tuple(
        FoundRank(
            pid=pid, rank=place, world_size=len(listed), local_rank=place, launcher="",
            job=("", str(listed[0])), is_guessed=True,
        )
        for place, pid in enumerate(listed)
    )  # fmt: skip


def environment(pid: int, denied: list[str]) -> dict[str, str]:
    """Return the environment with which a process was started; {} if it cannot be read.

    If the process was a standby before it became a rank, return the environment that the launcher
    sent to it.
    """
    text = read_text(f"/proc/{pid}/environ", "environ", denied)
    pairs = (entry.partition("=") for entry in text.split("\0"))
    found = {name: value for name, equals, value in pairs if equals}
    return (_of_former_standby(pid) or found) if "ECHELON_STANDBY" in found else found


def _of_former_standby(pid: int) -> dict[str, str]:
    """Return the environment that the launcher sent to a former standby; {} if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed by now
                if os.readlink(file).startswith(_STANDBY_FILE):  # noqa: PTH115 -- no path
                    told = json.loads(file.read_text())["environ"]
                    return {str(name): str(value) for name, value in told.items()}
    return {}


def _order(one: FoundRank) -> tuple[tuple[str, ...], int]:
    return one.job, one.rank


def _newest(ranks: list[FoundRank]) -> list[FoundRank]:
    """Return only the newest process of each rank."""
    latest: dict[tuple[tuple[str, ...], int], FoundRank] = {}
    for one in sorted(ranks, key=lambda one: (started_ticks(one.pid), one.pid)):
        latest[one.job, one.rank] = one
    return list(latest.values())


def _is_helper(one: FoundRank, found: Mapping[int, FoundRank]) -> bool:
    """Return whether a process is not a rank itself, but has inherited a rank's environment."""
    return any(
        above in found and (found[above].job, found[above].rank) == (one.job, one.rank)
        and found[above].pid != one.pid
        for above in ancestors(one.pid)
    )  # fmt: skip


def _starts_ranks(one: FoundRank, others: list[FoundRank]) -> bool:
    """Return whether a rank has itself started ranks, with a kind of launcher unlike its own."""
    below = {other.pid for other in others if other.launcher != one.launcher}
    return bool(below) and not below.isdisjoint(descendants(one.pid))


def ancestors(pid: int) -> list[int]:
    """Return the ancestors of a process, nearest first."""
    above: list[int] = []
    while pid > 1 and len(above) < 256:
        fields = read_text(f"/proc/{pid}/stat", "stat", []).rpartition(")")[2].split()
        if len(fields) < 2:
            break
        pid = int(fields[1])
        above.append(pid)
    return above


def is_watched(pid: int) -> bool:
    """Return whether an ancestor of a process is a launcher that ends the job if a rank fails."""
    commands = (read_text(f"/proc/{one}/cmdline", "cmdline", []) for one in ancestors(pid)[:4])
    return any(_runs_watcher(text.split("\0")) for text in commands)


def _runs_watcher(argv: Sequence[str]) -> bool:
    """Return whether a command line runs a launcher that ends the job if a rank fails.

    A word matches only if its last path component is the name of such a launcher.
    """
    return any(os.path.basename(word) in _WATCHERS for word in argv[:8])  # noqa: PTH119 -- any text


def started_ticks(pid: int) -> int:
    """Return a process's start time, in clock ticks since boot; 0 if the process has exited."""
    fields = read_text(f"/proc/{pid}/stat", "stat", []).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def _is_spawned(pid: int) -> bool:
    command = read_text(f"/proc/{pid}/cmdline", "cmdline", [])
    is_tracker = "resource_tracker" in command or "semaphore_tracker" in command
    return "python" in read_text(f"/proc/{pid}/maps", "maps", []) and not is_tracker


def _all_processes() -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != own]  # noqa: PTH208 -- names
