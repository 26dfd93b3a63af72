"""What a transformer computes, whole and in stages."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

import torch

from echelon.train.models import Transformer, make_stage, stage_ties
from echelon.train.models.rotary import RotaryTable, frequencies, rotate
from tests.train.models.shapes import GPT2, LLAMA, SHAPES

all_shapes = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


def _made(config):
    torch.manual_seed(7)
    model = Transformer(config)
    for parameter in model.parameters():  # far from where training starts, biases included
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _tokens(config, num_tokens=None, rows=2):
    random = torch.Generator().manual_seed(1)
    shape = (rows, num_tokens or config.context)
    return torch.randint(config.vocabulary, shape, generator=random)


@all_shapes
@torch.no_grad()
def test_a_token_changes_no_logits_before_it(config):
    model, tokens = _made(config), _tokens(config)
    other = tokens.clone()
    other[:, 10] = (other[:, 10] + 1) % config.vocabulary
    before, after = model(tokens), model(other)
    assert before.shape == (2, config.context, config.vocabulary)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.isclose(before[:, 10:], after[:, 10:]).all(dim=-1).any()


@all_shapes
@torch.no_grad()
def test_packed_documents_are_as_alone(config):
    model = _made(config)
    first, second, third = (_tokens(config, n, rows=1) for n in (9, 4, 11))
    packed = model(
        torch.cat((first, second, third), dim=1),
        torch.tensor([[0] * 9 + [1] * 4 + [2] * 11]),
    )
    alone = torch.cat([model(one) for one in (first, second, third)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_shared_keys_are_those_of_copied_heads():
    few = _made(LLAMA)
    many = Transformer(dataclasses.replace(LLAMA, kv_heads=LLAMA.heads))
    state = few.state_dict()
    for name, weight in state.items():
        if "attention.key" in name or "attention.value" in name:
            heads = weight.view(LLAMA.kv_heads, LLAMA.head_width, -1)
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    many.load_state_dict(state)
    tokens = _tokens(LLAMA)
    torch.testing.assert_close(few(tokens), many(tokens), rtol=1e-4, atol=1e-5)


def test_rotation_depends_on_the_distance_alone():
    table = RotaryTable(LLAMA).table
    query, key = torch.randn(2, 1, 1, 1, LLAMA.head_width)
    scores = [
        (rotate(query, table, start) * rotate(key, table, start - 3)).sum() for start in (3, 11, 23)
    ]
    torch.testing.assert_close(scores[1], scores[0])
    torch.testing.assert_close(scores[2], scores[0])


def test_llama3_scaling_divides_low_frequencies_and_leaves_high_ones():
    scaled = SHAPES["scaled"]
    plain = frequencies(dataclasses.replace(scaled, rotary_scaling=None))
    new = frequencies(scaled)
    turns = 8 * plain / (2 * torch.pi)
    assert torch.equal(new[turns < 1], plain[turns < 1] / 8)
    assert torch.equal(new[turns > 2], plain[turns > 2])
    between = (turns > 1) & (turns < 2)
    assert between.any()
    assert ((new < plain) & (new > plain / 8))[between].all()


@all_shapes
def test_from_the_meta_device_it_starts_as_when_made_directly(config):
    with torch.device("meta"):
        model = Transformer(config)
    assert all(one.is_meta for one in (*model.parameters(), *model.buffers()))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    assert (model.head.weight is model.token.weight) == config.tied
    if model.rotary is not None:
        assert torch.equal(model.rotary.table, RotaryTable(config).table)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (6**0.5 if residual else 1)
            assert 0.85 * std < parameter.std() < 1.15 * std, name


@pytest.mark.parametrize("config", [LLAMA, SHAPES["llama tied"]], ids=["untied", "tied"])
def test_converting_keeps_angles_exact_and_ties_whole(config):
    model = _made(config).to(torch.bfloat16)
    assert torch.equal(model.rotary.table, RotaryTable(config).table)
    assert (model.head.weight is model.token.weight) == config.tied
    assert model(_tokens(config)).dtype == torch.bfloat16
    assert "rotary.table" not in model.state_dict()


@all_shapes
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_stages_one_after_the_other_are_the_whole_model(config, packed):
    model, tokens = _made(config), _tokens(config)
    documents = torch.arange(config.context).expand(2, -1) // 7 if packed else None
    x = (tokens, documents) if packed else (tokens,)
    for index in range(3):
        out = make_stage(model, index, 3)(*x)
        x = out if isinstance(out, tuple) else (out,)
    assert len(x) == 1
    assert torch.equal(x[0], model(tokens, documents))


@all_shapes
def test_stages_have_the_whole_models_names(config):
    model = _made(config)
    stages = [make_stage(model, index, 2) for index in range(2)]
    assert [len(one.blocks) for one in stages] == [2, 1]
    whole = model.state_dict()
    assert set().union(*(one.state_dict() for one in stages)) == set(whole)
    trained = [dict(one.named_parameters()) for one in stages]
    assert set().union(*trained) == {name for name, _ in model.named_parameters()}
    for tie in stage_ties(config, 2):
        (first, _, name), (last, _, other) = (one.partition(":") for one in tie)
        assert (first, last, name) == ("0", "1", other)
        assert trained[0][name] is trained[1][name]
    assert len(stage_ties(config, 2)) == config.tied
    assert stage_ties(config, 1) == []


def test_one_stage_is_the_whole_model():
    model, tokens = _made(GPT2), _tokens(GPT2)
    stage = make_stage(model, 0, 1)
    assert torch.equal(stage(tokens), model(tokens))
    assert set(stage.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_hidden_is_what_the_head_multiplies(config):
    model, tokens = _made(config), _tokens(config)
    logits = torch.nn.functional.linear(model.hidden(tokens), model.head.weight)
    assert torch.equal(logits, model(tokens))


def test_wrong_calls_are_refused():
    model, tokens = Transformer(LLAMA), _tokens(LLAMA)
    with pytest.raises(ValueError, match="25 tokens, but the model's context is 24"):
        model(_tokens(LLAMA, 25))
    with pytest.raises(
        ValueError, match=r"documents have shape \[2, 23\], but tokens have \[2, 24\]"
    ):
        model(tokens, torch.zeros(2, 23, dtype=torch.int64))
    with pytest.raises(ValueError, match="3 blocks cannot form 4 stages"):
        make_stage(model, 0, 4)
    with pytest.raises(ValueError, match="stage 3 does not exist: there are 3 stages"):
        make_stage(model, 3, 3)


@all_shapes
def test_every_weight_gets_a_gradient(config):
    model, tokens = _made(config), _tokens(config)
    logits = model(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name not in ("blocks.0.attention.key.bias",):
            assert parameter.grad.any(), name
