"""Small models of every kind that the tests use."""

from echelon.train.models import ModelConfig, RotaryScaling

SIZES = {"layers": 3, "width": 32, "heads": 4, "context": 24, "vocabulary": 53}

LLAMA = ModelConfig(**SIZES, kv_heads=2, hidden=48, rotary_base=500.0)
GPT2 = ModelConfig(
    **SIZES, norm="layer", mlp="gelu", positions="learned", tied=True, bias=True
)  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "llama tied": ModelConfig(**SIZES, tied=True),
    "one key head": ModelConfig(**SIZES, kv_heads=1),
    "wide heads": ModelConfig(**SIZES, head_width=16),
    "biased keys": ModelConfig(**SIZES, kv_heads=2, qkv_bias=True),
    "all biased": ModelConfig(**SIZES, bias=True),
    "rotary layer norm": ModelConfig(**SIZES, norm="layer", mlp="gelu", tied=True),
    "scaled": ModelConfig(
        **SIZES,
        rotary_scaling=RotaryScaling(
            kind="llama3", factor=8.0, original_context=8, high_frequency_factor=2.0
        ),
    ),
}
