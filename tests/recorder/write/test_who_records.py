"""One process owns a ring: its children and programs without a launcher's folder do not record."""

from __future__ import annotations

import importlib.util
import signal
import stat

import pytest

from echelon.recorder.format.schema import Live, State
from echelon.recorder.read import LiveRing, read_ring
from tests.recorder.conftest import span_names

RECORD = """
from echelon.recorder import span, step
from echelon.recorder.current import current
"""


def test_a_ring_is_private_to_its_owner(program):
    one = program(RECORD + "current(); print('ready', flush=True); input()")
    one.wait_for("ready")
    assert stat.S_IMODE(one.rank_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(one.ring.stat().st_mode) == 0o600


def test_the_identity_is_the_environments(program):
    one = program(
        RECORD + "current()",
        WORLD_SIZE="8", LOCAL_RANK="1", ECHELON_ATTEMPT="2", ECHELON_JOB_ID="nightly",
        ECHELON_RECORDER_SIZE="16",
    )  # fmt: skip
    assert one.end()[0] == 0
    identity = read_ring(one.ring).identity
    assert (identity.rank, identity.local_rank, identity.world_size) == (3, 1, 8)
    assert (identity.attempt, identity.job_id, identity.pid) == (2, "nightly", one.process.pid)
    assert identity.pid_start_ticks > 0
    assert identity.mono_ns > 0
    assert identity.wall_ns > 0
    assert identity.settings["recorder_size"] == 16


@pytest.mark.parametrize("environ", [{"ECHELON_RANK_DIR": ""}, {"ECHELON_RECORDER_SIZE": "0"}])
def test_nothing_is_recorded_unless_asked(program, environ):
    one = program(
        RECORD
        + """
from echelon.recorder import watch
with span("compute"):
    step()
print(list(watch([1, 2])), current())
import threading
print([thread.name for thread in threading.enumerate()])
""",
        **environ,
    )
    code, out, err = one.end()
    assert (code, err) == (0, "")
    assert out.split("\n")[:2] == ["[1, 2] None", "['MainThread']"]
    assert not one.rank_dir.exists()


def test_a_size_that_is_no_number_counts_as_not_given(program):
    one = program(RECORD + "current()", ECHELON_RECORDER_SIZE="many")
    assert one.end()[0] == 0
    assert read_ring(one.ring).identity.settings["recorder_size"] == 4096


def test_a_second_process_that_finds_the_ring_does_not_record(program):
    one = program(
        RECORD
        + """
import os, subprocess, sys
step(5)
child = "from echelon.recorder import step; step(77)"
subprocess.run([sys.executable, "-c", child], check=True)
"""
    )
    code, _, err = one.end()
    assert (code, err) == (0, "")
    record = read_ring(one.ring)
    assert record.live[Live.STEP] == 6
    assert record.identity.pid == one.process.pid


CHILDREN = (
    RECORD
    + """
import multiprocessing

def work(queue):
    step(77)
    with span("in a child"):
        queue.put(current() is None)

if __name__ == "__main__":
    step(5)
    context = multiprocessing.get_context({method!r})
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    assert queue.get()
    child.join()
    assert child.exitcode == 0
    with span("in the parent"):
        pass
"""
)


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_do_not_record(program, method):
    one = program(CHILDREN.format(method=method))
    code, _, err = one.end()
    assert code == 0, err
    record = read_ring(one.ring)
    assert record.live[Live.STEP] == 6
    assert span_names(record) == ["in the parent"]
    assert record.live[Live.CLOSED] == 1


def test_a_forked_childs_end_is_not_the_ranks(program):
    one = program(
        RECORD
        + """
import os, sys
recorder = current()
with span("outside"):
    pid = os.fork()
    if pid == 0:
        step(77)
        raise KeyError("only in the child")
    os.waitpid(pid, 0)
    print("the child has ended", flush=True)
    input()
"""
    )
    one.wait_for("the child has ended")
    record = read_ring(one.ring)
    assert record.last_words is None
    assert record.live[Live.CLOSED] == 0
    assert record.live[Live.STEP] == 0
    assert len(record.open_spans) == 1


@pytest.mark.ranks
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
def test_workers_of_a_torch_loader_do_not_record(program):
    one = program(
        RECORD
        + """
import torch.utils.data
from echelon.recorder import watch

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        step(77)
        with span("in a worker"):
            return index * index

if __name__ == "__main__":
    step(5)
    for method in ("fork", "spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=2, num_workers=1, multiprocessing_context=method
        )
        assert [batch.tolist() for batch in watch(loader)] == [[0, 1], [4, 9]]
"""
    )
    code, _, err = one.end()
    assert code == 0, err
    record = read_ring(one.ring)
    assert record.live[Live.STEP] == 6
    assert span_names(record) == ["data_wait"] * 9  # two batches and the end, three times


def test_a_killed_ranks_last_operations_are_kept(program):
    one = program(
        RECORD
        + """
recorder = current()
group = recorder.group("world", (2, 3))
for i in range(10):
    number = recorder.begin(group, "all_reduce", sequence=i, dtype="float32", shapes=((4,),))
    recorder.started(number)
    if i < 9:
        recorder.completed(number)
print("inside", flush=True)
input()
"""
    )
    one.wait_for("inside")
    one.process.send_signal(signal.SIGKILL)
    assert one.end()[0] == -signal.SIGKILL
    record = read_ring(one.ring)
    states = record.operations["state"].tolist()
    assert states == [State.COMPLETED] * 9 + [State.STARTED]
    assert record.strings[record.operations[9]["operation"]] == "all_reduce"
    assert record.live[Live.CLOSED] == 0
    assert record.warnings == ()


def test_the_next_program_of_a_worker_records_once_the_first_has_ended(program, tmp_path):
    first = program(RECORD + "step(5)")
    assert first.end()[0] == 0
    second = program(RECORD + "step(77)", ECHELON_RANK_DIR=str(first.rank_dir))
    assert second.end()[::2] == (0, "")
    assert read_ring(first.ring).live[Live.STEP] == 78
    assert read_ring(first.rank_dir / "ring.1").live[Live.STEP] == 6
    assert read_ring(first.ring).identity.pid == second.process.pid


def test_a_reader_follows_to_the_next_programs_ring(program):
    first = program(RECORD + "step(5)")
    assert first.end()[0] == 0
    live = LiveRing(first.ring)
    second = program(RECORD + "step(77)", ECHELON_RANK_DIR=str(first.rank_dir))
    assert second.end()[0] == 0
    live.sight(3)
    assert live.words()[Live.STEP] == 78
    live.close()


RANKS = """
import multiprocessing, os, sys
from echelon.recorder import span, step
from echelon.recorder.current import current, record_as_rank

def work(rank):
    assert current() is None
    record_as_rank(rank, 2)
    record_as_rank(rank, 2)
    step(rank)
    assert current().identity.rank == rank
    if rank == 1:
        ctx = multiprocessing.get_context("fork")  # its own children do not
        child = ctx.Process(target=lambda: sys.exit(current() is not None))
        child.start()
        child.join()
        assert child.exitcode == 0

if __name__ == "__main__":
    ranks = [multiprocessing.get_context("spawn").Process(target=work, args=(r,)) for r in (0, 1)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    print([one.exitcode for one in ranks])
"""


@pytest.mark.ranks
@pytest.mark.parametrize("parent_records", [False, True])
@pytest.mark.parametrize("variable", ["ECHELON_RANK_DIR", "ECHELON_RECORD_DIR"])
def test_ranks_that_multiprocessing_started_record_themselves(
    program, tmp_path, parent_records, variable
):
    source = (
        RANKS.replace("    ranks = [", "    step(9)\n    ranks = [") if parent_records else RANKS
    )
    folder = tmp_path / "records"
    one = program(source, **{"ECHELON_RANK_DIR": "", variable: str(folder)})
    code, out, err = one.end()
    assert (code, out) == (0, "[0, 0]\n"), err
    found = {}
    for path in folder.glob("rank_*/attempt_*/ring"):
        identity = read_ring(path).identity
        if identity.pid != one.process.pid:
            found[identity.rank] = (identity.world_size, read_ring(path).live[Live.STEP])
    assert found == {0: (2, 1), 1: (2, 2)}
