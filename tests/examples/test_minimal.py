"""The smallest example learns, and stays small."""

from __future__ import annotations

import runpy
import sys

import torch

from tests.examples.runs import EXAMPLES


def test_it_learns(monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["minimal.py", "--steps", "200"])
    try:
        runpy.run_path(str(EXAMPLES / "minimal.py"), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    step, loss = capsys.readouterr().out.split("loss")
    assert step.split() == ["step", "200"]
    assert float(loss) < 1e-3


def test_it_stays_small():
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 41


def test_every_example_is_in_the_list():
    listed = (EXAMPLES / "README.md").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if not path.name.startswith(("__", "."))}
    assert {name for name in names - {"README.md"} if f"`{name}" not in listed} == set()
