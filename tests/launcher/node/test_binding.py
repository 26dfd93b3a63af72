"""Which processors workers get, on machines made of files; and which GPU each worker sees."""

from __future__ import annotations

import pytest

from echelon.errors import LaunchError
from echelon.host.accelerators import num_intel, num_nvidia, numa_nodes_of_gpus, visible_to
from echelon.launcher.node.binding import Topology, describe, runs


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path):
    """Two sockets of two NUMA nodes of two cores of two threads; a cache for each core."""
    cpu, node = "devices/system/cpu", "devices/system/node"
    files = {}
    for number in range(4):
        files[f"{node}/node{number}/cpulist"] = (
            f"{2 * number}-{2 * number + 1},{8 + 2 * number}-{9 + 2 * number}"
        )
    for number in range(16):
        core = number % 8
        siblings = f"{core},{core + 8}"
        files[f"{cpu}/cpu{number}/topology/physical_package_id"] = core // 4
        files[f"{cpu}/cpu{number}/topology/thread_siblings_list"] = siblings
        files[f"{cpu}/cpu{number}/cache/index0/level"] = 1
        files[f"{cpu}/cpu{number}/cache/index0/type"] = "Data"
        files[f"{cpu}/cpu{number}/cache/index0/shared_cpu_list"] = number
        files[f"{cpu}/cpu{number}/cache/index3/level"] = 3
        files[f"{cpu}/cpu{number}/cache/index3/type"] = "Unified"
        files[f"{cpu}/cpu{number}/cache/index3/shared_cpu_list"] = siblings
    write(tmp_path, files)
    return lambda allowed=frozenset(range(16)): Topology(tmp_path, frozenset(allowed))


@pytest.mark.parametrize(
    ("mode", "num_workers", "gpus", "expected"),
    [
        ("node", 4, [], ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("node", 2, [], ["0-1,8-9", "4-5,12-13"]),
        ("node", 2, [3, 0], ["6-7,14-15", "0-1,8-9"]),
        ("node", 4, [3, 0], ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("socket", 2, [], ["0-3,8-11", "4-7,12-15"]),
        ("socket", 2, [1, 1], ["0-3,8-11", "0-3,8-11"]),
        ("exclusive", 8, [], ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"]),
        ("exclusive", 3, [0, 2, 2], ["0-1,8-9", "4,12", "5,13"]),
        ("core-complex", 2, [2, 2], ["4,12", "5,13"]),
        ("core-complex", 3, [2, 2, 2], ["4,12", "5,13", "4,12"]),
    ],
)
def test_each_binding_gives_each_worker_its_processors(machine, mode, num_workers, gpus, expected):
    assert [runs(cpus) for cpus in machine().bind(mode, num_workers, gpus)] == expected


def test_only_what_the_launcher_may_use_is_handed_out(machine):
    allowed = {0, 1, 4}
    bound = machine(allowed).bind("node", 2, [])
    assert [runs(cpus) for cpus in bound] == ["0-1", "4"]
    assert runs(machine(allowed).bind("core-complex", 1, [0])[0]) == "0"


def test_too_few_cores_for_all_is_one_line(machine):
    with pytest.raises(LaunchError, match="3 workers share a NUMA node that has only 2 usable"):
        machine().bind("exclusive", 3, [1, 1, 1])


def test_a_machine_that_tells_nothing_counts_as_one_place(tmp_path):
    bound = Topology(tmp_path, frozenset({0, 1})).bind("node", 2, [])
    assert bound == [frozenset({0, 1})] * 2
    assert "only one choice on this machine: all ranks get processors 0-1" in describe(
        "node", bound
    )


def test_gpus_lie_where_the_bus_says(tmp_path):
    gpus = {"0000:1b:00.0": 0, "0000:dc:00.0": 1, "0000:e0:00.0": -1}
    for address, node in gpus.items():
        write(tmp_path, {
            f"proc/driver/nvidia/gpus/{address}/information": f"Bus Location: \t {address.upper()}",
            f"sys/bus/pci/devices/{address}/numa_node": node,
        })  # fmt: skip
    places = (tmp_path / "proc", tmp_path / "sys")
    assert numa_nodes_of_gpus({}, *places) == [0, 1, 0]
    assert numa_nodes_of_gpus({"CUDA_VISIBLE_DEVICES": "1,0"}, *places) == [1, 0]
    assert numa_nodes_of_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8a"}, *places) == []


def test_gpus_are_counted_as_a_worker_would(tmp_path):
    write(tmp_path, {f"nvidia{number}": "" for number in range(4)} | {"nvidiactl": ""})
    assert num_nvidia({}, tmp_path) == 4
    assert num_nvidia({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path) == 2
    assert num_nvidia({"CUDA_VISIBLE_DEVICES": "0,-1,3"}, tmp_path) == 1
    write(
        tmp_path,
        {"drm/renderD128/device/vendor": "0x8086", "drm/renderD129/device/vendor": "0x10de"},
    )
    assert num_intel(tmp_path / "drm") == 1


def test_a_virtual_local_rank_sees_its_own_gpu():
    assert visible_to(3, {}) == "3"
    assert visible_to(1, {"CUDA_VISIBLE_DEVICES": "4, 5"}) == "5"
    with pytest.raises(ValueError, match="no GPU for local rank 2"):
        visible_to(2, {"CUDA_VISIBLE_DEVICES": "4,5"})
