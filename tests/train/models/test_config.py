"""Configurations: what is filled in, counted and refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from echelon.train.models import ModelConfig, RotaryScaling, Transformer, gpt2, llama
from tests.train.models.shapes import LLAMA, SHAPES, SIZES


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_parameters_are_counted_as_they_are_made(config):
    model = Transformer(config)
    assert sum(one.numel() for one in model.parameters()) == config.num_parameters()
    assert model.num_parameters() == config.num_parameters()


def test_published_models_have_their_published_sizes():
    assert gpt2().num_parameters() == 124_439_808
    assert gpt2("1.5b").num_parameters() == 1_557_611_200
    assert llama("1b").num_parameters() == 1_235_814_400
    assert llama("8b").num_parameters() == 8_030_261_248
    assert 20e6 < llama("20m").num_parameters() < 22e6


def test_flops_leave_out_what_is_only_looked_up():
    tied, untied = (ModelConfig(**SIZES, tied=tied) for tied in (True, False))
    assert tied.flops_per_token() == untied.flops_per_token()
    attention = 12 * 3 * 32 * 24
    assert tied.flops_per_token() == 6 * tied.num_parameters() + attention
    learned = ModelConfig(**SIZES, tied=True, positions="learned")
    assert learned.flops_per_token() == tied.flops_per_token()


def test_zeros_stand_for_the_usual_sizes():
    config = ModelConfig(**SIZES)
    assert (config.kv_heads, config.head_width, config.hidden) == (4, 8, 128)
    assert ModelConfig(**SIZES, mlp="gelu").hidden == 128
    assert llama(width=640, hidden=0).hidden == 1728  # 8/3 of it is 1706.7


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_a_config_is_plain_values_and_back(config):
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"heads": 3}, "width 32 cannot be divided evenly among 3 heads"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads .3., got 4"),
        ({"head_width": 7}, "even head_width, got 7"),
        ({"norm": "batch"}, "norm must be one of rms, layer, got 'batch'"),
        ({"mlp": "relu"}, "mlp must be one of swiglu, gelu, got 'relu'"),
        ({"positions": "alibi"}, "positions must be one of rotary, learned, got 'alibi'"),
        ({"eps": 0.0}, "must be positive"),
        ({"eps": float("nan")}, "must be positive"),
        (
            {"positions": "learned", "rotary_scaling": RotaryScaling(kind="linear", factor=2)},
            "rotary_scaling must be None if positions='learned'",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig(**(SIZES | changes))


@pytest.mark.parametrize("value", [1.5, "4", True])
def test_a_size_is_an_integer(value):
    with pytest.raises(TypeError, match="layers must be an integer"):
        ModelConfig(**(SIZES | {"layers": value}))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"kind": "yarn", "factor": 2.0}, "kind must be one of linear, llama3, got .yarn."),
        ({"kind": "linear", "factor": 0.5}, "at least 1"),
        ({"kind": "llama3", "factor": 2.0, "low_frequency_factor": 4.0}, "below high_freq"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused(values, match):
    with pytest.raises(ValueError, match=match):
        RotaryScaling(**values)


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(ValueError, match="unknown ModelConfig settings: depth"):
        ModelConfig.from_dict(LLAMA.to_dict() | {"depth": 3})
    with pytest.raises(ValueError, match="ModelConfig requires these settings: vocabulary"):
        ModelConfig.from_dict({k: v for k, v in SIZES.items() if k != "vocabulary"})
    with pytest.raises(ValueError, match="RotaryScaling requires these settings: factor"):
        ModelConfig.from_dict(SIZES | {"rotary_scaling": {"kind": "linear"}})
    with pytest.raises(ValueError, match="unknown size '7b'; use one of 20m, 1b, 8b"):
        llama("7b")
    with pytest.raises(ValueError, match="unknown ModelConfig settings: dropout"):
        gpt2(dropout=0.1)
