"""What a layout takes of memory: against a real model's tensors, and by hand."""

from __future__ import annotations

import dataclasses

import pytest

from echelon.planner.layout import Job, Layout, layouts
from echelon.planner.memory import HEAP_ERROR, activation_bytes, memory
from echelon.planner.model import Model, read_model

torch = pytest.importorskip("torch", reason="torch: not there")

from echelon.train.models import Transformer, gpt2, llama  # noqa: E402 -- needs torch

TINY = {"context": 64, "vocabulary": 512, "width": 64, "heads": 4}
CONFIGS = {
    "gpt2": lambda **changes: gpt2(**TINY, **changes),
    "llama": lambda **changes: llama(**TINY, kv_heads=2, hidden=192, **changes),
    "all heads": lambda **changes: llama(**TINY, kv_heads=4, hidden=192, **changes),
}


def model_of(config):
    return Model(
        layers=config.layers, width=config.width, heads=config.heads, kv_heads=config.kv_heads,
        head_width=config.head_width, hidden=config.hidden, vocabulary=config.vocabulary,
        context=config.context, is_gated=config.mlp == "swiglu", is_tied=config.tied,
        learns_positions=config.positions == "learned",
    )  # fmt: skip


def kept_bytes(config, dtype):
    """Return what autograd keeps of a forward pass, beside the model itself."""
    model = Transformer(config).to(dtype)
    own = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.zeros(2, 64, dtype=torch.int64))
    assert logits.requires_grad
    return sum(storage.nbytes() for place, storage in kept.items() if place not in own)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_activations_are_what_autograd_keeps_of_a_block(name, dtype):
    one, two = (kept_bytes(CONFIGS[name](layers=layers), dtype) for layers in (1, 2))
    expected = activation_bytes(model_of(CONFIGS[name](layers=1)), 1, dtype.itemsize)
    # In bf16 each block casts its table of rotary angles, which a longer batch shares.
    assert (two - one) / 128 == pytest.approx(expected, rel=0 if dtype.itemsize == 4 else 0.02)


@pytest.mark.parametrize("config", [gpt2(), gpt2("1.5b"), llama("1b"), llama("8b")])
def test_parameters_and_operations_are_those_of_the_real_model(config):
    model = model_of(config)
    assert model.num_parameters == pytest.approx(config.num_parameters(), rel=2e-3)
    assert model.train_flops(config.context) == pytest.approx(config.flops_per_token(), rel=2e-3)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama-1b", "llama-8b"])
def test_presets_are_the_published_sizes(name):
    published = {
        "gpt2": gpt2(), "gpt2-xl": gpt2("1.5b"), "llama-1b": llama("1b"), "llama-8b": llama("8b"),
    }  # fmt: skip
    found = dataclasses.replace(read_model(name), context=published[name].context)
    assert found == model_of(published[name])


BLOCKS = Model(layers=8, width=128, heads=8, vocabulary=1024, context=64)
JOB = Job(ranks=8, ranks_per_node=8, batch=32, context=64)


def test_one_rank_holds_sixteen_bytes_per_parameter():
    found = memory(BLOCKS, Layout(microbatches=2), JOB)  # gradients are kept from the first
    state = found.weights + found.gradients + found.optimizer
    assert state == pytest.approx(16 * BLOCKS.num_parameters)
    assert found.units == 0


def test_gradients_take_the_room_of_activations_that_backward_has_freed():
    assert memory(BLOCKS, Layout(), JOB).gradients == 0
    short = dataclasses.replace(JOB, batch=1, context=1)
    found = memory(BLOCKS, Layout(), short)
    kept = found.activations + found.logits
    first_block = activation_bytes(BLOCKS, 1, 4)  # of one token: backward frees it last
    assert found.gradients == pytest.approx(4 * BLOCKS.num_parameters + first_block - kept)


# Resident peaks of benchmarks/planner.py's jobs, in MiB: with 8 and with 16 sequences a step.
# 0: not measured.
MEASURED = {
    Layout(shard=4): (323, 499),
    Layout(replicate=4): (487, 639),
    Layout(replicate=2, shard=2): (360, 540),
    Layout(tp=4): (483, 842),
    Layout(pp=4, schedule="1f1b", microbatches=8): (173, 275),
    Layout(pp=2, shard=2, schedule="1f1b", microbatches=4): (242, 347),
    Layout(shard=2, tp=2): (0, 630),
    Layout(shard=4, microbatches=2): (0, 425),
}


