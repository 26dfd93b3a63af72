"""What a stack says, on stacks of real programs: torch 2.13 on Gloo, read by py-spy."""

from __future__ import annotations

import pytest

from echelon.analysis.activity import Doing, read_activity
from echelon.analysis.activity.reader import read_frames
from echelon.analysis.evidence.stacks.frames import Frame
from tests.analysis.activity.recorded import FOLDER, recorded

_DOES = {
    "all_reduce": (Doing.COLLECTIVE, 23),
    "async_dcp": (Doing.LOCK, 174),  # its checkpoint's thread is in the collective
    "barrier": (Doing.COLLECTIVE, 72),
    "compile": (Doing.COMPILING, 122),
    "compiled_ddp": (Doing.BACKWARD, 168),
    "dcp_save": (Doing.COLLECTIVE, 91),
    "ddp": (Doing.BACKWARD, 17),
    "event": (Doing.LOCK, 143),
    "flock": (Doing.LOCK, 157),
    "fsdp2": (Doing.COLLECTIVE, 48),
    "functional": (Doing.COLLECTIVE, 29),
    "gather_object": (Doing.COLLECTIVE, 77),
    "importing": (Doing.IMPORTING, 2),
    "inductor": (Doing.COMPILING, 136),
    "join": (Doing.LOCK, 145),
    "loader0": (Doing.LOADING, 97),
    "loader2": (Doing.LOADING, 101),
    "loader2t": (Doing.LOADING, 103),
    "lock": (Doing.LOCK, 139),
    "p2p": (Doing.COLLECTIVE, 63),
    "pipelining": (Doing.COLLECTIVE, 57),
    "q": (Doing.LOCK, 141),
    "recv": (Doing.NETWORK, 149),
    "rendezvous": (Doing.MEETING, 82),
    "sleep": (Doing.USER, 11),
    "store_wait": (Doing.STORE, 86),
    "sub": (Doing.CHILD, 147),
    "tensor_parallel": (Doing.COLLECTIVE, 39),
    "torch_save": (Doing.CHECKPOINT, 113),
    "work_wait": (Doing.COLLECTIVE, 68),
}


def test_every_recorded_stack_is_asked_for():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(_DOES)


@pytest.mark.parametrize("name", _DOES)
def test_a_real_stack_is_read(name):
    one = recorded(name)
    activity = read_activity(one.stacks, one.native)
    doing, line = _DOES[name]
    assert (activity.doing, activity.line and activity.line.line) == (doing, line), activity
    assert activity.by


_BY_C = {"flock", "lock", "recv", "store_wait", "work_wait"}


@pytest.mark.parametrize("name", sorted(set(_DOES) - _BY_C))
def test_most_need_no_c_frames(name):
    assert read_activity(recorded(name).stacks).doing is _DOES[name][0]


@pytest.mark.parametrize("name", sorted(_BY_C))
def test_a_wait_in_c_on_the_users_own_line_is_user_code_without_c_frames(name):
    assert read_activity(recorded(name).stacks).doing is Doing.USER


_SITE = "/venv/lib/python3.11/site-packages/"


@pytest.mark.parametrize(
    ("path", "function", "doing"),
    [
        ("datasets/arrow_dataset.py", "__getitem__", Doing.LOADING),
        ("datasets/iterable_dataset.py", "__iter__", Doing.LOADING),
        ("webdataset/tariterators.py", "url_opener", Doing.LOADING),
        ("nvidia/dali/pipeline.py", "run", Doing.LOADING),
        ("accelerate/data_loader.py", "__iter__", Doing.LOADING),
        ("lightning/pytorch/loops/fetchers.py", "__next__", Doing.LOADING),
        ("safetensors/torch.py", "save_file", Doing.CHECKPOINT),
        ("torch/distributed/checkpoint/filesystem.py", "_write_item", Doing.CHECKPOINT),
        ("s3fs/core.py", "_put_file", Doing.CHECKPOINT),
        ("google/cloud/storage/blob.py", "upload_from_file", Doing.CHECKPOINT),
        ("triton/compiler/compiler.py", "compile", Doing.COMPILING),
        ("torch/_inductor/async_compile.py", "wait", Doing.COMPILING),
        ("torch/cuda/__init__.py", "synchronize", Doing.DEVICE),
        ("torch/cuda/streams.py", "synchronize", Doing.DEVICE),
        ("deepspeed/comm/comm.py", "all_reduce", Doing.COLLECTIVE),
        ("torch/distributed/utils.py", "_sync_module_states", Doing.COLLECTIVE),
        ("torch/distributed/distributed_c10d.py", "new_group", Doing.MEETING),
        ("torch/distributed/distributed_c10d.py", "destroy_process_group", Doing.LIBRARY),
        ("torch/_inductor/compile_fx.py", "__call__", Doing.LIBRARY),  # compiled code runs
        ("torch/_dynamo/eval_frame.py", "compile_wrapper", Doing.LIBRARY),
        ("requests/adapters.py", "send", Doing.NETWORK),
        ("numpy/linalg/_linalg.py", "svd", Doing.LIBRARY),
    ],
)
def test_libraries_are_known_by_their_layout(path, function, doing):
    """Of packages that were not at hand when the stacks were recorded, and of a few functions."""
    frames = (Frame(f"{_SITE}{path}", 10, function), Frame("/home/user/train.py", 7, "<module>"))
    found = read_frames(frames)
    expected = Doing.USER if doing is Doing.LIBRARY else doing
    assert found.doing is expected
    assert found.line == frames[1]
    windows = tuple(Frame(one.file.replace("/", "\\"), one.line, one.function) for one in frames)
    assert read_frames(windows).doing is expected


def test_a_hook_of_the_users_within_backward_is_the_users_code():
    frames = (
        Frame("/home/user/train.py", 3, "hook"),
        Frame(f"{_SITE}torch/autograd/graph.py", 979, "_engine_run_backward"),
        Frame("/home/user/train.py", 9, "<module>"),
    )
    assert (read_frames(frames).doing, read_frames(frames).line) == (Doing.USER, frames[0])


def test_training_within_an_imported_module_is_no_import():
    one = recorded("importing")
    frames = (Frame("/home/user/train.py", 5, "load"), Frame("/home/user/train.py", 9, "<module>"))
    importing = read_activity(one.stacks)
    assert importing.doing is Doing.IMPORTING
    below = "".join(f'  File "{f.file}", line {f.line} in {f.function}\n' for f in frames)
    head, _, rest = one.stacks.partition("\n")
    activity = read_activity(f"{head}\n{below}{rest}")
    assert (activity.doing, activity.line) == (Doing.USER, frames[0])


@pytest.mark.parametrize("text", ["", "garbage", "Thread 0x1 (most recent call first):\n"])
def test_no_stack_is_unknown(text):
    assert read_activity(text).doing is Doing.UNKNOWN
    assert read_activity(text, text).doing is Doing.UNKNOWN


def test_leftover_frames_far_from_the_wait_decide_nothing():
    """A rank that sleeps now was in a collective before: its stack's memory still shows that."""
    native = "Thread 1 python:\n  clock_nanosleep (libc.so.6)\n  ? time_sleep (libpython)\n"
    native += "  ? pthread_cond_wait (libc.so.6)\n  ? _ZN4c10d4Work (libtorch_cpu.so)\n"
    assert read_activity(recorded("sleep").stacks, native).doing is Doing.USER
