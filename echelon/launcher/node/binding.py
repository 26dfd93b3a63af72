"""Implement `--numa-binding`: choose the processors that each worker on this node may use.

    node          all processors of the worker's NUMA node
    socket        all processors of the socket to which the NUMA node belongs
    exclusive     an even share of the NUMA node's cores, for this worker alone
    core-complex  a group of the NUMA node's cores that share a last-level cache

The worker with local rank r is placed on the NUMA node of the r-th visible GPU. If there are no
GPUs, or more workers than GPUs, workers are spread evenly over the NUMA nodes. Only processors that
the launcher itself is allowed to use are assigned. A machine that does not report its NUMA nodes or
caches is treated as if it had a single node or cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from echelon.errors import LaunchError
from echelon.host.accelerators import numa_nodes_of_gpus

MODES = ("node", "socket", "exclusive", "core-complex")
_SYS = Path("/sys")


def bind(mode: str, num_workers: int, environ: Mapping[str, str]) -> list[frozenset[int]]:
    """Return each worker's processors, in local-rank order.

    Raises:
        LaunchError: there are too few processors for the requested binding.
    """
    gpus = numa_nodes_of_gpus(environ)
    return Topology(_SYS, frozenset(os.sched_getaffinity(0))).bind(mode, num_workers, gpus)


def describe(mode: str, processors: Sequence[frozenset[int]]) -> str:
    """Return a line that shows the user which processors each worker may use."""
    if len(processors) > 1 and len(set(processors)) == 1:
        shown = f"only one choice on this machine: all ranks get processors {runs(processors[0])}"
    else:
        each = ", ".join(f"{rank}: {runs(cpus)}" for rank, cpus in enumerate(processors))
        shown = f"processors by local rank: {each}"
    return f"--numa-binding {mode}: {shown}"


class Topology:
    """A machine's processors as described in /sys. Only processors in `allowed` are used."""

    def __init__(self, sys: Path, allowed: frozenset[int]) -> None:
        self._cpu = sys / "devices/system/cpu"
        self._node = sys / "devices/system/node"
        self._allowed = allowed

    def bind(self, mode: str, num_workers: int, gpus: Sequence[int]) -> list[frozenset[int]]:
        """Return each worker's processors, in local-rank order.

        Args:
            gpus: the NUMA node of each GPU.

        Raises:
            LaunchError: there are too few processors for the requested binding.
        """
        nodes = self._nodes()
        homes = self._homes(num_workers, sorted(nodes), gpus)
        if mode == "node":
            return [nodes[home] for home in homes]
        if mode == "socket":
            return [self._socket(nodes[home], nodes) for home in homes]
        split = self._cores if mode == "exclusive" else self._complexes
        return [
            self._part(mode, split(nodes[home]), homes[:rank].count(home), homes.count(home))
            for rank, home in enumerate(homes)
        ]

    def _nodes(self) -> dict[int, frozenset[int]]:
        """Return the usable processors of each NUMA node.

        Nodes without usable processors are left out.
        """
        found = {}
        for folder in self._node.glob("node[0-9]*"):
            cpus = _numbers(folder / "cpulist") & self._allowed
            if cpus:
                found[int(folder.name.removeprefix("node"))] = cpus
        return found or {0: self._allowed}

    def _homes(self, num_workers: int, nodes: Sequence[int], gpus: Sequence[int]) -> list[int]:
        if len(gpus) >= num_workers and set(gpus[:num_workers]) <= set(nodes):
            return list(gpus[:num_workers])
        return [nodes[rank * len(nodes) // num_workers] for rank in range(num_workers)]

    def _socket(self, cpus: frozenset[int], nodes: Mapping[int, frozenset[int]]) -> frozenset[int]:
        place = self._package(min(cpus))
        alike = [other for other in nodes.values() if self._package(min(other)) == place]
        return frozenset().union(*alike)

    def _package(self, cpu: int) -> str:
        try:
            return (self._cpu / f"cpu{cpu}/topology/physical_package_id").read_text().strip()
        except OSError:
            return ""

    def _part(
        self, mode: str, groups: Sequence[frozenset[int]], index: int, count: int
    ) -> frozenset[int]:
        """Return the processors of one worker: one or more of the `groups` on its NUMA node.

        Raises:
            LaunchError: in exclusive mode, there are fewer cores than workers.
        """
        if mode == "core-complex":  # if there are too few, workers share them
            return groups[index % len(groups)]
        if len(groups) < count:
            raise LaunchError(
                f"--numa-binding exclusive: {count} workers share a NUMA node that has only "
                f"{len(groups)} usable cores"
            )
        more, rest = divmod(len(groups), count)
        first = index * more + min(index, rest)
        return frozenset().union(*groups[first : first + more + (index < rest)])

    def _cores(self, cpus: frozenset[int]) -> list[frozenset[int]]:
        return self._grouped(
            cpus, lambda cpu: _numbers(self._cpu / f"cpu{cpu}/topology/thread_siblings_list")
        )

    def _complexes(self, cpus: frozenset[int]) -> list[frozenset[int]]:
        """Return the groups of processors that share a last-level cache, largest group first."""
        found = self._grouped(cpus, self._sharing_cache)
        return sorted(found, key=lambda group: (-len(group), min(group)))

    def _sharing_cache(self, cpu: int) -> frozenset[int]:
        levels = {
            int((folder / "level").read_text()): _numbers(folder / "shared_cpu_list")
            for folder in (self._cpu / f"cpu{cpu}/cache").glob("index[0-9]*")
            if (folder / "type").read_text().strip() != "Instruction"
        }
        return levels[max(levels)] if levels else frozenset()

    def _grouped(
        self, cpus: frozenset[int], siblings: Callable[[int], frozenset[int]]
    ) -> list[frozenset[int]]:
        """Group processors that are siblings; sort the groups by their lowest processor number."""
        groups: dict[int, set[int]] = {}
        for cpu in sorted(cpus):
            groups.setdefault(min(siblings(cpu) or {cpu}), set()).add(cpu)
        return [frozenset(group) for group in groups.values()]


def _numbers(path: Path) -> frozenset[int]:
    """Parse a file in the kernel's list format, such as `0-3,8`. A missing file counts as empty."""
    try:
        text = path.read_text().strip()
    except OSError:
        return frozenset()
    numbers: set[int] = set()
    for span in text.split(",") if text else []:
        first, dash, last = span.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(numbers)


def runs(numbers: frozenset[int]) -> str:
    """Format numbers in the kernel's list format, such as `0-3,8`."""
    text: list[str] = []
    start = last = -2
    for number in sorted(numbers):
        if number != last + 1:
            start = number
            text.append(str(number))
        else:
            text[-1] = f"{start}-{number}"
        last = number
    return ",".join(text)