@pytest.mark.parametrize("layout", MEASURED, ids=lambda layout: layout.name)
def test_the_plan_of_host_memory_is_within_a_tenth_of_what_jobs_took(layout):
    model = Model(
        layers=8, width=384, heads=8, hidden=1024, vocabulary=2048, context=256, is_gated=True,
        learns_positions=False,
    )  # fmt: skip
    for batch, mib in zip((8, 16), MEASURED[layout], strict=True):
        if not mib:
            continue
        job = Job(ranks=4, ranks_per_node=4, batch=batch, context=256, on_host=True)
        assert memory(model, layout, job).total / 2**20 == pytest.approx(mib, rel=HEAP_ERROR)
        on_device = memory(model, layout, dataclasses.replace(job, on_host=False))
        assert on_device.heap == 0
        assert on_device.total < memory(model, layout, job).total


def test_shards_divide_the_state_and_replicas_do_not():
    one = memory(BLOCKS, Layout(), JOB)
    shards, replicas = (
        memory(BLOCKS, Layout(shard=8), JOB),
        memory(BLOCKS, Layout(replicate=8), JOB),
    )
    assert shards.optimizer == pytest.approx(one.optimizer / 8)
    assert replicas.optimizer == one.optimizer
    assert shards.activations == pytest.approx(one.activations / 8)
    assert replicas.units > 0


def test_tensor_parallelism_divides_the_blocks_but_not_the_norms():
    one, two = memory(BLOCKS, Layout(), JOB), memory(BLOCKS, Layout(tp=2), JOB)
    assert one.weights / 2 < two.weights < one.weights / 2 * 1.1
    assert one.activations / 2 < two.activations < one.activations


def test_the_first_stage_of_1f1b_keeps_as_many_micro_batches_as_there_are_stages():
    untied = dataclasses.replace(BLOCKS, is_tied=False, vocabulary=1)
    wide = Layout(pp=4, schedule="1f1b", microbatches=8)
    found = memory(untied, wide, JOB)
    tokens = 32 // 8 * 64
    assert found.activations == pytest.approx(4 * 2 * tokens * activation_bytes(untied, 1, 4))


def test_recomputation_keeps_the_inputs_of_blocks_and_one_block():
    found = memory(BLOCKS, Layout(recompute=True), JOB)
    tokens = 32 * 64
    inputs, block = 8 * 128 * 4 * tokens, activation_bytes(BLOCKS, 1, 4) * tokens
    last_norm = 2 * 128 * 4 * tokens
    assert found.activations == pytest.approx(inputs + block + last_norm)


def test_more_micro_batches_take_less_and_whole_gradients():
    one, four = (memory(BLOCKS, Layout(shard=4, microbatches=m), JOB) for m in (1, 4))
    assert four.activations == pytest.approx(one.activations / 4)
    assert four.logits == pytest.approx(one.logits / 4)
    assert four.units > one.units


def test_chunks_of_the_loss_divide_the_logits():
    chunked = memory(BLOCKS, Layout(), dataclasses.replace(JOB, loss_chunks=4))
    assert chunked.logits == pytest.approx(memory(BLOCKS, Layout(), JOB).logits / 4)


def test_every_layout_of_a_set_divides_ranks_and_batch():
    found = list(layouts(BLOCKS, JOB))
    assert len(found) == len(set(found))
    for layout in found:
        assert layout.pp * layout.data * layout.tp == 8
        assert JOB.batch % (layout.data * layout.microbatches) == 0
        assert BLOCKS.layers >= layout.pp * layout.chunks
    assert {(one.pp, one.replicate, one.shard, one.tp) for one in found} >= {
        (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 8, 1), (1, 1, 1, 8), (2, 1, 2, 2), (1, 2, 2, 2),
    }  # fmt: skip


def test_groups_of_tensor_parallelism_stay_inside_a_node():
    job = dataclasses.replace(JOB, ranks_per_node=2)
    assert max(one.tp for one in layouts(BLOCKS, job)) == 2
    assert Layout(tp=2, shard=2, replicate=2).spans("shard") == 4


def test_one_rank_has_one_mesh():
    job = Job(ranks=1, ranks_per_node=8, batch=2, context=64)
    assert {(one.microbatches, one.recompute) for one in layouts(BLOCKS, job)} == {
        (1, False), (1, True), (2, False), (2, True),
    }  # fmt: skip
