"""Against `transformers` itself: its random models load, compute the same, and are written back."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="pip install echelon[hf]")

import torch
import transformers

from echelon.train.models import Transformer, llama
from echelon.train.models.hugging_face import load_pretrained, read_config, save_pretrained
from tests.support.ranks import run_ranks
from tests.train.models.hugging_face_ranks import from_folder_to_shards

LLAMA = {
    "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 101,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 101,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
CASES = {
    "llama": ("Llama", LLAMA),
    "llama tied": ("Llama", LLAMA | {"tie_word_embeddings": True}),
    "llama3 scaling": ("Llama", LLAMA | {"rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "linear scaling": (
        "Llama", LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "llama with biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "narrow heads": ("Llama", LLAMA | {"head_dim": 4, "rms_norm_eps": 1e-3}),
    "mistral": ("Mistral", LLAMA | {"sliding_window": None}),
    "qwen2": ("Qwen2", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", GPT2),
    "gpt2 untied": ("GPT2", GPT2 | {"tie_word_embeddings": False, "n_inner": 100}),
}  # fmt: skip
HEADS = {"GPT2": "GPT2LMHeadModel"}


def _theirs(kind, settings):
    """Return a model with weights far from where training starts."""
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            one.normal_(std=0.15)
            if "norm" in name or ".ln_" in name:
                one += 1
    return model


def _tokens(vocabulary, num_tokens=64):
    random = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (2, num_tokens), generator=random)


def _load_theirs(folder, **settings):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings).eval()


def _assert_same(one, other):
    assert other.abs().max() > 0.5  # else the difference below says nothing
    assert (one - other).abs().max() <= 1e-5 * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(("kind", "settings"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("size", ["10GB", "40KB"], ids=["one file", "pieces"])
@torch.no_grad()
def test_logits_are_theirs_and_stay_so_when_written_back(kind, settings, size, tmp_path):
    theirs = _theirs(kind, settings)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    ours = load_pretrained(tmp_path / "theirs")
    tokens = _tokens(101)
    expected = theirs(tokens).logits
    _assert_same(ours(tokens), expected)
    max_piece_bytes = 40_000 if size == "40KB" else 1 << 30
    save_pretrained(ours, tmp_path / "ours", max_piece_bytes=max_piece_bytes)
    num_pieces = len(list((tmp_path / "ours").glob("*.safetensors")))
    assert (num_pieces > 3) == (size == "40KB")
    back = _load_theirs(tmp_path / "ours")
    _assert_same(back(tokens).logits, expected)
    assert back.config.tie_word_embeddings == ours.config.tied
    before, after = theirs.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@torch.no_grad()
def test_bfloat16_weights_load_in_float32_or_as_they_are(tmp_path):
    theirs = _theirs("Llama", LLAMA).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = _tokens(101)
    wide = load_pretrained(tmp_path / "theirs")
    _assert_same(
        wide(tokens), _load_theirs(tmp_path / "theirs", dtype=torch.float32)(tokens).logits
    )
    half = load_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    assert half(tokens).dtype == torch.bfloat16
    torch.testing.assert_close(half(tokens), theirs(tokens).logits, rtol=0.05, atol=0.1)
    save_pretrained(wide, tmp_path / "ours", dtype=torch.bfloat16, extra={"eos_token_id": 7})
    back = _load_theirs(tmp_path / "ours", dtype="auto")
    assert back.dtype == torch.bfloat16
    assert back.config.eos_token_id == 7
    assert all(
        torch.equal(one, other)
        for one, other in zip(theirs.parameters(), back.parameters(), strict=True)
    )


def test_a_new_model_of_ours_is_theirs(tmp_path):
    torch.manual_seed(0)
    ours = Transformer(llama("20m"))
    save_pretrained(ours, tmp_path)
    assert read_config(tmp_path) == ours.config
    tokens = _tokens(ours.config.vocabulary, 200)
    with torch.no_grad():
        difference = (_load_theirs(tmp_path)(tokens).logits - ours(tokens)).abs().max()
    assert difference < 1e-5


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_shards_of_two_ranks_train_and_are_written_back(case, tmp_path):
    """Theirs -> two ranks of shards, which train -> theirs, with the logits of the shards."""
    kind, settings = CASES[case]
    _theirs(kind, settings).save_pretrained(tmp_path / "theirs")
    tokens = _tokens(101, 33)
    losses, logits = zip(
        *run_ranks(
            from_folder_to_shards, 2, tmp_path / "theirs", tmp_path / "ours", tokens.tolist(),
            timeout_s=120.0,
        ),
        strict=True,
    )  # fmt: skip
    assert all(one[-1] < one[0] for one in losses)
    back = _load_theirs(tmp_path / "ours")
    with torch.no_grad():
        expected = back(tokens[:, :-1]).logits
    _assert_same(torch.tensor(logits[0]), expected)
    _assert_same(torch.tensor(logits[1]), expected)
    assert not list((tmp_path / "ours").glob(".*"))


@torch.no_grad()
def test_twenty_million_parameters(tmp_path):
    """The whole way, of a Llama of 20M parameters with eight heads over two of keys."""
    settings = {
        "num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 8,
        "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 16_384,
        "max_position_embeddings": 512,
    }  # fmt: skip
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**settings)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert 20e6 < ours.num_parameters() == sum(one.numel() for one in theirs.parameters())
    tokens = _tokens(16_384, 256)
    assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-5
    tokens = tokens[:, :65]
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    losses = []
    with torch.enable_grad():
        for _ in range(5):
            logits = ours(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    save_pretrained(ours, tmp_path / "ours", max_piece_bytes=20_000_000)
    back = _load_theirs(tmp_path / "ours")
    assert (ours(tokens) - back(tokens).logits).abs().max() < 1e-5


def test_a_config_is_read_as_theirs_is(tmp_path):
    """What they write of a config of ours, and what we write of theirs, is the same model."""
    for kind, settings in CASES.values():
        theirs = getattr(transformers, f"{kind}Config")(**settings)
        theirs.save_pretrained(tmp_path)
        content = json.loads((tmp_path / "config.json").read_text())
        assert "architectures" not in content or content["architectures"] is None
        config = read_config(tmp_path)
        assert config.tied == theirs.tie_word_embeddings
        assert config.vocabulary == 101
