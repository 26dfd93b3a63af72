"""The example begins with a Hugging Face model and ends with one."""

from __future__ import annotations

import json

import pytest

from tests.examples.in_process import train
from tests.examples.runs import read_log

pytestmark = pytest.mark.ranks
FEW = ("--layers=1", "--width=16", "--context=16")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000)))
    return path


def validation_of(log):
    return [line["validation_loss"] for line in read_log(log) if "validation_loss" in line][-1]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_is_exported_is_begun_with(kind, text, tmp_path):
    common = ("--data", text, *FEW)
    files = ("--export-hf", tmp_path / "out", "--log", tmp_path / "log")
    code, told = train(f"--model={kind}", "--steps=3", "--ema=0.5", *common, *files)
    assert code == 0, told
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 256
    files = ("--init-from", tmp_path / "out", "--log", tmp_path / "again")
    code, told = train("--steps=1", "--lr=1e-30", *common, *files)
    assert code == 0, told
    expected = validation_of(tmp_path / "log")
    assert validation_of(tmp_path / "again") == pytest.approx(expected, abs=1e-5)
    # the weights that it began with are not those that were trained, but their average
    code, told = train(f"--model={kind}", "--steps=3", *common, "--log", tmp_path / "plain")
    assert abs(validation_of(tmp_path / "plain") - expected) > 1e-4
