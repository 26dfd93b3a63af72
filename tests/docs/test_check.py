"""The checks of the documentation find what they are for; `make check` runs them over all pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.docs import check, citations, links, offline, reference

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = re.compile(r"ECHELON_[A-Z_]*[A-Z]")


@pytest.fixture(scope="module")
def facts():
    return citations.Facts.collect(ROOT, check.tracked_files(ROOT))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("see `echelon/dist/nothing.py`", "no file echelon/dist/nothing.py"),
        ("see `dist/nothing.py`", "no file that ends in dist/nothing.py"),
        ("call `echelon.dist.nothing()`", "no name echelon.dist.nothing"),
        ("call `echelon.dist.Options.nothing`", "no name echelon.dist.Options.nothing"),
        ("set `ECHELON_NOTHING`", "no source has ECHELON_NOTHING"),
        ("pass `--no-such-thing 3`", "no source has --no-such-thing"),
        ("    echelon run --nothing 2 train.py", "echelon run has no option --nothing"),
        ("    echelon dance", "no command: echelon dance"),
        ("```bash\n$ fr-analyze --sing DIR\n```\n", "fr-analyze has no option --sing"),
        ("```bash\nechelon run \\\n  --nothing a.py\n```\n", "echelon run has no option --nothing"),
        ("    make coffee", "no target: make coffee"),
    ],
)
def test_what_a_page_cites_and_does_not_exist_is_found(facts, text, fault):
    assert citations.missing(text, facts) == [fault]


@pytest.mark.parametrize(
    "text",
    [
        "`echelon/dist/group.py`, `dist/group.py`, `tests/`, `echelon.dist.init()`",
        "`echelon.store.StoreServer`, `echelon.errors.PeerLostError.ranks`, `ECHELON_RANK_DIR`",
        "    echelon run --nproc-per-node 2 train.py --my-own-option",
        "    fr-analyze --attach --pid 12   # any process",
        "    make train     # trains",
        "`train.py`, `my/own.txt`, `RUN/dump`, `srun --nothing`",
    ],
)
def test_what_exists_or_is_the_users_own_is_no_fault(facts, text):
    assert citations.missing(text, facts) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# A title, with `code`\n")
    text = "# Top\n[x](a.md) [x](a.md#a-title-with-code) [x](#top) [x](https://e.org/b.md)\n"
    files = frozenset({"a.md", "b.md"})
    assert check.broken_links(tmp_path, "b.md", text, files) == []
    text = "# Top\n[x](c.md) [x](a.md#b) [x](#low)\n```\n[x](d.md)\n```\n"
    assert check.broken_links(tmp_path, "b.md", text, files) == [
        "no heading #low",
        "no file c.md",
        "no heading a.md#b",
    ]


def test_a_note_that_no_file_has_is_found(tmp_path):
    (tmp_path / "a.py").write_text(
        '"""[Note: why] Because.\n\nSee [Note: why] and [Note: how]."""\n'
    )
    assert citations.missing_notes(tmp_path, frozenset({"a.py"})) == ["a.py: no note titled 'how'"]


def test_code_blocks_are_told_from_prose():
    parts = list(links.split_fences("a\n```py\nb\n```\nc\n````\n```\n````\n"))
    assert [text for text, is_code in parts if is_code] == ["```py\nb\n```\n", "````\n```\n````\n"]


def test_a_resource_of_another_host_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<a href="https://e.org/x">x</a><img src="own.png">')
    (tmp_path / "b.html").write_text('<script async src="https://e.org/x.js"></script>')
    (tmp_path / "c.css").write_text('@import url("//e.org/x.css");')
    assert offline.loaded_from_elsewhere(tmp_path) == [
        "b.html loads https://e.org/x.js",
        "c.css loads //e.org/x.css",
    ]


def test_every_public_name_has_a_place_in_the_reference():
    packages = reference.documented_packages(ROOT)
    pages = {package.module: package.markdown() for package in packages}
    assert "::: echelon.dist.group.ProcessGroup" in pages["echelon.dist"]
    assert "::: echelon.dist.parallel.build.parallelize" in pages["echelon.dist.parallel"]
    for package in packages:
        for name, home in package.names:
            assert citations.exists(home, ROOT), f"{package.module}.{name}"


def test_every_variable_of_ours_is_in_the_table():
    sources = [ROOT / "setup.py", *ROOT.glob("*_autoload.py"), *(ROOT / "echelon").rglob("*.py")]
    used = {name for path in sources for name in _VARIABLE.findall(path.read_text("utf-8"))}
    table = (ROOT / "docs" / "environment.md").read_text("utf-8")
    assert "ECHELON_RANK_DIR" in used
    assert used - set(_VARIABLE.findall(table)) == set()
