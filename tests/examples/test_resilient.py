"""The examples that survive a kill: what they train, on one rank."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from tests.examples.runs import EXAMPLES


@pytest.mark.parametrize("name", ["resilient.py", "resilient_pipeline.py"])
def test_it_learns_and_writes_the_hash_that_it_prints(monkeypatch, capsys, tmp_path, name):
    threads, hash_file = torch.get_num_threads(), tmp_path / "hash"
    argv = [name, "--steps", "20", "--hash-file", str(hash_file)]
    monkeypatch.setattr(sys, "argv", argv)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    *_, first, last, said = capsys.readouterr().out.splitlines()
    assert said == f"SHA-256 of weights and optimizer state: {hash_file.read_text().strip()}"
    assert float(last.split()[3]) < float(first.split()[3])
