"""What is loaded fits and is undamaged, or one line says what is wrong and nothing has changed."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import load, save, saving  # noqa: E402
from echelon.dist.checkpoint.disk.folder import versions  # noqa: E402
from echelon.dist.checkpoint.state.held import Held  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402
from tests.dist.checkpoint.states import make, same  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    """A model and its optimizer after a step, and where they were saved."""
    model, optimizer = make()
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    save(tmp_path / "saved", {"model": model, "optimizer": optimizer, "step": 7})
    return tmp_path / "saved", model, optimizer


def one_line(error, path):
    text = str(error.value)
    assert str(path) in text
    assert "\n" not in text
    return text


# ---- what a state may hold ----


class Extra(torch.nn.Module):
    def __init__(self, note):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.note = note

    def get_extra_state(self):
        return {"note": self.note, "table": torch.arange(3)}

    def set_extra_state(self, state):
        self.note = state["note"]
        self.table = state["table"]


def test_a_state_of_every_kind_comes_back(tmp_path):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    generator = np.random.default_rng(5)
    tensors = {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.arange(12).view(3, 4).t(),
        "bf16": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64).conj(),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    state = {
        "nets": {"first": model, "second": Extra("hello")},
        "optimizer": optimizer,
        "scheduler": scheduler,
        "tensors": tensors,
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "generator": generator.bit_generator.state,
        "plain": {"step": 3, "pair": (1, [None, 2.5]), 4: b"raw", "wide": 1 << 100},
    }
    save(tmp_path / "c", state)
    fresh, _ = make(seed=1)
    theirs = torch.optim.AdamW(
        [{"params": g["params"]} for g in make(seed=1)[1].param_groups], lr=1.0
    )
    extra = Extra("")
    wanted = {
        "nets": {"first": fresh, "second": extra},
        "scheduler": torch.optim.lr_scheduler.StepLR(theirs, step_size=9),
        "tensors": {name: torch.zeros_like(value) for name, value in tensors.items()},
        "array": None,
        "plain": None,
    }
    inside = wanted["tensors"]["strided"]
    load(tmp_path / "c", wanted)
    assert same(fresh.state_dict(), model.state_dict())
    assert (extra.note, extra.table.tolist()) == ("hello", [0, 1, 2])
    assert wanted["scheduler"].step_size == 2
    assert all(torch.equal(wanted["tensors"][n].float() if n == "fp8" else wanted["tensors"][n],
                           t.float() if n == "fp8" else t) for n, t in tensors.items())  # fmt: skip
    assert wanted["tensors"]["strided"] is inside
    assert np.array_equal(wanted["array"], state["array"])
    assert wanted["plain"] == state["plain"]
    assert wanted["generator"] == state["generator"]  # plain values come even if not asked for


@pytest.mark.parametrize(
    "build",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.AdamW(p, fused=True),
    ],
)
def test_optimizers_go_on_bit_for_bit(tmp_path, build):
    def train(model, optimizer, steps):
        for seed in steps:
            generator = torch.Generator().manual_seed(seed)
            tokens = torch.randint(0, 13, (2, 3), generator=generator)
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

    model = make()[0]
    optimizer = build([p for p in model.parameters() if p.dim() > 0])
    train(model, optimizer, range(3))
    save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    fresh = make(seed=1)[0]
    other = build([p for p in fresh.parameters() if p.dim() > 0])
    load(tmp_path / "c", {"model": fresh, "optimizer": other})
    train(fresh, other, range(3, 6))
    assert same(fresh.state_dict(), model.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())


def test_wrapped_parts_have_the_plain_modules_names(saved):
    path, model, _ = saved
    other, _ = make(seed=1)
    other.up = torch.compile(other.up, backend="eager")
    load(path, {"model": torch.compile(other, backend="eager")})
    assert torch.equal(other.up.weight, model.up.weight)


def test_a_float_type_is_converted(saved):
    path, model, _ = saved
    half = make(seed=1)[0].bfloat16()
    load(path, {"model": half})
    assert torch.equal(half.up.weight, model.up.weight.bfloat16())


# ---- what does not fit ----


def other_shape(model):
    model.up = torch.nn.Linear(6, 8)


def smaller(model):
    del model.up


def larger(model):
    model.more = torch.nn.Linear(2, 2)


def other_dtype(model):
    model.counts = torch.zeros(5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            other_shape,
            r"model/up.weight has shape \[7, 6\] in the checkpoint, but \[8, 6\] here; model/up",
        ),
        (smaller, "model/up.bias is in the checkpoint but not in this module; model/up.weight"),
        (
            larger,
            "model/more.weight is not in the checkpoint; model/more.bias is not in the checkpoint",
        ),
        (other_dtype, "model/counts is int64 in the checkpoint, but float32 here"),
    ],
)
def test_another_model_is_refused_and_left_alone(saved, change, complaint):
    path, _, _ = saved
    model, _ = make(seed=1)
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=complaint) as error:
        load(path, {"model": model})
    one_line(error, path)
    assert same(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"best": 0}, "best is not in the checkpoint, which has: model, optimizer, step"),
        (
            {"step": torch.nn.Linear(1, 1)},
            "step is of kind value in the checkpoint, but module here",
        ),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)},
            "no parameter 0.0 in the checkpoint",
        ),
    ],
)
def test_another_state_is_refused(saved, state, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        load(saved[0], state)
    one_line(error, saved[0])


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ([1], "a state must be a dict, not list"),
        ({1: 2}, "keys must be strings"),
        ({"a/b": 2}, "keys must be strings without a slash"),
        ({"f": lambda: 0}, "f: cannot save an object of type function"),
        ({"a": {"b": [{1, 2}]}}, "a: cannot save an object of type set"),
        ({"a": np.array(["text"])}, "a: cannot save arrays of dtype"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_the_old_checkpoint_stays(saved, state, complaint):
    path, _, _ = saved
    with pytest.raises(TypeError, match=complaint):
        save(path, state)
    assert [version.name for version in versions(path)] == ["000001"]
    assert load(path, {})["step"] == 7


def test_a_sparse_tensor_and_one_without_storage_are_refused(tmp_path):
    for tensor in (torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises(ValueError, match="t: only dense tensors with storage"):
            save(tmp_path / "c", {"t": tensor})


# ---- what is damaged ----


def damaged(path, name, change):
    file = versions(path)[-1] / name
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("position", [0, 100, 1000, -1])
def test_a_flipped_bit_is_found_and_the_file_is_named(saved, position):
    path, model, optimizer = saved

    def flip(data):
        data[position] ^= 4

    file = damaged(path, "rank_00000.bin", flip)
    with pytest.raises(CheckpointError, match="damaged between bytes 0 and") as error:
        load(path, {"model": model, "optimizer": optimizer})
    one_line(error, file)
    assert error.value.path == str(file)


def test_a_file_that_was_cut_short_is_named(saved):
    path, model, _ = saved
    file = damaged(path, "rank_00000.bin", lambda data: data.__delitem__(slice(-5, None)))
    with pytest.raises(CheckpointError, match=r"bytes, but [0-9]+ were saved") as error:
        load(path, {"model": model})
    one_line(error, file)


def test_a_missing_file_is_named(saved):
    path, model, _ = saved
    file = versions(path)[-1] / "rank_00000.bin"
    file.unlink()
    with pytest.raises(CheckpointError, match="No such file") as error:
        load(path, {"model": model})
    one_line(error, file)


def test_a_damaged_manifest_does_not_count_and_says_so(saved):
    path, model, _ = saved
    file = damaged(path, "manifest", lambda data: data.__setitem__(10, data[10] ^ 1))
    with pytest.raises(CheckpointError, match="the manifest's checksum is wrong") as error:
        load(path, {"model": model})
    one_line(error, file)


def test_nothing_there_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint") as error:
        load(tmp_path / "none", {})
    one_line(error, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="does not contain a complete checkpoint"):
        load(tmp_path / "empty", {})


def test_a_large_file_is_checked_by_blocks(tmp_path):
    """A tensor of three blocks: reading one part of the file does not look at the rest."""
    first, second = torch.arange(200_000.0), torch.arange(500_000.0)
    save(tmp_path / "c", {"first": first, "second": second})
    file = versions(tmp_path / "c")[-1] / "rank_00000.bin"
    data = bytearray(file.read_bytes())
    data[2_500_000] ^= 1
    file.write_bytes(data)
    assert torch.equal(load(tmp_path / "c", {"first": None})["first"], first)
    with pytest.raises(CheckpointError, match="between bytes 2097152 and 2800000"):
        load(tmp_path / "c", {"second": None})


# ---- several versions ----


def test_as_many_versions_stay_as_are_kept(tmp_path):
    for step in range(1, 5):
        save(tmp_path / "c", {"step": step}, keep=2)
    assert [version.name for version in versions(tmp_path / "c")] == ["000003", "000004"]
    assert load(tmp_path / "c", {})["step"] == 4
    assert load(tmp_path / "c" / "000003", {})["step"] == 3


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save(tmp_path / "c", {}, keep=0)
    with pytest.raises(ValueError, match="a checkpoint is a folder"):
        save(tmp_path / "c.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_ranks_that_have_not_met_do_not_overwrite_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"call echelon.dist.init\(\) first"):
        save(tmp_path / "c", {"step": 1})


# ---- in the background ----


def test_a_save_in_the_background_is_of_the_state_at_the_call(tmp_path, monkeypatch):
    """The writer is held back while the state changes; what is written is what was there."""
    go = threading.Event()
    write = os.write

    def held_back(descriptor, data):
        if threading.current_thread().name == "echelon-checkpoint":
            assert go.wait(30)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", held_back)
    model, optimizer = make()
    values = collections.OrderedDict(history=[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = {"model": model, "optimizer": optimizer, "values": values}
    pending = save(tmp_path / "c", state, async_op=True)
    assert not pending.done
    with pytest.raises(CheckpointError, match="still being saved"):
        pending.wait(timeout_s=0.01)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    values["history"].append(2)
    go.set()
    pending.wait()
    assert pending.done
    load(tmp_path / "c", state)
    assert same(dict(model.state_dict()), before)
    assert state["values"] == {"history": [1]}


def test_a_copy_for_the_background_is_complete_when_the_call_returns():
    """Off CUDA nothing waits for a copy that does not block: the next step would change it."""

    class Far:
        """A tensor on another device, as far as copying it goes."""

        device = torch.device("xpu")

        def cpu(self):
            return torch.ones(3)

    copied = saving._copy(Held("t", (3,), Far()))
    assert copied.data.tolist() == [1.0] * 3


def test_an_error_in_the_background_comes_with_the_next_call(tmp_path, monkeypatch):
    (tmp_path / "c").mkdir()
    pending = save(tmp_path / "c" / "d", {"step": 1}, async_op=True)
    pending.wait()

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        pending = save(tmp_path / "c" / "d", {"step": torch.zeros(3)}, async_op=True)
        pending._thread.join()
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "c" / "d", {"step": 3})
    save(tmp_path / "c" / "d", {"step": 4})  # once
    assert load(tmp_path / "c" / "d", {})["step"] == 4


def test_a_program_that_ends_lets_its_last_save_complete(tmp_path):
    code = (
        "import sys, torch; from echelon.dist.checkpoint import save\n"
        "save(sys.argv[1], {'x': torch.ones(1_000_000), 'step': 5}, async_op=True)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "c"], check=True, timeout=300)
    assert load(tmp_path / "c", {})["step"] == 5


@pytest.mark.parametrize("async_op", [False, True])
def test_a_checkpoint_is_announced_to_the_launcher_once_it_is_committed(
    tmp_path, monkeypatch, async_op
):
    told = []

    def note(path, step):
        told.append((path, step, len(versions(path))))

    monkeypatch.setattr(saving, "note_checkpoint", note)
    monkeypatch.setattr(saving, "last_step", lambda: 57)
    pending = save(tmp_path / "saved", {"step": 7}, async_op=async_op)
    if pending is not None:
        pending.wait()
    assert told == [(tmp_path / "saved", 57, 1)]
