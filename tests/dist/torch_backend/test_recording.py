"""What torch calls is in the black box with the user's line, however deep in torch it is."""

from __future__ import annotations

import _thread
import functools
import importlib
import os
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from echelon.recorder.format.schema import Flag, State
from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks


@torch.compile(backend="aot_eager", fullgraph=True)
def _compiled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def _plain(x: torch.Tensor) -> None:
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()


def _objects() -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "mine")


def _functional(x: torch.Tensor) -> None:
    functional.all_reduce(x, "max", dist.group.WORLD).clone()


def _wrapped_in_ddp() -> nn.Module:
    return DistributedDataParallel(nn.Linear(3, 3))


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def _sharded_forward(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 3)).sum()


def _by_a_foreign_thread(x: torch.Tensor) -> None:
    """Call from a thread without a frame of ours, as autograd's threads for a device do."""
    done = threading.Event()
    x.register_hook(lambda _: None)
    call = functools.partial(dist.all_reduce, torch.ones(1), async_op=True)
    _thread.start_new_thread(functools.partial(_then, call, done.set), ())
    assert done.wait(20)


_then = eval("lambda call, then: (call(), then())", {}, {})
_then = _then.__class__(_then.__code__.replace(co_filename="<eval_with_key>.1"), {})


def _work(rank: int, world_size: int, folder: str) -> None:
    os.environ["ECHELON_RANK_DIR"] = f"{folder}/rank_{rank}"
    importlib.import_module("echelon.recorder.current")._opened = False  # the server's, not ours
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("echelon")
    _plain(torch.ones(4))
    _objects()
    _functional(torch.ones(2))
    _compiled(torch.ones(2))
    wrapped = _wrapped_in_ddp()
    _backward(wrapped(torch.ones(2, 3)).sum())
    model = nn.Linear(3, 3)
    fully_shard(model)
    _backward(_sharded_forward(model))
    _by_a_foreign_thread(torch.ones(1, requires_grad=True))
    dist.barrier(dist.new_group(group_desc="pair"))
    dist.destroy_process_group()


def test_the_users_line_is_found_through_torch(tmp_path):
    run_ranks(_work, 2, str(tmp_path), timeout_s=60)
    record = read_ring(Path(tmp_path, "rank_1", "ring"))
    rows = record.operations
    assert all(row["state"] == State.COMPLETED for row in rows)
    assert record.identity.world_size == 2
    called: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        place, _, function = record.strings[row["site"]].rpartition(" ")
        assert place.rpartition(":")[0] == __file__, place
        group = record.groups[row["group"]].name
        called.setdefault((group, function), []).append(record.strings[row["operation"]])
    world = {function: kinds for (group, function), kinds in called.items() if group == "world"}
    assert world["_plain"] == ["all_reduce"] * 2
    assert world["_objects"] == ["all_gather"] * 2  # sizes, then bytes
    assert world["_functional"] == ["all_reduce"]
    assert world["_compiled"] == ["all_reduce"]
    assert set(world["_wrapped_in_ddp"]) == {"all_gather", "broadcast"}
    assert world["_sharded_forward"] == ["all_gather"]
    assert world["_backward"] == ["all_reduce", "reduce_scatter"]  # DDP's, then FSDP2's
    assert world["_by_a_foreign_thread"] == ["all_reduce"]
    assert called["pair", "_work"] == ["barrier"]
    assert [bool(row["flags"] & Flag.ASYNC) for row in rows[:2]] == [False, True]
