"""The commands of the how-to pages and guides are run, or left out for a reason."""

from __future__ import annotations

import sys

import pytest

from tools.docs import commands

PAGE = """
    echelon run --nproc-per-node 8 train.py     # or torchrun
    echelon: rank 2 is lost
    $ python -m echelon.dist.pipeline check mine.csv

```bash
export ECHELON_SECRET=$(openssl rand -hex 32)
```

echelon run in prose
"""


def test_a_page_is_its_commands_without_output_and_prose():
    assert list(commands.commands(PAGE)) == [
        "echelon run --nproc-per-node 8 train.py",
        "python -m echelon.dist.pipeline check mine.csv",
        "export ECHELON_SECRET=$(openssl rand -hex 32)",
    ]


def test_an_unknown_command_is_an_error():
    with pytest.raises(LookupError, match="echelon dance"):
        commands.classified("echelon dance now")


def test_every_command_of_the_pages_is_classified_and_no_entry_is_stale():
    found = [line for page in commands.PAGES for line in commands.commands(page.read_text())]
    for command in found:
        commands.classified(command)
    for beginning in (*commands.RUN, *commands.LEFT):
        assert any(command.startswith(beginning) for command in found), beginning


def test_another_exit_code_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="exit code 3, not 0"):
        commands._run("exit 3", tmp_path, 0)


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["commands", str(tmp_path / "stage")])
    assert commands.main() == 0
