"""Which device a rank computes on, with torch's view of the machine made up."""

from __future__ import annotations

import pytest
import torch
from gpt.machine import choose_device


@pytest.fixture
def current(monkeypatch):
    """A machine of two GPUs; the list gets every device that is made the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
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
