"""Folders of `transformers`, without that package: names, errors, ranks and broken writes."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file, save_file

from echelon.dist.checkpoint import save
from echelon.errors import CheckpointError
from echelon.train.models import ModelConfig, RotaryScaling, Transformer, make_stage
from echelon.train.models.hugging_face import (
    convert,
    load_pretrained,
    load_weights,
    read_config,
    save_pretrained,
    writing,
)
from echelon.train.models.hugging_face.reading import config_of
from tests.support.ranks import run_ranks
from tests.train.models.hugging_face_ranks import (
    from_folder_through_layout,
    from_folder_to_shards,
    from_stages_to_folder,
)
from tests.train.models.shapes import GPT2, LLAMA, SHAPES

STORED = {name: one for name, one in SHAPES.items() if name != "rotary layer norm"}
all_stored = pytest.mark.parametrize("config", STORED.values(), ids=STORED)


def _made(config, seed=1):
    torch.manual_seed(seed)
    model = Transformer(config)
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.3)
    return model


def _assert_equal(one, other):
    there = other.state_dict()
    assert one.state_dict().keys() == there.keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, there[name]), name


def _edit(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "GONE"}))


@all_stored
@pytest.mark.parametrize("max_piece_bytes", [1 << 30, 20_000])
def test_what_is_written_is_read(config, max_piece_bytes, tmp_path):
    model = _made(config)
    save_pretrained(model, tmp_path, max_piece_bytes=max_piece_bytes)
    assert read_config(tmp_path) == config
    back = load_pretrained(tmp_path)
    _assert_equal(model, back)
    assert (back.head.weight is back.token.weight) == config.tied
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), back(tokens))


def test_their_names_and_shapes(tmp_path):
    model = _made(GPT2)
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    block = model.blocks[1].attention
    parts = [block.query, block.key, block.value]
    weight = torch.cat([part.weight for part in parts]).t()
    assert torch.equal(stored["transformer.h.1.attn.c_attn.weight"], weight)
    bias = torch.cat([part.bias for part in parts])
    assert torch.equal(stored["transformer.h.1.attn.c_attn.bias"], bias)
    assert torch.equal(stored["transformer.h.1.mlp.c_fc.weight"], model.blocks[1].mlp.up.weight.t())
    assert torch.equal(stored["transformer.wpe.weight"], model.position.weight)
    assert "lm_head.weight" not in stored
    assert len(stored) == 3 * 12 + 4
    model = _made(LLAMA)
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        stored["model.layers.2.self_attn.k_proj.weight"], model.blocks[2].attention.key.weight
    )
    assert torch.equal(stored["lm_head.weight"], model.head.weight)
    assert len(stored) == 3 * 9 + 3


def test_published_gpt2_has_no_prefix_and_keeps_its_masks(tmp_path):
    model = _made(GPT2)
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): one.clone() for name, one in stored.items()}
    bare |= {f"h.{n}.attn.bias": torch.ones(1, 1, 24, 24).tril() for n in range(3)}
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, tmp_path / "model.safetensors")
    _assert_equal(model, load_pretrained(tmp_path))
    bare["lm_head.weight"] = bare["wte.weight"].clone()
    save_file(bare, tmp_path / "model.safetensors")
    _assert_equal(model, load_pretrained(tmp_path))
    bare["lm_head.weight"][52, 31] += 1
    save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from .*wte.weight"):
        load_pretrained(tmp_path)


def test_types_are_converted_on_the_way(tmp_path):
    model = _made(LLAMA)
    save_pretrained(model, tmp_path, dtype=torch.bfloat16, extra={"eos_token_id": 3})
    content = json.loads((tmp_path / "config.json").read_text())
    assert (content["torch_dtype"], content["eos_token_id"]) == ("bfloat16", 3)
    stored = load_file(tmp_path / "model.safetensors")
    assert {one.dtype for one in stored.values()} == {torch.bfloat16}
    wide = load_pretrained(tmp_path)
    assert torch.equal(wide.token.weight, model.token.weight.to(torch.bfloat16).float())
    half = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.token.weight.dtype == torch.bfloat16
    assert half.rotary.table.dtype == torch.float32


def test_a_context_may_change_where_positions_are_rotary(tmp_path):
    model = _made(LLAMA)
    save_pretrained(model, tmp_path)
    tokens = torch.arange(12)[None]
    longer = load_pretrained(tmp_path, context=100)
    assert longer.config.context == 100
    assert torch.equal(longer(tokens), model(tokens))
    save_pretrained(_made(GPT2), tmp_path)
    with pytest.raises(ValueError, match="has 24 learned positions"):
        load_pretrained(tmp_path, context=12)


def test_a_model_of_the_same_shapes_and_another_meaning_is_refused(tmp_path):
    save_pretrained(_made(LLAMA), tmp_path)
    other = Transformer(dataclasses.replace(LLAMA, rotary_base=10_000.0, eps=1e-6))
    with pytest.raises(ValueError, match=r"rotary_base 500.0 \(not 10000.0\), eps 1e-05"):
        load_weights(tmp_path, other)
    with pytest.raises(ValueError, match="Linear is not a Transformer"):
        load_weights(tmp_path, torch.nn.Linear(2, 2))


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not implemented"),
        ({"model_type": "GONE"}, "the file has no model_type"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "'llama' with architectures .* is not impl",
        ),
        ({"hidden_size": "GONE"}, "the file has no hidden_size"),
        ({"hidden_size": "32"}, "width must be an integer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not implemented"),
        ({"attention_bias": True}, "attention_bias and mlp_bias must be equal"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' with factor is not",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope scaling of kind unknown"),
        ({"rope_scaling": LLAMA3 | {"type": "linear"}}, "rope scaling of kind"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}}, "beta, factor is not"),
        ({"rope_scaling": {"type": "linear", "factor": 0.1}}, "at least 1"),
        ({"rope_scaling": 2.0}, "rope_scaling must be a JSON object with settings, got 2.0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            "but rope_parameters gives",
        ),
        ({"rope_parameters": LLAMA3, "rope_scaling": {"type": "default"}}, "parameters contradict"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"final_logit_softcapping": 30.0}, "unknown keys .*: final_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, "unknown keys .*: quantization_config"),
        ({"num_key_value_heads": 3}, "heads must be a multiple of kv_heads .3., got 4"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings must be true or false, got None"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window 8 is not implemented"),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True},
            "use_sliding_window is True",
        ),
        (
            {
                "model_type": "qwen2",
                "architectures": None,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types must contain only 'full_attention'",
        ),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused(changes, match, tmp_path):
    if changes.get("model_type") in ("mistral", "qwen2"):
        changes |= {"architectures": None, "attention_bias": "GONE", "mlp_bias": "GONE"}
    save_pretrained(_made(LLAMA), tmp_path)
    _edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=match):
        load_pretrained(tmp_path)


def test_settings_of_both_ages_and_other_families_are_read(tmp_path):
    save_pretrained(_made(LLAMA), tmp_path)
    _edit(tmp_path, rope_scaling=LLAMA3)
    scaling = RotaryScaling(kind="llama3", factor=8.0, original_context=16)
    scaled = dataclasses.replace(LLAMA, rotary_scaling=scaling)
    assert read_config(tmp_path) == scaled
    _edit(
        tmp_path, rope_scaling="GONE", rope_theta="GONE",
        rope_parameters=LLAMA3 | {"rope_theta": 500.0},
    )  # fmt: skip
    assert read_config(tmp_path) == scaled
    _edit(tmp_path, rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    assert read_config(tmp_path) == LLAMA
    _edit(tmp_path, sweetness=3)
    assert read_config(tmp_path, ignore=["sweetness"]) == LLAMA
    _edit(tmp_path, sweetness="GONE", attention_dropout=0.1)
    with pytest.warns(UserWarning, match="dropout is not implemented; ignored: attention_dropout"):
        assert read_config(tmp_path) == LLAMA
    gone = dict.fromkeys(("attention_bias", "mlp_bias", "attention_dropout"), "GONE")
    _edit(tmp_path, model_type="mistral", architectures=None, sliding_window=4096, **gone)
    assert read_config(tmp_path) == LLAMA
    _edit(tmp_path, num_key_value_heads="GONE")
    with pytest.raises(CheckpointError, match="the file has no num_key_value_heads"):
        read_config(tmp_path)


def test_tensors_that_do_not_fit_are_named_in_one_error(tmp_path):
    save_pretrained(_made(LLAMA), tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    del stored["model.norm.weight"]
    stored["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    stored["model.layers.1.mlp.up_proj.weight"] = torch.ones(47, 32)
    save_file(stored, path)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(tmp_path)
    text = str(caught.value)
    assert "missing: model.norm.weight;" in text
    assert "not part of a model with this config: model.layers.0.self_attn.q_norm.weight" in text
    assert "model.layers.1.mlp.up_proj.weight [47, 32], not [48, 32]" in text


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json: No such file"):
        load_pretrained(tmp_path)
    save_pretrained(_made(LLAMA), tmp_path, max_piece_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    piece = sorted(tmp_path.glob("*.safetensors"))[1]
    content = piece.read_bytes()
    piece.write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=rf"{piece.name} is not a safetensors file"):
        load_pretrained(tmp_path)
    piece.unlink()
    with pytest.raises(CheckpointError, match=rf"{piece.name}: No such file"):
        load_pretrained(tmp_path)
    piece.write_bytes(content)
    cases = [
        ({"x.weight": "../x.safetensors"}, "must map tensor names to files in the same folder"),
        ({"x.weight": piece.name}, "lists tensors that are missing: x.weight"),
        ({"model.norm.weight": piece.name}, "index.json does not list for this file"),
    ]
    for change, match in cases:
        changed = {"weight_map": index["weight_map"] | change}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=match):
            load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a valid index"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"its .bin files are pickles"):
        load_pretrained(tmp_path)


def test_what_transformers_does_not_have_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"models like GPT-2 .* and Llama"):
        save_pretrained(_made(SHAPES["rotary layer norm"]), tmp_path / "a")
    with pytest.raises(ValueError, match="max_piece_bytes must be at least 1, got 0"):
        save_pretrained(_made(LLAMA), tmp_path / "a", max_piece_bytes=0)
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch\.int8"):
        save_pretrained(_made(LLAMA), tmp_path / "a", dtype=torch.int8)
    extra = {"hidden_act": "gelu", "model_type": "x"}
    with pytest.raises(ValueError, match="not allowed: hidden_act, model_type"):
        save_pretrained(_made(LLAMA), tmp_path / "a", extra=extra)
    assert not (tmp_path / "a").exists()


def test_a_write_that_is_cut_short_leaves_the_old_model_or_none(tmp_path, monkeypatch):
    old, new = _made(LLAMA, seed=1), _made(GPT2, seed=2)
    calls = {"NewFile": 0, "sync_folder": 1, "write_whole": 2}
    for name in calls:
        save_pretrained(old, tmp_path, max_piece_bytes=20_000)
        (tmp_path / "tokenizer.json").write_text("{}")

        def fail(*_args, _name=name, **_settings):
            raise OSError(28, _name)

        with monkeypatch.context() as patch:
            patch.setattr(writing, name, fail)
            with pytest.raises(OSError, match=name):
                save_pretrained(new, tmp_path, max_piece_bytes=30_000)
        if name == "NewFile":  # a full disk: nothing was touched
            _assert_equal(load_pretrained(tmp_path), old)
        else:
            with pytest.raises(CheckpointError, match=r"config.json: No such file"):
                load_pretrained(tmp_path)
        assert (tmp_path / "tokenizer.json").exists()
    save_pretrained(new, tmp_path)
    _assert_equal(load_pretrained(tmp_path), new)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}


def test_a_checkpoint_becomes_a_folder(tmp_path):
    model, other = _made(LLAMA), torch.nn.Linear(2, 2)
    save(tmp_path / "c", {"net": {"model": model}, "other": other, "step": 3})
    convert(tmp_path / "c", tmp_path / "hf", LLAMA, key="net/model")
    _assert_equal(load_pretrained(tmp_path / "hf"), model)
    with pytest.raises(ValueError, match=r"pass key= to choose a module .modules: net/model"):
        convert(tmp_path / "c", tmp_path / "hf", LLAMA)
    with pytest.raises(ValueError, match="step is not a module of this checkpoint"):
        convert(tmp_path / "c", tmp_path / "hf", LLAMA, key="step")
    with pytest.raises(
        ValueError, match=r"not match the config .missing weights: blocks.0.attention"
    ):
        convert(tmp_path / "c", tmp_path / "hf", LLAMA, key="other")
    fewer = dataclasses.replace(LLAMA, kv_heads=4)
    with pytest.raises(
        ValueError, match=r"weights of the wrong shape: blocks.0.attention.key.weight"
    ):
        convert(tmp_path / "c", tmp_path / "hf", fewer, key="net/model")
    _assert_equal(load_pretrained(tmp_path / "hf"), model)


def test_a_stage_loads_its_part_alone(tmp_path):
    """One process that has a stage only is an error: what it lacks is nowhere."""
    model = _made(GPT2)
    save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="but not in this module"):
        load_weights(tmp_path, make_stage(Transformer(GPT2), 0, 2))


@pytest.mark.ranks
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_two_ranks_load_shards_and_write_them(config, tmp_path):
    save_pretrained(_made(config), tmp_path / "a", max_piece_bytes=20_000)
    tokens = torch.randint(config.vocabulary, (2, 21))
    ranks = run_ranks(
        from_folder_to_shards, 2, tmp_path / "a", tmp_path / "b", tokens.tolist(), timeout_s=120.0
    )
    back = load_pretrained(tmp_path / "b")
    assert all(losses[-1] < losses[0] for losses, _ in ranks)
    for _, logits in ranks:
        torch.testing.assert_close(torch.tensor(logits), back(tokens[:, :-1]), rtol=1e-4, atol=1e-5)
    assert {path.suffix for path in (tmp_path / "b").iterdir()} == {".json", ".safetensors"}


@pytest.mark.ranks
def test_stages_load_their_parts_and_are_written_as_one_model(tmp_path):
    model = _made(GPT2)
    save_pretrained(model, tmp_path / "a")
    ranks = run_ranks(from_stages_to_folder, 2, tmp_path / "a", tmp_path / "b", timeout_s=120.0)
    _assert_equal(load_pretrained(tmp_path / "b"), model)
    error, refused = ranks[0], ranks[1]
    assert error == refused
    assert "contains a different model: heads 4 (not 8)" in error
    assert read_config(tmp_path / "b") == ModelConfig.from_dict(GPT2.to_dict())


def test_the_config_of_several_stages_is_that_of_each():
    stages = [make_stage(Transformer(GPT2), index, 3) for index in range(3)]
    assert config_of(torch.nn.ModuleList(stages)) == GPT2
    with pytest.raises(ValueError, match="is not a Transformer"):
        config_of(torch.nn.ModuleList([*stages, Transformer(LLAMA)]))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("config", "sizes", "axes"),
    [(LLAMA, (2,), ("tp",)), (GPT2, (2, 2), ("pp", "tp"))],
    ids=["llama tp", "gpt2 pp tp"],
)
def test_slices_of_layers_load_and_are_written_as_one_model(config, sizes, axes, tmp_path):
    model = _made(config)
    save_pretrained(model, tmp_path / "a")
    tokens = torch.randint(config.vocabulary, (2, 21))
    losses = run_ranks(
        from_folder_through_layout,
        math.prod(sizes),
        tmp_path / "a",
        tmp_path / "b",
        sizes,
        axes,
        tokens.tolist(),
        timeout_s=120.0,
    )
    with torch.no_grad():
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert sum(losses) == pytest.approx(loss.item(), abs=1e-5)
    _assert_equal(load_pretrained(tmp_path / "b"), model)
