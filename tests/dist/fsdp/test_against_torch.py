"""The same seeds through FSDP2 and DDP over Gloo: the same weights after every step."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import warnings

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as torch_dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import fsdp as fsdp2  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
STEPS = 3
MICRO = 2


def _join(folder):
    models.join()
    warnings.simplefilter("ignore")
    world = dist.world()
    torch_dist.init_process_group(
        "gloo", store=torch_dist.FileStore(f"{folder}/store", world.size),
        rank=world.rank, world_size=world.size,
    )  # fmt: skip


def _leave():
    torch_dist.destroy_process_group()
    dist.shutdown()


class Ours:
    """A model sharded by echelon."""

    def __init__(self, model, units, param_dtype):
        from echelon.dist.fsdp import MixedPrecisionPolicy, fully_shard

        policy = None
        if param_dtype is not None:
            policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for unit in units(model):
            fully_shard(unit, mp_policy=policy)
        self.model = fully_shard(model, mp_policy=policy)

    def held(self):
        from echelon.dist.fsdp import gradient_sync

        return gradient_sync(self.model, enabled=False)

    def clip(self):
        from echelon.dist.fsdp import clip_grad_norm_

        return clip_grad_norm_(self.model, 0.5)

    def state(self):
        from echelon.dist.fsdp import full_state_dict

        return full_state_dict(self.model)


class Fsdp2:
    """The same by torch."""

    def __init__(self, model, units, param_dtype):
        policy = fsdp2.MixedPrecisionPolicy()
        if param_dtype is not None:
            policy = fsdp2.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        self.mesh = torch_dist.init_device_mesh("cpu", (torch_dist.get_world_size(),))
        for unit in units(model):
            fsdp2.fully_shard(unit, mesh=self.mesh, mp_policy=policy)
        self.model = fsdp2.fully_shard(model, mesh=self.mesh, mp_policy=policy)

    @contextlib.contextmanager
    def held(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def clip(self):
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).full_tensor())

    def state(self):
        return {name: value.full_tensor() for name, value in self.model.state_dict().items()}


class Ddp:
    """Replicas by torch."""

    is_static = False

    def __init__(self, model, units, param_dtype):
        assert param_dtype is None
        self.model = DistributedDataParallel(model, static_graph=self.is_static)
        self.held = self.model.no_sync

    def clip(self):
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))

    def state(self):
        return {n: v.detach().clone() for n, v in self.model.module.state_dict().items()}


class StaticDdp(Ddp):
    """Replicas by torch, in the only way in which it takes reentrant checkpoints."""

    is_static = True


def _train(way, program, rank, size, param_dtype=None, num_micro=MICRO):
    """Return the loss, the gradients' norm and the weights after each step."""
    model = program.make()
    sharded = way(model, program.units, param_dtype)
    trained = [p for p in sharded.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    story = []
    for step in range(STEPS):
        for micro in range(num_micro):
            with sharded.held() if micro + 1 < num_micro else contextlib.nullcontext():
                loss = models.loss_of(sharded.model, (step * size + rank) * num_micro + micro)
                loss.backward()
        norm = sharded.clip()
        optimizer.step()
        optimizer.zero_grad()
        state = {name: value.detach().clone() for name, value in sharded.state().items()}
        story.append((loss.item(), norm, state))
    return story


def _distance(one, other):
    """Return the largest difference of two runs in any step: of losses, weights, and norms.

    Losses (about 4) and norms are float32 in torch, so their differences are relative.
    """
    far = 0.0
    for (loss, norm, state), (its_loss, its_norm, its_state) in zip(one, other, strict=True):
        assert state.keys() == its_state.keys()
        weights = max(float((state[name] - its_state[name]).abs().max()) for name in state)
        far = max(far, abs(loss / its_loss - 1), abs(norm / its_norm - 1), weights)
    return far


class Plain:
    """The tied GPT with its blocks as units; the root has the rest, which is uneven."""

    def make(self):
        return models.make()

    def units(self, model):
        return list(model.blocks)


class Uneven(Plain):
    """Units within units, of very different sizes."""

    def units(self, model):
        first, second, _ = model.blocks
        return [first.attention, first, second.up, second.down, second]


class Across(Plain):
    """The embedding on its own, tied to the head in the root; FSDP2 refuses that."""

    def units(self, model):
        return [model.token, *model.blocks]


class Frozen(Plain):
    """Frozen below, between and within trained units."""

    def make(self):
        model = models.make()
        model.position.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].attention.qkv.weight.requires_grad_(False)
        model.blocks[0].norm1.requires_grad_(False)
        return model


