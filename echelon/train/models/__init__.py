"""Define models with the architectures of GPT-2 and Llama."""

from echelon.train.models.config import ModelConfig, RotaryScaling
from echelon.train.models.presets import gpt2, llama
from echelon.train.models.stage import TransformerStage, make_stage, stage_ties
from echelon.train.models.transformer import Transformer

__all__ = [
    "ModelConfig",
    "RotaryScaling",
    "Transformer",
    "TransformerStage",
    "make_stage",
    "stage_ties",
    "gpt2",
    "llama",
]
