"""The transformer does what the word says."""

from __future__ import annotations

import pytest
import torch
from gpt.model.presets import PRESETS
from gpt.model.transformer import GPT, GPTConfig, rotary_table, rotate


@pytest.fixture
def model(tiny_config) -> GPT:
    torch.manual_seed(0)
    return GPT(tiny_config)


def test_no_position_sees_what_comes_after_it(model):
    text = torch.arange(16)[None] * 7 % 256
    changed = text.clone()
    changed[0, 9:] += 1
    before, after = model(text), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9], after[0, 9])


def test_every_position_sees_what_came_before_it(model):
    text = torch.arange(16)[None]
    changed = text.clone()
    changed[0, 0] += 100
    assert not torch.allclose(model(text)[0, -1], model(changed)[0, -1], atol=0, rtol=0)


def test_attention_depends_on_distance_alone():
    """Rotary positions: scores stay as they are when query and key move together."""
    table = rotary_table(10, 8)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        turned_query = rotate(query, table[:, query_position : query_position + 1])
        turned_key = rotate(key, table[:, key_position : key_position + 1])
        return (turned_query * turned_key).sum().item()

    assert score(5, 3) == pytest.approx(score(9, 7), abs=1e-5)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-3)


def test_an_untrained_model_knows_nothing(model):
    logits = model(torch.arange(16)[None])
    uniform = torch.log(torch.tensor(256.0))
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(entropy, uniform.expand_as(entropy), atol=0.1)


def test_embedding_and_head_are_one(model):
    config = model.config
    block = 12 * config.width**2 + 4 * config.width
    expected = config.vocabulary * config.width + config.layers * block + 2 * config.width
    assert model.num_parameters() == expected == sum(p.numel() for p in model.parameters())


def test_flops_follow_the_stated_formula(model):
    attention = 12 * 1 * 16 * 16
    assert model.flops_per_token() == 6 * model.num_parameters() + attention


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0; it must be at least 1"),
        ({"heads": 3}, "does not split into 3 heads"),
        ({"width": 18, "heads": 6}, "heads of an even size"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    sizes = {"layers": 1, "width": 16, "heads": 2, "context": 8}
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**sizes, **change})


@pytest.mark.parametrize(("preset", "millions"), [("shakespeare", 10.65), ("gpt2", 123.6)])
def test_the_presets_have_the_sizes_of_those_they_are_laid_beside(preset, millions):
    sizes = PRESETS[preset]["model"]
    config = GPTConfig(
        **{name: sizes[name] for name in ("layers", "width", "heads", "context", "vocabulary")}
    )
    with torch.device("meta"):
        model = GPT(config)
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.05)
