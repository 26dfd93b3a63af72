"""Which device a rank computes on, with torch's view of the machine made up."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpt.training import machine
from gpt.training.machine import choose_device, describe


@pytest.fixture
def current(monkeypatch):
    """A machine of two GPUs; the list gets every device that is made the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Made-up H100")
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    return chosen


@pytest.mark.parametrize(("local_rank", "index"), [(None, 0), ("0", 0), ("1", 1), ("3", 1)])
def test_a_rank_takes_the_gpu_of_its_local_rank_and_makes_it_current(
    current, monkeypatch, local_rank, index
):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert choose_device() == torch.device("cuda", index)
    assert current == [torch.device("cuda", index)]


def test_the_cpu_is_taken_when_asked_for(current):
    assert choose_device("cpu") == torch.device("cpu")
    assert current == []


def test_a_machine_without_gpus_has_the_cpu_and_says_so_when_asked_for_more(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device() == torch.device("cpu")
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [("1", ""), ("2", ", 2 local ranks on 2 GPUs"), ("4", ", 4 local ranks on 2 GPUs")],
)
def test_the_report_says_which_gpu_and_how_many_ranks_share_each(
    current, monkeypatch, num_ranks, text
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    assert describe(choose_device()) == f"cuda:1 (Made-up H100{text})"
    assert describe(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(("wanted", "local_rank", "is_told"), [
    ("auto", "0", True), ("auto", "1", False), ("cpu", "0", False),
])  # fmt: skip
def test_a_gpu_that_torch_cannot_use_is_warned_of_once_a_host(
    monkeypatch, tmp_path, wanted, local_rank, is_told
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "DRIVER", tmp_path)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert choose_device(wanted) == torch.device("cpu")
    assert ["torch" in str(one.message) for one in told] == [True] * is_told
