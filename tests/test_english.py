"""The check of English finds habits where people read them, and leaves code alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import english


def _found(name, text):
    return [(number, found) for number, found, _ in english.hits(Path(name), text)]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", '"""It is no file."""\n', [(1, "is no file")]),
        ("a.py", "x = 1  # waits for ever\n", [(1, "for ever")]),
        ("a.py", 'raise ValueError(f"{x} comes twice")\n', [(1, "comes twice")]),
        ("a.py", '"""One.\n\nThe job goes on.\n"""\n', [(3, "goes on")]),
        ("a.md", "Nobody waits.\n", [(1, "Nobody")]),
        ("a.c", "/* given back */\n", [(1, "given back")]),
        ("a.md", "one dump a rank\n", [(1, "one dump a rank")]),
    ],
)
def test_habits_are_found_in_texts(name, text, found):
    assert _found(name, text) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "nobody = meanwhile = anew\n"),  # names
        ("a.py", '"""There is no file, and it is no longer read."""\n'),
        ("a.py", "x = 1  # for ever  -- english: ok\n"),
        ("a.md", "```\nthe job goes on\n```\n    it goes on\n"),  # output
        ("a.md", "it runs on the GPU, and one line per rank is printed\n"),
    ],
)
def test_code_output_and_good_sentences_are_left_alone(name, text):
    assert _found(name, text) == []
