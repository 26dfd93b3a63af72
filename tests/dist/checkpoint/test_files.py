"""To and from one plain file: torch's state_dict, and safetensors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint import RandomState, export, load, save  # noqa: E402
from echelon.dist.checkpoint.__main__ import main  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402
from tests.dist.checkpoint.states import make, same  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    model, optimizer = make()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 7, "random": RandomState()}
    save(tmp_path / "c", state)
    return tmp_path / "c", model, optimizer


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_module_goes_through_a_file_and_back(saved, tmp_path, name):
    path, model, _ = saved
    export(path, tmp_path / name, "model")
    fresh = make(seed=1)[0]
    load(tmp_path / name, {"model": fresh})
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", name]  # nothing is left beside


def test_torch_reads_the_state_dict_without_us(saved, tmp_path):
    path, model, _ = saved
    export(path, tmp_path / "model.pt", "model")
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    assert content["head.weight"].data_ptr() == content["token.weight"].data_ptr()  # still tied
    fresh = make(seed=1)[0]
    fresh.load_state_dict(content)
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_torch_reads_everything_without_us_and_we_read_it_back(saved, tmp_path):
    path, model, optimizer = saved
    export(path, tmp_path / "all.pt")
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (set(content), content["step"]) == ({"model", "optimizer", "step"}, 7)
    fresh, theirs = make(seed=1)
    theirs.load_state_dict(content["optimizer"])
    assert same(theirs.state_dict(), optimizer.state_dict())
    fresh, theirs = make(seed=1)
    state = load(tmp_path / "all.pt", {"model": fresh, "optimizer": theirs, "step": 0})
    assert same(theirs.state_dict(), optimizer.state_dict())
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert state["step"] == 7


def test_a_file_of_torch_alone_is_read(tmp_path):
    """Nothing of ours has written it; the older format of torch.save too."""
    model = make()[0]
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("plain.pt", "old.pt"):
        fresh = make(seed=1)[0]
        load(tmp_path / name, {"model": fresh})
        assert same(dict(fresh.state_dict()), dict(model.state_dict()))


def test_safetensors_agrees_with_the_formats_own_package(saved, tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package")
    path, model, _ = saved
    export(path, tmp_path / "ours.safetensors")
    ours = package.load_file(tmp_path / "ours.safetensors")
    assert len(ours) == len(model.state_dict()) - 1  # the tied weight once
    assert all(same(value, model.state_dict()[name]) for name, value in ours.items())
    theirs = {name: value.clone() for name, value in model.state_dict().items()}
    theirs["up.bias"] = theirs["up.bias"].double()
    package.save_file(theirs, tmp_path / "theirs.safetensors", metadata={"a": "b"})
    fresh = make(seed=1)[0]
    load(tmp_path / "theirs.safetensors", {"model": fresh})
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))


class Intruder:
    """An object whose unpickling would run code."""

    def __reduce__(self):
        return (print, ("arbitrary code ran",))


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut short"])
@pytest.mark.parametrize("name", ["c.pt", "c.safetensors"])
def test_foreign_bytes_get_one_clear_line(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        load(path, {"model": make()[0]})
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [[1, 2], {"model": Intruder()}, Intruder()])
def test_a_pickle_of_a_stranger_runs_nothing(tmp_path, capfd, content):
    path = tmp_path / "c.pt"
    torch.save(content, path)
    with pytest.raises((CheckpointError, ValueError)) as error:
        load(path, {"model": make()[0]})
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert "arbitrary code" not in capfd.readouterr().out


def forged(header, data=b"\0" * 64):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "entry",
    [
        GOOD | {"dtype": "F7"},
        GOOD | {"shape": [3]},
        GOOD | {"shape": [-2]},
        GOOD | {"shape": ["x"]},
        GOOD | {"data_offsets": [60, 68]},
        GOOD | {"data_offsets": [-8, 0]},
        GOOD | {"data_offsets": [0]},
        {"dtype": "F32"},
        7,
    ],
)
def test_a_forged_safetensors_header_is_refused(tmp_path, entry):
    path = tmp_path / "c.safetensors"
    path.write_bytes(forged({"weight": entry}))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(path, {"model": make()[0]})


def test_weights_alone_need_one_module_to_go_to(saved, tmp_path):
    path, _, _ = saved
    export(path, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="contains the weights of one module, but the state has 2"):
        load(tmp_path / "m.safetensors", {"a": make()[0], "b": make()[0]})
    with pytest.raises(ValueError, match="the checkpoint has no other to export"):
        export(path, tmp_path / "m.pt", "other")
    with pytest.raises(ValueError, match="step is not a module of this checkpoint"):
        export(path, tmp_path / "m.safetensors", "step")


def test_the_command_shows_verifies_and_exports(saved, tmp_path, capsys):
    path, _, _ = saved
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "  model: module, 8 tensors" in shown
    assert "  step: 7" in shown
    assert main(["export", str(path), str(tmp_path / "m.safetensors"), "--key", "model"]) == 0
    assert (tmp_path / "m.safetensors").exists()
    save(path, {"step": 8})
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.endswith("  step: 8\nolder versions: 000001\n")
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.count("bytes are intact") == 2
    assert main(["show", str(tmp_path / "nothing")]) == 1
    assert main(["verify", str(tmp_path / "nothing")]) == 1
    with pytest.raises(SystemExit) as usage:
        main([str(path)])
    assert usage.value.code == 2


def test_a_damaged_version_fails_the_command_and_the_others_are_read_all_the_same(saved):
    path, _, _ = saved
    save(path, {"step": 8})
    file = path / "000001" / "rank_00000.bin"
    file.write_bytes(b"x" * file.stat().st_size)
    done = subprocess.run(
        [sys.executable, "-m", "echelon.dist.checkpoint", "verify", path],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"{path / '000001'}: DAMAGED: {file}: the file is damaged between bytes 0"
    )
    assert done.stderr.count("\n") == 1
    assert done.stdout.startswith(f"{path / '000002'}: 0 bytes are intact")
