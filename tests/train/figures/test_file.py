"""The file of figures: what a kill, a resume and a full disk leave of it."""

from __future__ import annotations

import errno
import json
import os

import pytest

from echelon.train.figures import file as file_module
from echelon.train.figures import read_figures
from echelon.train.figures.file import FigureFile


def steps_of(path):
    return [figures["step"] for figures in read_figures(path)]


def write(path, steps, last_step=0):
    file = FigureFile(path, last_step)
    for step in steps:
        file.append({"step": step, "loss": 1 / step})
    file.close()


def test_a_resumed_run_drops_the_steps_beyond_its_own(tmp_path):
    path = tmp_path / "made" / "here" / "log"
    write(path, range(1, 11))
    write(path, (8, 9), last_step=7)
    assert steps_of(path) == list(range(1, 10))
    assert read_figures(path)[2]["loss"] == 1 / 3


@pytest.mark.parametrize("cut", range(1, 25))
def test_half_a_line_is_dropped_wherever_the_kill_cut_it(tmp_path, cut):
    path = tmp_path / "log"
    write(path, (1, 2, 3))
    os.truncate(path, path.stat().st_size - cut)
    write(path, (), last_step=9)
    assert steps_of(path) == [1, 2]
    assert path.read_bytes().endswith(b"}\n")


def test_a_first_line_that_was_cut_is_dropped(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"step": 1, "lo')
    write(path, (1,))
    assert steps_of(path) == [1]


def test_lines_longer_than_a_block_are_found_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "_BLOCK_BYTES", 64)
    path = tmp_path / "log"
    file = FigureFile(path, 0)
    for step in (1, 2, 3):
        file.append({"step": step, "text": "x" * (100 * step)})
    file.close()
    monkeypatch.setattr(file_module, "_BLOCK_BYTES", 512)
    write(path, (), last_step=2)
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize("content", [b"weights\n", b"{}\n[1]\n", b'{"step": "a"}\n', b"\0" * 100])
def test_a_file_that_is_something_else_is_left_as_it_is(tmp_path, content):
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a metrics log"):
        FigureFile(path, 0)
    assert path.read_bytes() == content


def test_a_line_that_the_disk_has_no_room_for_leaves_no_half(tmp_path, monkeypatch):
    path = tmp_path / "log"
    file = FigureFile(path, 0)
    file.append({"step": 1})
    real, room = os.write, [5]

    def write_some(descriptor, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= (written := real(descriptor, data[: room[0]]))
        return written

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(OSError, match="No space"):
        file.append({"step": 2})
    room[0] = 1000  # somebody made room
    file.append({"step": 3})
    file.close()
    assert steps_of(path) == [1, 3]
    assert path.read_text().count("\n") == 2


def test_reading_skips_what_is_torn_and_refuses_what_is_not_a_log(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = folder / "figures.jsonl"
    log.write_text(json.dumps({"step": 4, "loss": 2.5}) + "\nnoise\n" + '{"step": 5, "lo')
    assert read_figures(folder) == [{"step": 4, "loss": 2.5}]
    log.write_text("")
    assert read_figures(log) == []
    log.write_text("noise\n")
    with pytest.raises(ValueError, match="no line contains a step number"):
        read_figures(log)
