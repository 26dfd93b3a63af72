"""`python -m echelon.train.models`: a folder of transformers to a checkpoint, and back."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch

from echelon.dist.checkpoint import load, save
from echelon.train.models import Transformer
from echelon.train.models.__main__ import main
from echelon.train.models.hugging_face import load_pretrained, save_pretrained
from tests.train.models.shapes import GPT2, LLAMA


def _run(*arguments):
    return main([str(one) for one in arguments])


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_folder_becomes_a_checkpoint_and_returns(config, tmp_path, capsys):
    model = Transformer(config)
    save_pretrained(model, tmp_path / "a", extra={"eos_token_id": 5})
    assert _run("show", tmp_path / "a") == 0
    assert f"parameters: {config.num_parameters():,}" in capsys.readouterr().out
    assert _run("import", tmp_path / "a", tmp_path / "c") == 0
    loaded = Transformer(config)
    assert load(tmp_path / "c", {"model": loaded})["model_config"] == config.to_dict()
    assert _run("export", tmp_path / "c", tmp_path / "b", "--max-piece-bytes", 9000) == 0
    assert _run("export", tmp_path / "c", tmp_path / "d", "--like", tmp_path / "a") == 0
    for folder in ("b", "d"):
        back = load_pretrained(tmp_path / folder)
        assert back.config == config
        for name, one in model.state_dict().items():
            assert torch.equal(one, back.state_dict()[name]), name
            assert torch.equal(one, loaded.state_dict()[name]), name
    assert len(list((tmp_path / "b").glob("model-*-of-*.safetensors"))) > 1
    assert json.loads((tmp_path / "d" / "config.json").read_text())["eos_token_id"] == 5


def test_a_checkpoint_without_a_config_needs_one(tmp_path, capsys):
    model = Transformer(LLAMA)
    save(tmp_path / "c", {"model": model})
    assert _run("export", tmp_path / "c", tmp_path / "a") == 1
    assert (
        "the checkpoint has no model_config; pass --like FOLDER or --config FILE"
        in capsys.readouterr().err
    )
    (tmp_path / "config.json").write_text(json.dumps(LLAMA.to_dict()))
    settings = ("--config", tmp_path / "config.json", "--dtype", "bfloat16")
    assert _run("export", tmp_path / "c", tmp_path / "a", *settings) == 0
    back = load_pretrained(tmp_path / "a")
    assert torch.equal(back.token.weight, model.token.weight.to(torch.bfloat16).float())
    (tmp_path / "config.json").write_text("{}")
    assert _run("export", tmp_path / "c", tmp_path / "a", *settings) == 1
    assert "ModelConfig requires these settings: layers" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[]")
    assert _run("export", tmp_path / "c", tmp_path / "a", *settings) == 1
    assert "config.json: the file does not contain a JSON object" in capsys.readouterr().err


def test_what_cannot_be_read_is_one_line(tmp_path, capsys):
    for arguments in (("show", tmp_path), ("import", tmp_path, tmp_path / "c")):
        assert _run(*arguments) == 1
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as ended:
        _run("lunch")
    assert ended.value.code == 2
