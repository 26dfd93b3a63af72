"""Single probes: what they measure, what they call broken, and their deadline."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from echelon.launcher.doctor.probes import device
from echelon.launcher.doctor.probes.child import run_all
from echelon.launcher.doctor.probes.finding import Finding, State, Task
from echelon.launcher.doctor.probes.memory import LEAST_BYTES, judge
from echelon.launcher.doctor.probes.pair import Listener, new_token, probe_pair
from echelon.launcher.doctor.probes.storage import probe_storage
from tests.support.hosts import needs_hosts

_TOKEN = new_token()


def test_a_disk_is_written_and_nothing_is_left(tmp_path):
    found = probe_storage(str(tmp_path))
    assert found.state is State.WHOLE
    assert found.figures.keys() == {"write_s", "fsync_s"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.netns
@needs_hosts  # root, to mount
def test_a_full_disk_is_broken(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], check=True)
    try:
        found = probe_storage(str(tmp_path))
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert found.is_broken
    assert found.text == f"cannot write in {tmp_path}: No space left on device"


@pytest.mark.parametrize(("available", "is_broken"), [(LEAST_BYTES - 1, True), (1 << 33, False)])
def test_memory_for_one_rank_is_asked_for(available, is_broken):
    assert judge(available, 1 << 34).is_broken is is_broken


class _NVMLError(Exception):
    pass


def _nvml(*devices, init=lambda: None):
    """NVML as far as the probe uses it, for devices described by dictionaries."""

    def handle(index):
        if devices[index].get("lost"):
            raise _NVMLError("GPU is lost")
        return devices[index]

    def errors(one, kind, counter):
        assert (kind, counter) == (1, 0)  # uncorrected, since the driver was loaded
        if "errors" not in one:
            raise _NVMLError("Not Supported")
        return one["errors"]

    return SimpleNamespace(
        NVMLError=_NVMLError,
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=handle,
        nvmlDeviceGetTemperature=lambda one, _: one.get("celsius", 40),
        nvmlDeviceGetTotalEccErrors=errors,
        nvmlDeviceGetRemappedRows=lambda one: one.get("rows", (0, 0, 0, 0)),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda one: one.get("slowed", 0),
    )


@pytest.mark.parametrize(
    ("devices", "state", "said"),
    [
        ([], State.SKIPPED, "no GPU on this machine"),
        ([{"celsius": 71}, {}], State.WHOLE, "2 GPUs respond, 71 C at most"),
        ([{"errors": 0, "slowed": 0x40}], State.WHOLE, "GPU 0: thermal slowdown"),
        ([{}, {"lost": True}], State.BROKEN, "GPU 1: GPU is lost"),
        ([{"errors": 3}], State.BROKEN, "GPU 0: 3 uncorrected memory errors"),
        ([{"rows": (0, 1, 1, 0)}], State.BROKEN, "waiting to be remapped"),
        ([{"rows": (0, 1, 0, 1)}], State.BROKEN, "remapping of a bad memory row failed"),
    ],
)
def test_what_is_broken_of_a_device(devices, state, said):
    found = device.judge(_nvml(*devices))
    assert (found.state, said in found.text) == (state, True), found


def test_devices_that_cannot_be_asked_are_said_to_be_unchecked(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device.probe_device().text.startswith("pynvml is not installed")

    def fail():
        raise _NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", _nvml(init=fail))
    found = device.probe_device()
    assert (found.state, "Driver Not Loaded" in found.text) == (State.SKIPPED, True)


def test_a_pair_is_measured_both_ways_with_its_clocks():
    with contextlib.closing(Listener(_TOKEN)) as listener:
        task = Task(probe="network", address="127.0.0.1", port=listener.port, token=_TOKEN)
        found = probe_pair(task)
    assert found.state is State.WHOLE, found
    for name in ("latency_s", "sent_bytes_per_s", "received_bytes_per_s"):
        assert found.figures[name] > 0
    assert abs(found.figures["ahead_s"]) < 1  # one clock


def test_a_listener_answers_no_client_without_its_token():
    with contextlib.closing(Listener(_TOKEN)) as listener:
        task = Task(probe="network", address="127.0.0.1", port=listener.port, token=new_token())
        found = probe_pair(task)
    assert found.is_broken, found


def test_a_port_that_is_closed_is_broken():
    with contextlib.closing(Listener(_TOKEN)) as listener:
        task = Task(probe="network", address="127.0.0.1", port=listener.port, peer="b")
    found = probe_pair(task)
    assert found.text.startswith("cannot reach b (127.0.0.1 port "), found
    assert found.is_broken


@pytest.mark.ranks
def test_probes_run_at_the_same_time_in_processes_of_their_own(tmp_path):
    tasks = [Task(probe="storage", folder=str(tmp_path)), Task(probe="memory"), Task(probe="new")]
    found = run_all(tasks)
    assert [one.probe for one in found] == ["storage", "memory", "new"]
    assert [one.state for one in found] == [State.WHOLE, State.WHOLE, State.SKIPPED]


_STOPS = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.ranks
def test_a_probe_that_does_not_answer_by_its_deadline_is_broken():
    """A stopped process stands for one that the kernel holds: neither answers."""
    task = Task(probe="storage", deadline_s=1.0)
    (found,) = run_all([task], [sys.executable, "-c", _STOPS])
    assert found.is_broken
    assert found.text == "no answer within 1 s"


@pytest.mark.ranks
def test_a_killed_probe_is_reaped_at_the_latest_when_the_process_exits():
    """Python warns of a child that nothing has waited for."""
    program = f"""
import sys
from echelon.launcher.doctor.probes.child import _left, run_all
from echelon.launcher.doctor.probes.finding import Task
task = Task(probe="storage", deadline_s=0.1)
while not _left:  # a child that has ended by the time of the first look is not left
    run_all([task], [sys.executable, "-c", {_STOPS!r}])
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert done.stderr == ""


@pytest.mark.ranks
def test_a_probe_that_dies_is_broken():
    (found,) = run_all([Task(probe="memory")], [sys.executable, "-c", "print('x')"])
    assert found.text == "the probe ended without a result"


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", '{"probe": 1}', '{"probe": "x"}',
        '{"probe": "x", "state": "odd", "text": ""}',
        '{"probe": "x", "state": "whole", "text": "", "more": 1}',
        '{"probe": "x", "state": "whole", "text": "", "figures": {"a": "b"}}',
        '{"probe": "x", "state": "whole", "text": "", "figures": [1]}',
    ],
)  # fmt: skip
def test_a_malformed_finding_is_refused(text):
    with pytest.raises(ValueError, match=r".*"):
        Finding.unpack(text)


def test_findings_and_tasks_travel_as_text():
    finding = Finding(probe="x", state=State.BROKEN, text="t", figures={"a_s": 1.5})
    assert Finding.unpack(finding.pack()) == finding
    task = Task(probe="x", deadline_s=3, folder="/f", address="a", port=5, peer="p", token="t")
    assert Task.unpack(task.pack()) == task
