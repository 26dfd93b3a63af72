"""The lines of the root cause's stderr that the report quotes."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launcher.incident.error_file import read_error_file
from echelon.launcher.incident.story import Victims, last_traceback, story_of
from echelon.launcher.job.report import Ended
from echelon.recorder.format.schema import HostFacts, Identity
from echelon.recorder.read.dump import empty_record

_TWO = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
KeyError: 'old'
some log line
Traceback (most recent call last):
  File "train.py", line 72, in check
    raise ValueError("bad")
ValueError: bad
after it
"""


def _record(stderr: str):
    facts = HostFacts(stderr_tail=stderr, exit_code=1)
    return empty_record(Path("x"), Identity(rank=3), facts)


def test_the_last_traceback_counts_and_ends_with_its_exception():
    assert last_traceback(_TWO.splitlines()) == _TWO.splitlines()[5:9]


def test_a_story_quotes_the_traceback():
    lines = story_of(_record(_TWO)).lines()
    assert lines[0] == "rank 3, its traceback:"
    assert lines[-1] == "  ValueError: bad"


def test_without_a_traceback_the_last_lines_stand_in():
    lines = story_of(_record("\n".join(f"line {i}" for i in range(20)))).lines()
    assert lines == ["rank 3, its last lines:", *(f"  line {i}" for i in range(14, 20))]


@pytest.mark.parametrize("code", [None, -9])
def test_old_lines_of_a_rank_that_hangs_or_was_killed_are_not_its_story(code):
    facts = HostFacts(stderr_tail="Map: 100%\n", exit_code=code)
    assert story_of(empty_record(Path("x"), Identity(rank=3), facts)).lines() == []


def test_a_silent_rank_has_no_story():
    assert story_of(_record("")).lines() == []


def test_a_crash_in_c_code_is_quoted_too():
    crash = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"
    )
    crash += '  File "train.py", line 9 in step\n'
    assert '    File "train.py", line 9 in step' in story_of(_record(crash)).lines()


def test_a_long_traceback_keeps_its_ends():
    frames = [f'  File "deep.py", line {i}, in f' for i in range(100)]
    text = "\n".join(["Traceback (most recent call last):", *frames, "RecursionError: deep"])
    lines = story_of(_record(text)).lines()
    assert len(lines) == 25
    assert lines[-1] == "  RecursionError: deep"


@pytest.mark.parametrize("escape", ["\x1b[2J", "\x1b]0;title\x07", "\x9b2J", "\r"])
def test_terminal_escapes_are_taken_out(escape):
    shown = "\n".join(story_of(_record(f"a{escape}b")).lines())
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r"}


def test_what_a_program_wrote_to_its_error_file_comes_first():
    facts = HostFacts(stderr_tail=_TWO, error_file=_TWO.replace("bad", "worse"), exit_code=1)
    record = empty_record(Path("x"), Identity(rank=3), facts)
    assert story_of(record).lines()[-1] == "  ValueError: worse"


def test_torchs_prefix_hides_no_traceback():
    stderr = "\n".join(f"[rank3]: {line}" for line in _TWO.splitlines())
    assert story_of(_record(stderr)).lines()[-1] == "  ValueError: bad"


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ('{"message": {"message": "E: x", "extraInfo": {"py_callstack": "Trace"}}}', "Trace"),
        ('{"message": {"message": "E: x", "errorCode": 3}}', "E: x"),
        ('{"message": "plain"}', "plain"),
        ('{"message": 7}', ""),
        ("[1]", ""),
        ("no JSON", ""),
        ("[" * 100_000, ""),
        ('"' + "x" * (1 << 20) + '"', ""),
    ],
)
def test_an_error_file_is_read_whatever_is_in_it(tmp_path, content, read):
    path = tmp_path / "error.json"
    assert read_error_file(path) == ""
    path.write_text(content)
    assert read_error_file(path) == read


def test_victims_are_one_line():
    ended = {rank: Ended(rank, 1, rank) for rank in range(5)}
    ended[4] = Ended(4, -15, 4, stopped=True)
    ended[3].code = 0
    victims = Victims.of({"culprit_ranks": [1]}, ended)
    assert victims.line() == (
        "failed after it: ranks 0 and 2; also stopped by the launcher: rank 4"
    )
    assert Victims.of({"culprit_ranks": []}, ended).line() == ""
    assert Victims.of(None, ended).line() == ""
