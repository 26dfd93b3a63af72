"""Read and write config.json, and reject models with features that are not implemented.

Unsupported settings and unknown keys are errors, because ignoring them could silently give wrong
results. In `ignore`, the caller can list unknown keys that do not affect the results.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from echelon.errors import CheckpointError
from echelon.train.models.config import ModelConfig
from echelon.train.models.hugging_face.rope import read_rope, write_rope

NAME = "config.json"
_GPT2, _LLAMA, _MISTRAL, _QWEN2 = "gpt2", "llama", "mistral", "qwen2"
_ARCHITECTURES = {
    _GPT2: "GPT2LMHeadModel",
    _LLAMA: "LlamaForCausalLM",
    _MISTRAL: "MistralForCausalLM",
    _QWEN2: "Qwen2ForCausalLM",
}
# Settings that do not affect the logits: how a model is stored, generates, or returns its results.
_WITHOUT_EFFECT = frozenset((
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype",
    "_name_or_path", "name_or_path", "initializer_range", "use_cache", "return_dict",
    "return_dict_in_generate", "torchscript", "output_attentions", "output_hidden_states",
    "output_scores", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "_commit_hash", "use_bfloat16", "gradient_checkpointing",
    "tokenizer_class", "prefix", "finetuning_task", "problem_type", "bos_token_id",
    "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "label2id", "num_labels",
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values",
    "task_specific_params", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "pretraining_tp", "tf_legacy_loss",
    "chunk_size_feed_forward", "is_decoder",
))  # fmt: skip
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OWN = frozenset(("architectures", "model_type", "torch_dtype", "dtype"))
_DROPOUTS = frozenset(("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"))
# Features that are off in a model of these shapes: the values that mean off.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "use_sliding_window": (False, None),
    "use_mrope": (False,),
    "partial_rotary_factor": (1.0, None),
}


class _Reader:
    """A reader that records which keys of a config.json have been read."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        self.path = path
        self._content = content
        self._seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key, or its default in `transformers` if the key is missing."""
        self._seen.add(key)
        return self._content.get(key, default)

    def need(self, key: str) -> Any:
        """Return the value of a required key.

        Raises:
            CheckpointError: the key is missing.
        """
        if key not in self._content:
            raise self.error(f"the file has no {key}")
        return self.get(key, None)

    def flag(self, key: str, default: bool) -> bool:
        """Return the boolean value of a key.

        Raises:
            CheckpointError: the value is not a boolean.
        """
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def finish(self, ignore: Collection[str]) -> None:
        """Check all keys that have not been read so far.

        Raises:
            CheckpointError: a key is unknown, or enables a feature that is not implemented.
        """
        left = set(self._content) - self._seen - _WITHOUT_EFFECT - set(ignore)
        for key in sorted(left & set(_MUST_BE)):
            if self._content[key] not in _MUST_BE[key]:
                raise self.error(f"{key} is {self._content[key]!r}, which is not implemented")
        unknown = sorted(left - set(_MUST_BE) - _DROPOUTS)
        if unknown:
            raise self.error(
                f"unknown keys may change what the model computes: {', '.join(unknown)}. If "
                "they do not, pass them as `ignore`"
            )

    def notes(self) -> list[str]:
        """Return the notes about the config that the caller should show to the user."""
        dropouts = [key for key in sorted(_DROPOUTS) if self._content.get(key, 0) != 0]
        if not dropouts:
            return []
        return [f"{self.path}: dropout is not implemented; ignored: {', '.join(dropouts)}"]

    def error(self, reason: str) -> CheckpointError:
        """Return an error that names the file and gives the reason."""
        return CheckpointError(f"{self.path}: {reason}", path=self.path)


def read_config(folder: str | os.PathLike[str], *, ignore: Collection[str] = ()) -> ModelConfig:
    """Read a model's config from the config.json in a folder.

    The function warns if the model has dropout, which is not implemented.

    Args:
        folder: a folder that contains the config.json of a GPT2LMHeadModel, LlamaForCausalLM,
            MistralForCausalLM or Qwen2ForCausalLM.
        ignore: keys that are unknown to echelon and do not affect what the model computes.

    Raises:
        CheckpointError: the file is missing or damaged, or describes a model that this package does
            not implement; the error message names the unsupported setting.
    """
    config, notes = read_with_notes(Path(folder), ignore)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return config


def read_with_notes(folder: Path, ignore: Collection[str]) -> tuple[ModelConfig, list[str]]:
    """Return the config that `read_config` returns, and the warnings that it shows."""
    reader = _Reader(folder / NAME, _load(folder / NAME))
    family = _family(reader)
    try:
        config = _READERS[family](reader)
    except (TypeError, ValueError) as error:
        raise reader.error(str(error)) from None
    reader.finish(ignore)
    return config, reader.notes()


def token_settings(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the special token IDs in a folder's config.json, for `save_pretrained`'s `extra`.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    content = _load(Path(folder) / NAME)
    return {key: content[key] for key in _TOKEN_IDS if key in content}


def family_of(config: ModelConfig) -> str:
    """Return the `transformers` model type that matches a config.

    Raises:
        ValueError: no model type matches the config.
    """
    shape = (config.norm, config.mlp, config.positions)
    usual = config.kv_heads == config.heads and config.heads * config.head_width == config.width
    if shape == ("layer", "gelu", "learned") and config.bias and usual:
        return _GPT2
    if shape == ("rms", "swiglu", "rotary"):
        return _QWEN2 if config.qkv_bias and not config.bias else _LLAMA
    raise ValueError(
        "transformers supports models like GPT-2 (norm='layer', mlp='gelu', "
        "positions='learned', bias=True, as many kv_heads as heads) and Llama (norm='rms', "
        f"mlp='swiglu', positions='rotary'), but not {config}"
    )


def check_extra(extra: Mapping[str, Any]) -> None:
    """Check that extra settings for config.json do not change what `transformers` computes.

    Raises:
        ValueError: a setting would change the computation, or is written by this package itself.
    """
    refused = sorted(set(extra) - (_WITHOUT_EFFECT - _OWN))
    if refused:
        raise ValueError(
            f"these extra settings of config.json are not allowed: {', '.join(refused)}"
        )


def write_config(config: ModelConfig, dtype: str, extra: Mapping[str, Any]) -> bytes:
    """Return the config.json of a model.

    Args:
        config: the model's config.
        dtype: the dtype of the stored weights, such as "bfloat16".
        extra: further keys that do not affect what the model computes, such as `eos_token_id`.

    Raises:
        ValueError: no `transformers` model type matches the config, or an extra key is not allowed.
    """
    family = family_of(config)
    check_extra(extra)
    content = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "torch_dtype": dtype,
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocabulary,
        **(_gpt2_content(config) if family == _GPT2 else _llama_content(config, family)),
        **dict.fromkeys(_TOKEN_IDS),  # transformers' defaults are those of one vocabulary
        **extra,
    }
    return json.dumps(content, indent=2).encode() + b"\n"


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", path=path) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: the file is not valid JSON ({error})", path=path) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: the file does not contain a JSON object", path=path)
    return content


def _family(reader: _Reader) -> str:
    family = reader.need("model_type")
    known = ", ".join(_ARCHITECTURES.values())
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise reader.error(
            f"model_type {family!r} is not implemented; supported architectures: {known}"
        )
    found = reader.get("architectures", None)
    if found and found != [_ARCHITECTURES[family]]:
        raise reader.error(
            f"model_type {family!r} with architectures {found} is not implemented; supported "
            f"architectures: {known}"
        )
    return family


def _gpt2(reader: _Reader) -> ModelConfig:
    context = reader.need("n_positions")
    if reader.get("n_ctx", context) != context:
        raise reader.error("n_ctx differs from n_positions")
    return ModelConfig(
        layers=reader.need("n_layer"),
        width=reader.need("n_embd"),
        heads=reader.need("n_head"),
        context=context,
        vocabulary=reader.need("vocab_size"),
        hidden=reader.get("n_inner", None) or 0,
        norm="layer",
        mlp="gelu",
        positions="learned",
        tied=reader.flag("tie_word_embeddings", True),
        bias=True,
        eps=reader.get("layer_norm_epsilon", 1e-5),
    )


def _llama_like(reader: _Reader, **settings: Any) -> ModelConfig:
    heads = reader.need("num_attention_heads")
    base, scaling = read_rope(reader)
    return ModelConfig(
        layers=reader.need("num_hidden_layers"),
        width=reader.need("hidden_size"),
        heads=heads,
        kv_heads=_size(reader, "num_key_value_heads", heads),
        head_width=_size(reader, "head_dim", 0),
        hidden=reader.need("intermediate_size"),
        context=reader.need("max_position_embeddings"),
        vocabulary=reader.need("vocab_size"),
        rotary_base=base,
        rotary_scaling=scaling,
        tied=reader.flag("tie_word_embeddings", False),
        eps=reader.get("rms_norm_eps", 1e-6),
        **settings,
    )


def _size(reader: _Reader, key: str, default: int) -> int:
    value = reader.get(key, None)
    if value == 0:
        raise reader.error(f"{key} must not be 0")
    return default if value is None else value


def _llama(reader: _Reader) -> ModelConfig:
    bias = reader.flag("attention_bias", False)
    if reader.flag("mlp_bias", False) != bias:
        raise reader.error("attention_bias and mlp_bias must be equal")
    return _llama_like(reader, bias=bias)


def _mistral(reader: _Reader) -> ModelConfig:
    reader.need("num_key_value_heads")  # the default of transformers is 8
    window = reader.get("sliding_window", 4096)
    context = reader.need("max_position_embeddings")
    if window is not None and not (isinstance(window, int) and window >= context):
        raise reader.error(f"sliding_window {window!r} is not implemented")
    return _llama_like(reader)


def _qwen2(reader: _Reader) -> ModelConfig:
    reader.need("num_key_value_heads")  # the default of transformers is 32
    for key in ("sliding_window", "max_window_layers"):
        reader.get(key, None)  # without effect, as use_sliding_window must be false
    kinds = reader.get("layer_types", None)
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise reader.error(
            f"layer_types must contain only 'full_attention', got {sorted(set(kinds))}"
        )
    return _llama_like(reader, qkv_bias=True)


_READERS: dict[str, Callable[[_Reader], ModelConfig]] = {
    _GPT2: _gpt2,
    _LLAMA: _llama,
    _MISTRAL: _mistral,
    _QWEN2: _qwen2,
}


def _gpt2_content(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "n_embd": config.width,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.context,
        "n_ctx": config.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": config.eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _llama_content(config: ModelConfig, family: str) -> dict[str, Any]:
    content = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": config.eps,
        "attention_dropout": 0.0,
        **write_rope(config),
    }
    if family == _QWEN2:
        return content | {"use_sliding_window": False}
    return content | {"attention_bias": config.bias, "mlp_bias": config.bias}
