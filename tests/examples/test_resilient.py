"""The example that survives a kill: what it trains, on one rank."""

from __future__ import annotations

import runpy
import sys

import torch

from tests.examples.runs import EXAMPLES


def test_it_learns_and_writes_the_hash_that_it_prints(monkeypatch, capsys, tmp_path):
    threads, hash_file = torch.get_num_threads(), tmp_path / "hash"
    argv = ["resilient.py", "--steps", "20", "--hash-file", str(hash_file)]
    monkeypatch.setattr(sys, "argv", argv)
    try:
        runpy.run_path(str(EXAMPLES / "resilient.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    first, last, said = capsys.readouterr().out.splitlines()
    assert said == f"SHA-256 of weights and optimizer state: {hash_file.read_text().strip()}"
    assert float(last.split()[3]) < float(first.split()[3])
