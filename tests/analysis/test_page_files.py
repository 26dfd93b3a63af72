"""The page's own files: installed, well formed, and filled in one pass."""

from __future__ import annotations

import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

import echelon
from echelon.analysis.report.page import template
from echelon.analysis.report.page.render import render_html
from tests.analysis.test_reports import page_of, picture_of, report_of
from tests.analysis.test_stack_tree import hung

_FOLDER = Path(template.__file__).parent
_PROJECT = Path(echelon.__file__).parents[1] / "pyproject.toml"


def test_the_files_are_installed_with_the_package() -> None:
    line = next(
        line for line in _PROJECT.read_text().splitlines() if "analysis.report.page" in line
    )
    patterns = re.findall(r'"(\*\.\w+)"', line)
    files = [path.name for path in _FOLDER.iterdir() if path.suffix not in (".py", "")]
    assert sorted(files) == ["page.html", "script.js", "style.css"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in files)


def test_the_script_is_well_formed() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node found")
    done = subprocess.run(
        [node, "--check", str(_FOLDER / "script.js")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_script_makes_no_markup_of_text() -> None:
    script = template.part("script.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert "</script" not in script


def test_the_style_is_balanced_and_every_color_has_a_dark_form() -> None:
    style = template.part("style.css")
    assert style.count("{") == style.count("}")
    light, dark = style.split("prefers-color-scheme: dark", 1)
    names = set(re.findall(r"(--[\w-]+):", light))
    assert names
    assert names == set(re.findall(r"(--[\w-]+):", dark.split("}", 1)[0]))
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= names


def test_what_is_put_in_is_not_searched_for_places() -> None:
    job = hung(4, 2)
    job[2].stands("{{script}}.py", 8, "{{data}}")
    page = page_of(job)
    assert "{{script}}.py:8 in {{data}}" in page
    assert page.count('"use strict"') == 1


def test_a_place_that_is_not_filled_is_an_error() -> None:
    with pytest.raises(KeyError):
        template.fill({})


def test_the_page_shows_all_stacks_merged() -> None:
    page = page_of(hung(24, 7))
    tree = page[page.index('<section id="tree">') :]
    assert tree.index("rank 7<span>") < tree.index("23 ranks (0-6 and 8-23)")
    assert "distributed_c10d.py" in tree


def test_the_page_of_many_different_stacks_is_bounded() -> None:
    job = hung(64, 7)
    for rank in range(64):
        job[rank].stands("data.py", 100 + rank, "fetch")
    picture = picture_of(job)
    page = render_html(picture, report_of(picture))
    assert page.count("<details") <= 41 + 2
    assert "24 ranks in 24 more branches" in page
