"""The tutorials, followed to the letter."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.docs import follow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for p in (ROOT / "docs" / "tutorial").glob("*.md") if p.name != "index.md")

PAGE = """
```console
$ true
$ echo $?
0
```
```bash
$ never
```
```console title="second"
$ fr-analyze x
VERDICT  host_hang · rank 2 · certain
  rank 2 is somewhere
```
"""


def test_a_page_is_its_commands_and_what_they_must_print():
    shells = follow.steps(PAGE)
    assert [step.command for step in shells["shell"]] == ["true", "echo $?"]
    assert shells["shell"][1].expected == ["0"]
    assert [step.expected for step in shells["second"]] == [
        ["VERDICT host_hang · rank 2 · certain"]
    ]


def test_a_command_is_continued_after_a_backslash(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ test a = \\\n      a\n$ echo $?\n0\n```\n")
    shells = follow.steps(page.read_text())
    assert [step.command for step in shells["shell"]] == ["test a = \\\n      a", "echo $?"]
    assert follow.follow(page, tmp_path, timeout_s=60) == []


def test_another_exit_code_or_verdict_is_a_fault(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '```console\n$ false\n$ echo $?\n1\n```\n```console title="b"\n$ echo 5\n5\n```\n'
    )
    assert follow.follow(page, tmp_path, timeout_s=60) == []
    page.write_text("```console\n$ false\n$ echo $?\n0\n```\n")
    (fault,) = follow.follow(page, tmp_path, timeout_s=60)
    assert "echo $?" in fault
    assert "lacks ['0']" in fault


def test_a_shell_that_exits_early_is_a_fault(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ exit 3\n$ echo 5\n5\n```\n")
    (fault,) = follow.follow(page, tmp_path, timeout_s=60)
    assert "0 of 2 commands ended" in fault


def test_every_tutorial_has_commands():
    assert len(PAGES) >= 4
    for page in PAGES:
        assert sum(len(shell) for shell in follow.steps(page.read_text()).values()) >= 3


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clean clone of what is committed; the environment is this one's, made beforehand."""
    folder = tmp_path_factory.mktemp("clone") / "echelon"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    (folder / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (folder / ".venv" / name).symlink_to(ROOT / ".venv" / name)
    (folder / ".venv" / ".ready").touch()  # `make setup` installs nothing
    return folder


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_tutorial_followed_to_the_letter_shows_what_it_says(page, clone):
    assert follow.follow(page, clone, timeout_s=400) == []
