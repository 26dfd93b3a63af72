"""A live line is cut to the terminal's width, with escape sequences kept whole."""

from __future__ import annotations

import pytest

from echelon.launcher.output.fit import fit


@pytest.mark.parametrize(
    ("line", "columns", "expected"),
    [
        ("abc", 4, "abc"),
        ("abcd", 4, "abc"),
        ("\u5b57\u5b57\u5b57", 6, "\u5b57\u5b57"),
        ("e\u0301e\u0301e\u0301", 3, "e\u0301e\u0301"),
        ("\x1b[32mab\x1b[0m", 3, "\x1b[32mab\x1b[0m"),
        ("\x1b[32mabcd\x1b[0m", 3, "\x1b[32mab\x1b[0m"),
        ("\x1b]8;;http://x\x07ab\x1b]8;;\x07cd", 4, "\x1b]8;;http://x\x07ab\x1b]8;;\x07c\x1b[0m"),
        ("a\x1b", 2, "a\x1b[0m"),
        ("", 1, ""),
    ],
)
def test_a_line_is_cut_as_the_terminal_counts(line, columns, expected):
    assert fit(line, columns) == expected
