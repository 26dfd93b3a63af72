"""A folder is made once, by one of those who want it, whatever happens to the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from echelon.tokens.once import make_once

DIES_WHILE_MAKING = """
import os, signal, sys
from pathlib import Path
from echelon.tokens.once import make_once

def make(hidden):
    (hidden / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

make_once(Path(sys.argv[1]), make)
"""


def test_one_of_many_makes_it_and_all_see_it_complete(tmp_path):
    calls, seen = [], []

    def make(hidden):
        calls.append(hidden)
        (hidden / "one").write_text("1")
        (hidden / "two").write_text("2")

    def want():
        made = make_once(tmp_path / "deep" / "folder", make)
        seen.append((made, sorted(p.name for p in (tmp_path / "deep" / "folder").iterdir())))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert sorted(seen) == [(False, ["one", "two"])] * 7 + [(True, ["one", "two"])]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["folder"]


def test_the_next_one_makes_it_where_the_first_failed(tmp_path):
    def fail(hidden):
        (hidden / "half").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        make_once(tmp_path / "folder", fail)
    assert list(tmp_path.iterdir()) == []
    assert make_once(tmp_path / "folder", lambda hidden: (hidden / "whole").touch())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["whole"]


def test_a_maker_that_is_killed_holds_nobody_up_and_its_rest_is_removed(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", DIES_WHILE_MAKING, str(tmp_path / "folder")], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(path.suffix == ".tmp" for path in tmp_path.iterdir())
    assert make_once(tmp_path / "folder", lambda hidden: (hidden / "whole").touch())
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["whole"]
