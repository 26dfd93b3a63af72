"""A torch program that does not know of us is recorded: every operation, phase and step."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import echelon_torch_autoload
from echelon.recorder.format.schema import Flag, Live, State
from echelon.recorder.read import read_ring
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.ranks

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402


@torch.compile(backend="aot_eager", fullgraph=True)
def _compiled(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def _collectives(rank: int) -> None:
    x, both = torch.ones(2, 2), [torch.ones(4), torch.ones(4)]
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.all_reduce(x, async_op=True).wait()
    dist.all_gather(both, torch.ones(4))
    dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
    dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4))
    dist.broadcast(x, 1)
    dist.reduce(x, 1)
    dist.gather(torch.ones(4), both if rank == 0 else None, 0)
    dist.scatter(torch.ones(4), both if rank == 0 else None, 0)
    dist.all_to_all_single(torch.ones(4), torch.ones(4))
    dist.barrier()
    dist.monitored_barrier()


def _messages(rank: int) -> None:
    for _ in range(2):
        if rank == 0:
            dist.send(torch.ones(3), 1, tag=5)
        else:
            dist.recv(torch.ones(3), 0, tag=5)


def _loaded() -> list:
    return [batch.sum().item() for batch in DataLoader(torch.ones(4, 2), batch_size=2)]


def _trained(model) -> list[float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _models() -> list[float]:
    torch.manual_seed(0)
    plain, sharded = nn.Linear(3, 3), nn.Linear(3, 3)
    fully_shard(sharded)
    return _trained(DistributedDataParallel(plain)) + _trained(sharded)


def _refused() -> None:
    with contextlib.suppress(RuntimeError):  # at once
        dist.all_gather([torch.ones(3)] * 2, torch.ones(4))
    with contextlib.suppress(RuntimeError):  # by the work
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


def _work(rank: int, world_size: int, folder: str) -> list[float]:
    torch.set_num_threads(1)
    if folder:
        os.environ["ECHELON_RECORD_DIR"] = folder
        echelon_torch_autoload._record()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    _collectives(rank)
    _messages(rank)
    losses = _models()
    losses += functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist()
    losses += _compiled(torch.ones(2)).tolist()
    dist.all_gather_object([None] * 2, "mine")
    losses += _loaded()
    torch.save({"x": 1}, io.BytesIO())
    dist.group.WORLD.get_group_store().set("a", "1")
    dist.group.WORLD.get_group_store().get("a")
    _refused()
    pair = dist.new_group([1, 0], group_desc="pair")
    dist.all_reduce(torch.ones(1), group=pair)
    dist.destroy_process_group()
    return losses


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("record")
    losses = run_ranks(_work, 2, str(folder), timeout_s=60)
    rings = [read_ring(folder / f"rank_{rank}" / "attempt_0" / "ring") for rank in range(2)]
    return losses, rings


def _names(ring, function: str) -> list[str]:
    found = []
    for row in ring.operations:
        place, _, name = ring.strings[row["site"]].rpartition(" ")
        assert place.rpartition(":")[0] == __file__, place
        if name == function:
            found.append(ring.strings[row["operation"]])
    return found


def test_every_operation_is_recorded_with_the_users_line(recorded):
    _, rings = recorded
    for ring in rings:
        assert _names(ring, "_collectives") == [
            "all_reduce", "all_reduce", "all_gather", "all_gather", "reduce_scatter",
            "broadcast", "reduce", "gather", "scatter", "all_to_all", "barrier",
            "monitored_barrier",
        ]  # fmt: skip
        assert set(_names(ring, "_models")) == {"all_gather", "broadcast"}, "DDP's constructor"
        trained = _names(ring, "_trained")
        assert trained.count("all_reduce") == 3, "DDP's backward, in C++"
        assert trained.count("all_gather") == 3, "FSDP2's forward"
        assert trained.count("reduce_scatter") == 3
        assert _names(ring, "_compiled") == ["all_reduce"]
        assert _names(ring, "_work").count("all_reduce") == 2, "functional, and of the pair"


def test_members_number_their_collectives_alike(recorded):
    _, rings = recorded
    calls = [
        [
            (ring.groups[row["group"]].name, int(row["sequence"]), ring.strings[row["operation"]],
             ring.signatures[row["signature"]].shapes, int(row["root"]))
            for row in ring.operations
            if not row["flags"] & Flag.P2P
        ]
        for ring in rings
    ]  # fmt: skip
    assert calls[0] == calls[1]
    assert {call[0] for call in calls[0]} == {"world", "pair"}
    assert [call[1] for call in calls[0] if call[0] == "world"] == list(range(len(calls[0]) - 1))
    assert calls[0][-1] == ("pair", 0, "all_reduce", ((1,),), -1)


def test_messages_have_peers_tags_and_numbers_of_their_own(recorded):
    _, rings = recorded
    for rank, ring in enumerate(rings):
        rows = [row for row in ring.operations if row["flags"] & Flag.P2P]
        found = [
            (ring.strings[row["operation"]], *(int(row[name]) for name in ("peer", "tag")),
             int(row["p2p_sequence"]), int(row["sequence"]))
            for row in rows
        ]  # fmt: skip
        name = ("send", "recv")[rank]
        assert found == [(name, 1 - rank, 5, 0, -1), (name, 1 - rank, 5, 1, -1)]


def test_all_operations_end_and_refused_ones_fail(recorded):
    _, rings = recorded
    for ring in rings:
        failed = [row for row in ring.operations if row["state"] == State.FAILED]
        assert [ring.strings[row["operation"]] for row in failed] == ["all_gather", "all_reduce"]
        assert all("Error" in ring.strings[row["error"]] for row in failed)
        ends = {State.COMPLETED, State.FAILED}
        open_ = [
            ring.strings[row["operation"]] for row in ring.operations if row["state"] not in ends
        ]
        assert open_ == []


def test_steps_and_phases_are_recorded(recorded):
    _, rings = recorded
    for ring in rings:
        assert ring.live[Live.STEP] == 1 + 6, "two trainings of three steps"
        assert ring.live[Live.INITIALIZED] == 1
        spans = [(ring.strings[row["name"]], ring.strings[row["detail"]]) for row in ring.spans]
        names = [name for name, _ in spans]
        assert names.count("data_wait") == 3, "two batches and the end"
        assert names[names.index("data_wait") :].count("data_end") == 1, "before the next operation"
        assert ("checkpoint", "torch.save BytesIO") in spans
        assert ("store", "get('a')") in spans
        assert ("store", "process group") in spans
        assert "compile" in names
        assert len(ring.open_spans) == 0


def test_the_program_computes_the_same_bit_for_bit(recorded):
    losses, _ = recorded
    assert losses == run_ranks(_work, 2, "", timeout_s=60)


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"ECHELON_RANK_DIR": "x"}, True),
        ({"ECHELON_RECORD_DIR": "x"}, True),
        ({"ECHELON_RECORD": "1"}, True),
        ({"ECHELON_RECORD": "0", "ECHELON_RANK_DIR": "x"}, False),
        ({"ECHELON_RECORDER_SIZE": "0", "ECHELON_RANK_DIR": "x"}, False),
    ],
)
def test_one_variable_turns_it_off_and_on(environ, wanted):
    assert echelon_torch_autoload._is_recorded(environ) is wanted


def _damage_nothing() -> None:
    pass


def _damage_dispatcher() -> None:
    del torch._C._dispatch_keyset_full_after


def _damage_library() -> None:
    torch.library.Library = None


def _damage_loaders() -> None:
    torch.utils.data.dataloader._BaseDataLoaderIter = None


def _damage_optimizers() -> None:
    del sys.modules["torch.optim.optimizer"]


def _alone(rank: int, world_size: int, folder: str, damage) -> list[float]:
    damage()
    os.environ["ECHELON_RECORD_DIR"] = folder
    echelon_torch_autoload._record()
    dist.init_process_group("gloo")
    x = torch.ones(2)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.tolist()


@pytest.mark.parametrize(
    ("damage", "num_operations"),
    [
        (_damage_nothing, 1),
        (_damage_dispatcher, 0),
        (_damage_library, 0),
        (_damage_loaders, 1),
        (_damage_optimizers, 1),
    ],
)
def test_a_torch_that_is_not_as_expected_trains_all_the_same(tmp_path, damage, num_operations):
    assert run_ranks(_alone, 1, str(tmp_path), damage) == [[1.0, 1.0]]
    ring = read_ring(tmp_path / "rank_0" / "attempt_0" / "ring")
    assert len(ring.operations) == num_operations


def _never_waiting(rank: int, world_size: int, folder: str) -> int:
    os.environ["ECHELON_RECORD_DIR"] = folder
    echelon_torch_autoload._record()
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    for _ in range(1000):
        dist.all_reduce(torch.ones(1), async_op=True)
    dist.destroy_process_group()
    start = importlib.import_module("echelon.recorder.torch.start")
    return len(start._operations.pending.works)


def test_works_that_never_say_that_they_are_complete_are_not_kept_for_good(tmp_path):
    """Torch's fake works do not: each would hold its tensors, and be asked at every operation."""
    [num_kept] = run_ranks(_never_waiting, 1, str(tmp_path))
    assert 0 < num_kept <= 256
    ring = read_ring(tmp_path / "rank_0" / "attempt_0" / "ring")
    assert len(ring.operations) == 1000
    assert sum(row["state"] == State.COMPLETED for row in ring.operations) == 1000 - num_kept


_PROGRAM = """\
import sys, torch, torch.distributed as dist
assert not [name for name in sys.modules if name.startswith("echelon.")]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
"""


def test_a_program_without_a_launcher_is_recorded_in_silence(tmp_path):
    """Nothing of ours is loaded before it makes a group, and nothing is printed."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "ECHELON_RECORD": "1", "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    ring = read_ring(Path(tmp_path, "echelon_record", "rank_0", "attempt_0", "ring"))
    assert len(ring.operations) == 1
    assert ring.live[Live.CLOSED] == 1
