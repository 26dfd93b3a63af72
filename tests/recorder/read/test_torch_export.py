"""Incidents in torch's form: as torch writes it, and as torch's own reader understands it."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys

import pytest

from echelon import recorder as public
from echelon.errors import DumpFormatError
from echelon.recorder.format.schema import Flag, Identity
from echelon.recorder.read import read_ring
from echelon.recorder.read.dump import write_dump
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring


@pytest.fixture
def incident(tmp_path):
    """Write the dumps of ranks that each tell their story to their own recorder."""
    folder = tmp_path / "incident_0"
    folder.mkdir()

    def write(world_size, story):
        for rank in range(world_size):
            ring = Ring(
                tmp_path / f"ring_{rank}",
                Identity(rank=rank, world_size=world_size, mono_ns=1000, wall_ns=5000),
                num_operations=64,
                num_spans=4,
            )
            story(rank, Recorder(ring))
            write_dump(read_ring(ring.path), folder / f"rank_{rank}")
            ring.close()
        return folder

    return write


def call(recorder, group, operation, sequence, *, end="completed", **how):
    number = recorder.begin(group, operation, sequence=sequence, **how)
    if end != "scheduled":
        recorder.started(number)
    if end == "completed":
        recorder.completed(number)
    elif end == "failed":
        recorder.failed(number, TimeoutError("rank 1 did not come"))
    return number


def healthy(rank, recorder):
    world = recorder.group("world", range(4))
    pair = recorder.group("tp", (rank // 2 * 2, rank // 2 * 2 + 1))
    how = {"dtype": "bfloat16", "reduce_op": "sum"}
    for i in range(3):
        call(recorder, world, "all_reduce", 2 * i, shapes=((8, 4),), **how)
        call(recorder, world, "all_gather", 2 * i + 1, shapes=((8, 4),), dtype="float32")
        call(recorder, pair, "reduce_scatter", i, shapes=((8,),), **how)
    call(recorder, world, "broadcast", 6, shapes=((2,),), dtype="int64", root=1)
    call(recorder, world, "barrier", 7)


def load(path):
    return pickle.loads(path.read_bytes())


def test_there_is_a_file_for_each_rank(incident, tmp_path):
    files = public.export_torch(incident(4, healthy), tmp_path / "out")
    assert [path.name for path in files] == [f"nccl_trace_rank_{rank}" for rank in range(4)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [p.name for p in files]
    named = public.export_torch(tmp_path / "incident_0", tmp_path / "other", prefix="job_")
    assert [path.name for path in named] == [f"job_{rank}" for rank in range(4)]


def test_an_entry_is_as_torch_writes_it(incident, tmp_path):
    files = public.export_torch(incident(4, healthy), str(tmp_path / "out"))
    dump = load(files[2])
    assert dump["version"] == "2.10"
    assert dump["pg_config"] == {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
        "tp.2": {"name": "tp.2", "desc": "tp", "ranks": "[2, 3]"},
    }
    entry = dump["entries"][0]
    record = read_ring(tmp_path / "ring_2")
    created = int(record.operations[0]["created_mono_ns"])
    assert entry["frames"][0]["name"] == "call"
    assert entry["frames"][0]["filename"] == __file__
    assert entry["frames"][1]["name"] == "healthy"
    for name, value in {
        "record_id": 0,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": created + 4000,
        "input_sizes": [[8, 4]],
        "output_sizes": [[8, 4]],
        "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
    }.items():
        assert entry[name] == value, name
    assert dump["entries"][1]["output_sizes"] == [[32, 4]]
    assert dump["entries"][2]["output_sizes"] == [[4]]
    assert dump["entries"][2]["process_group"] == ("tp.2", "tp")
    assert dump["pg_status"]["0"] == {
        "last_enqueued_collective": 8,
        "last_started_collective": 8,
        "last_completed_collective": 8,
    }


def test_only_finished_operations_are_completed(incident, tmp_path):
    def story(rank, recorder):
        world = recorder.group("world", range(2))
        for i, end in enumerate(("completed", "failed", "started", "scheduled")):
            call(recorder, world, "all_reduce", i, end=end, shapes=((2,),), dtype="float32")

    entries = load(public.export_torch(incident(2, story), tmp_path / "out")[0])["entries"]
    assert [entry["state"] for entry in entries] == [
        "completed",
        "started",
        "started",
        "scheduled",
    ]
    done = [entry["time_discovered_completed_ns"] is not None for entry in entries]
    assert done == [True, False, False, False]
    assert [entry["retired"] for entry in entries] == [True, True, False, False]


def test_point_to_point_names_both_ends(incident, tmp_path):
    def story(rank, recorder):
        pair = recorder.group("pp", (0, 2))
        other = 2 - rank
        if rank == 1:
            return
        how = {"peer": other, "flags": Flag.P2P, "shapes": ((4,),), "dtype": "float32"}
        for kind in ("send", "recv") if rank == 0 else ("recv", "send"):
            number = recorder.begin(pair, kind, p2p_sequence=0, **how)
            recorder.completed(number)

    files = public.export_torch(incident(3, story), tmp_path / "out")
    names = [[entry["profiling_name"] for entry in load(path)["entries"]] for path in files]
    assert names == [["nccl:send 0->1", "nccl:recv 0<-1"], [], ["nccl:recv 1<-0", "nccl:send 1->0"]]
    entry = load(files[0])["entries"][1]
    assert (entry["is_p2p"], entry["p2p_seq_id"], entry["collective_seq_id"]) == (True, 2, 0)


def test_a_folder_without_dumps_is_an_error(tmp_path):
    with pytest.raises(DumpFormatError, match="no rank's dump"):
        public.export_torch(tmp_path, tmp_path / "out")
    (tmp_path / "rank_0").write_bytes(b"something else")
    with pytest.raises(DumpFormatError, match="not an echelon"):
        public.export_torch(tmp_path, tmp_path / "out")


def test_it_is_imported_only_when_it_is_used():
    code = (
        "import sys; from echelon import recorder; "
        "assert 'echelon.recorder.read.torch_export' not in sys.modules; "
        "recorder.export_torch; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing_of_ours"):
        _ = public.nothing_of_ours


def mismatched(rank, recorder):
    world = recorder.group("world", range(4))
    for i in range(3):
        call(recorder, world, "all_reduce", i, shapes=((8, 4),), dtype="float32")
    shape = (16, 4) if rank == 2 else (8, 4)
    call(recorder, world, "all_reduce", 3, end="failed", shapes=(shape,), dtype="float32")


READ = """
import pickle, sys
from torch.distributed.flight_recorder.fr_trace import main
main([sys.argv[1], "-o", sys.argv[2]])
_, database = pickle.load(open(sys.argv[2], "rb"))
for one in database.collectives:
    print("matched" if one.pass_check else "differs", one.collective_name, one.collective_seq_id)
print(len(database.ncclcalls), "calls")
"""


def torchfrtrace(folder) -> str:
    """Let torch's reader read a folder; return what it says, and what is in its database."""
    database = folder.with_name("database")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder), str(database)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.ranks
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
def test_torchs_own_reader_matches_a_healthy_job(incident, tmp_path):
    public.export_torch(incident(4, healthy), tmp_path / "out")
    said = torchfrtrace(tmp_path / "out")
    assert said.count("matched") == 8 + 2 * 3  # the world's, and those of two pairs
    assert "44 calls" in said
    assert "differs" not in said
    assert "Culprit" not in said


@pytest.mark.ranks
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
def test_torchs_own_reader_finds_a_mismatch(incident, tmp_path):
    public.export_torch(incident(4, mismatched), tmp_path / "out")
    said = torchfrtrace(tmp_path / "out")
    assert said.count("matched nccl:all_reduce") == 3
    assert "differs nccl:all_reduce 4" in said
    assert "Culprit rank 2" in said
    assert "SIZE_OR_SYNTAX_MISMATCH" in said