class Checkpointed(Plain):
    """Activations computed again."""

    def __init__(self, *, reentrant):
        self.reentrant = reentrant

    def make(self):
        model = models.make()
        for block in model.blocks:
            block.forward = self._wrap(block.forward)
        return model

    def _wrap(self, forward):
        return lambda x: checkpoint(forward, x, use_reentrant=self.reentrant)


FLOAT32 = {
    "plain": Plain(),
    "uneven": Uneven(),
    "tied across units": Across(),
    "frozen": Frozen(),
    "checkpoints": Checkpointed(reentrant=False),
    "reentrant checkpoints": Checkpointed(reentrant=True),
}


def _float32(rank, size, folder):
    _join(folder)
    distances = {}
    for name, program in FLOAT32.items():
        ours = _train(Ours, program, rank, size)
        if name != "tied across units":
            distances[name, "FSDP2"] = _distance(ours, _train(Fsdp2, program, rank, size))
        if name == "reentrant checkpoints":  # DDP refuses micro-batches with these
            ours = _train(Ours, program, rank, size, num_micro=1)
            theirs = _train(StaticDdp, program, rank, size, num_micro=1)
        else:
            theirs = _train(Ddp, program, rank, size)
        distances[name, "DDP"] = _distance(ours, theirs)
        first, last = ours[0][2], ours[-1][2]
        assert any(not torch.equal(first[key], last[key]) for key in first)
    _leave()
    return distances


def test_float32_trains_as_fsdp2_and_ddp_do(tmp_path):
    """Accumulation, clipping, ties, uneven units, frozen parts, both kinds of checkpointing."""
    for distances in run_ranks(_float32, 2, str(tmp_path), timeout_s=600):
        assert len(distances) == 11
        assert {case: far for case, far in distances.items() if far > 1e-6} == {}


def _bfloat16(rank, size, folder):
    _join(folder)
    found = {}
    for name in ("plain", "uneven", "frozen", "checkpoints", "reentrant checkpoints"):
        program = FLOAT32[name]
        exact = _train(Ours, program, rank, size)
        ours = _train(Ours, program, rank, size, torch.bfloat16)
        theirs = _train(Fsdp2, program, rank, size, torch.bfloat16)
        found[name] = _distance(ours, exact), _distance(theirs, exact), _distance(ours, theirs)
    _leave()
    return found


def test_bfloat16_is_no_further_from_float32_than_fsdp2_is(tmp_path):
    """With accumulation, and with both kinds of checkpointing."""
    for found in run_ranks(_bfloat16, 2, str(tmp_path), timeout_s=600):
        for name, (ours, theirs, between) in found.items():
            assert 0 < ours <= 1.05 * theirs + 1e-6, (name, ours, theirs)
            assert between <= theirs, (name, between, theirs)


def _two(rank, size, folder):
    _join(folder)
    stories = []
    for way in (Ours, Fsdp2):
        one, two = models.make(seed=1), models.make(depth=2, seed=2)
        sharded = [way(model, Plain().units, None) for model in (one, two)]
        optimizers = [torch.optim.SGD(each.model.parameters(), lr=0.1) for each in sharded]
        losses = []
        for step in range(STEPS):
            index = step * size + rank
            for turn in range(2):  # each learns from the other, in turns
                student, teacher = sharded[turn], sharded[1 - turn]
                ids, _ = models.batch(index)
                with torch.no_grad():
                    wanted = teacher.model(ids)
                loss = models.loss_of(student.model, index)
                loss = loss + (student.model(ids) - wanted).square().mean()
                loss.backward()
                optimizers[turn].step()
                optimizers[turn].zero_grad()
                losses.append(loss.item())
        stories.append((losses, [copy.copy(each.state()) for each in sharded]))
    _leave()
    (losses, states), (their_losses, their_states) = stories
    assert losses == pytest.approx(their_losses, abs=1e-6)
    for state, theirs in zip(states, their_states, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=name)


def test_two_models_on_one_group_train_as_by_fsdp2(tmp_path):
    run_ranks(_two, 2, str(tmp_path), timeout_s=600)


class Compiled(Plain):
    def make(self):
        model = models.make()
        for block in model.blocks:
            block.compile(backend="inductor")
        return model


def _inductor(rank, size, folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor{rank}"
    _join(folder)
    ours, plain = (_train(Ours, way, rank, size) for way in (Compiled(), Plain()))
    theirs = _train(Fsdp2, Compiled(), rank, size)
    _leave()
    return _distance(ours, plain), _distance(ours, theirs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_blocks_compiled_by_inductor_train_as_by_fsdp2(tmp_path):
    for from_plain, from_theirs in run_ranks(_inductor, 2, str(tmp_path), timeout_s=600):
        assert from_plain < 1e-5
        assert from_theirs < 1e-6
