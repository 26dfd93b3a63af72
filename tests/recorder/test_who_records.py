"""One process owns a ring: its children and programs without a launcher's folder do not record."""

from __future__ import annotations

import importlib.util
import signal
import stat

import pytest

from echelon.recorder.read import read_ring
from echelon.recorder.schema import Live, State
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
