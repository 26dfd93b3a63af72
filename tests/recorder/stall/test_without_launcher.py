"""Programs that no launcher started: ECHELON_RECORD_DIR, and the stall rule from inside."""

from __future__ import annotations

import json
import os

from echelon.recorder.format.schema import Identity, Live, State
from echelon.recorder.read import read
from echelon.recorder.stall.inside import _can_join
from echelon.recorder.write.setup.place import claim_attempt
from tests.recorder.conftest import wait_until

ALONE = {"ECHELON_RANK_DIR": ""}


def test_a_record_folder_gets_a_new_attempt_each_time(program, tmp_path):
    for attempt in range(2):
        one = program(
            "from echelon.recorder import step; step(5)", **ALONE, ECHELON_RECORD_DIR=str(tmp_path)
        )
        code, out, err = one.end()
        assert (code, out, err) == (0, "", "")
        record = read(tmp_path / "rank_3" / f"attempt_{attempt}" / "ring")
        assert record.identity.attempt == attempt
        assert record.identity.rank == 3
        assert record.live[Live.STEP] == 6
        assert record.live[Live.CLOSED] == 1


def test_programs_that_it_starts_do_not_record(program, tmp_path):
    one = program(
        """
import subprocess, sys
from echelon.recorder import step
step(5)
child = "from echelon.recorder import step; step(77)"
subprocess.run([sys.executable, "-c", child], check=True)
""",
        **ALONE,
        ECHELON_RECORD_DIR=str(tmp_path / "here"),
    )
    assert one.end()[0] == 0
    assert [path.name for path in (tmp_path / "here" / "rank_3").iterdir()] == ["attempt_0"]


def test_a_ring_elsewhere_comes_home_at_the_end(program, tmp_path):
    one = program(
        "from echelon.recorder import step; step(5)",
        **ALONE,
        ECHELON_RECORD_DIR=str(tmp_path / "here"),
        ECHELON_RING_DIR=str(tmp_path / "local"),
    )
    assert one.end()[0] == 0
    ring = tmp_path / "here" / "rank_3" / "attempt_0" / "ring"
    assert not ring.is_symlink()
    assert read(ring).live[Live.CLOSED] == 1
    assert list((tmp_path / "local").iterdir()) == []


def test_a_ring_that_cannot_come_home_costs_the_program_nothing(program, tmp_path):
    """No file may grow, as on a full disk: the ring stays, and is read through its link."""
    one = program(
        """
        import resource
        from echelon.recorder import step
        step(5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        """,
        **ALONE,
        ECHELON_RECORD_DIR=str(tmp_path / "here"),
        ECHELON_RING_DIR=str(tmp_path / "local"),
    )
    code, _, err = one.end()
    assert code == 0
    assert [line for line in err.splitlines() if "rings are in" not in line] == []
    ring = tmp_path / "here" / "rank_3" / "attempt_0" / "ring"
    assert ring.is_symlink()
    assert (read(ring).live[Live.CLOSED], read(ring).live[Live.STEP]) == (1, 6)


def test_a_stall_is_kept_once_with_stacks_and_two_looks(program, tmp_path):
    one = program(
        """
import sys, threading
from echelon.recorder.current import current

def stuck_here(recorder):
    number = recorder.begin(recorder.group("world", (3, 4)), "all_reduce", sequence=12)
    recorder.started(number)
    input()
    recorder.completed(number)

recorder = current()
recorder.mark_initialized()
stuck_here(recorder)
print("goes on", flush=True)
input()
""",
        **ALONE,
        ECHELON_RECORD_DIR=str(tmp_path),
        ECHELON_STALL_TIMEOUT="0.3",
        WORLD_SIZE="2",
    )
    incident = tmp_path / "dump" / "incident_0"
    wait_until((incident / "rank_3").exists, "an incident")
    assert (tmp_path / "dump" / "latest").readlink().name == "incident_0"
    record = read(incident / "rank_3")
    assert record.host.alive
    assert "stuck_here" in record.host.stacks
    assert "stuck_here" in record.host.later_stacks
    assert record.host.later_gap_s >= 2.0
    assert record.host.later_recorded == 0
    assert record.operations[0]["state"] == State.STARTED
    told = json.loads((incident / "incident.json").read_text())
    assert told["kind"] == "stall"
    assert told["reason"] == "rank 3 has an operation pending for 0.3 s"
    assert told["world_size"] == 2
    assert not (tmp_path / "dump" / "incident_1").exists()
    assert one.process.stdin is not None
    one.process.stdin.write("\n")
    one.process.stdin.flush()
    one.wait_for("goes on")
    one.process.stdin.write("\n")
    code, _, err = one.end()
    assert code == 0
    assert f"echelon: {told['reason']}; see {incident}" in err


def stalled(program, folder, rank, **environ):
    """Start a rank that records into `folder` and stalls at once."""
    return program(
        """
from echelon.recorder.current import current
recorder = current()
recorder.mark_initialized()
recorder.begin(recorder.group("world", (0, 1)), "barrier", sequence=0)
input()
""",
        **ALONE,
        ECHELON_RECORD_DIR=str(folder),
        ECHELON_STALL_TIMEOUT="0.3",
        WORLD_SIZE="2",
        RANK=str(rank),
        **environ,
    )


def test_ranks_that_stall_together_share_an_incident(program, tmp_path):
    ranks = [stalled(program, tmp_path, rank) for rank in (0, 1)]
    files = [tmp_path / "dump" / "incident_0" / f"rank_{rank}" for rank in (0, 1)]
    wait_until(lambda: all(file.exists() for file in files), "both dumps")
    assert [read(file).identity.rank for file in files] == [0, 1]
    assert {path.name for path in files[0].parent.iterdir()} == {
        "incident.json",
        "rank_0",
        "rank_1",
    }
    assert [one.process.poll() for one in ranks] == [None, None]


def test_another_attempt_never_joins_an_incident(program, tmp_path):
    first = stalled(program, tmp_path, 0)
    wait_until((tmp_path / "dump" / "incident_0" / "rank_0").exists, "the first")
    first.process.kill()
    stalled(program, tmp_path, 0)  # another attempt of rank 0 ...
    wait_until((tmp_path / "dump" / "incident_1" / "rank_0").exists, "the second")
    claim_attempt(tmp_path, 1)  # ... and of rank 1, whose first one never stalled
    stalled(program, tmp_path, 1)
    wait_until((tmp_path / "dump" / "incident_1" / "rank_1").exists, "its other rank")
    assert not (tmp_path / "dump" / "incident_0" / "rank_1").exists()


def test_with_an_agent_no_thread_watches(program):
    one = program(
        """
import threading
from echelon.recorder import step
step()
print([thread.name for thread in threading.enumerate() if thread.name.startswith("echelon")])
"""
    )
    assert one.end()[1].strip() == "['echelon-heartbeat']"


def test_an_old_folder_without_a_description_is_not_joined(tmp_path):
    old, new = tmp_path / "incident_0", tmp_path / "incident_1"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    assert not _can_join(old, Identity(rank=0))
    assert _can_join(new, Identity(rank=0))
