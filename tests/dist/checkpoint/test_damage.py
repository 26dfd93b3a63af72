"""If the newest version is damaged, the newest whole one is loaded, on all ranks alike."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import load, peek, save  # noqa: E402
from echelon.dist.checkpoint.disk.folder import versions  # noqa: E402
from echelon.errors import CheckpointError  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402


def state_of(step, numel=1000):
    return {"weight": torch.full((numel,), float(step)), "step": step}


def flip(file, position=10):
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def saved(path, num=3, keep=3):
    for step in range(1, num + 1):
        save(path, state_of(step), keep=keep)
    return versions(path)


def test_two_versions_are_kept_unless_told_otherwise(tmp_path):
    for step in range(1, 5):
        save(tmp_path / "c", state_of(step))
    assert [version.name for version in versions(tmp_path / "c")] == ["000003", "000004"]


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["rank_00000.bin", "manifest"])
def test_a_damaged_version_falls_back_to_the_one_before_and_says_so(tmp_path, name, damage):
    all_of_them = saved(tmp_path / "c")
    damage(all_of_them[-1] / name)
    if damage is Path.unlink and name == "manifest":
        found = load(tmp_path / "c", state_of(0))  # without a manifest it does not count at all
    else:
        with pytest.warns(RuntimeWarning, match=r"000003.*; loading .*000002 instead"):
            found = load(tmp_path / "c", state_of(0))
    assert (found["step"], found["weight"].unique().tolist()) == (2, [2.0])


def test_the_newest_whole_one_is_found_behind_several_damaged_ones(tmp_path):
    all_of_them = saved(tmp_path / "c")
    for version in all_of_them[1:]:
        flip(version / "rank_00000.bin")
    with pytest.warns(RuntimeWarning):
        assert load(tmp_path / "c", state_of(0))["step"] == 1


def test_if_all_are_damaged_the_newest_ones_error_is_raised(tmp_path):
    for version in saved(tmp_path / "c"):
        flip(version / "rank_00000.bin")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(CheckpointError, match=r"000003/rank_00000.bin: the file is damaged"):
            load(tmp_path / "c", state_of(0))


def test_a_version_that_is_asked_for_by_number_is_that_one_or_an_error(tmp_path):
    version = saved(tmp_path / "c")[-1]
    flip(version / "rank_00000.bin")
    with pytest.raises(CheckpointError, match="damaged"):
        load(version, state_of(0))


def test_what_does_not_fit_is_no_damage(tmp_path):
    saved(tmp_path / "c")
    with pytest.raises(ValueError, match="has shape"):
        load(tmp_path / "c", state_of(0, numel=5))


def test_peek_reads_the_version_that_load_takes_if_a_manifest_is_damaged(tmp_path):
    flip(saved(tmp_path / "c")[-1] / "manifest")
    assert peek(tmp_path / "c")["step"] == 2


def test_a_damaged_version_does_not_count_as_one_that_is_kept(tmp_path):
    all_of_them = saved(tmp_path / "c", num=2, keep=2)
    cut(all_of_them[-1] / "rank_00000.bin")
    save(tmp_path / "c", state_of(3), keep=2)
    assert (tmp_path / "c" / "000001").exists()
    for name in ("000002", "000003"):
        file = tmp_path / "c" / name / "rank_00000.bin"
        if file.exists():
            cut(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert load(tmp_path / "c", state_of(0))["step"] == 1


def _one_rank_reads_damage(rank, world_size, folder):
    """Only rank 1's shard lies in the damaged block: both ranks take the older version."""
    from echelon.dist.fsdp import fully_shard

    dist.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512)
    fully_shard(model)
    path = Path(folder, "c")
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(step))
        save(path, {"model": model, "step": step})
    dist.world().barrier()
    if rank == 0:
        flip(path / "000002" / "rank_00001.bin")
    dist.world().barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(path, {"model": model})
    values = {float(v) for p in model.parameters() for v in p.detach().reshape(-1)}
    dist.shutdown()
    return found["step"], sorted(values), len([w for w in caught if "instead" in str(w.message)])


@pytest.mark.ranks
def test_ranks_fall_back_together_though_one_alone_reads_the_damage(tmp_path):
    assert run_ranks(_one_rank_reads_damage, 2, str(tmp_path)) == [(1, [1.0], 1), (1, [1.0], 0)]
