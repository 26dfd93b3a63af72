"""The terminal's view of many workers: whole lines with prefixes, and one live line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from echelon.launcher.output.output import Source, Stream, Terminal


class _Screen(Terminal):
    """A terminal of a given width that keeps what is written to it."""

    def __init__(self, columns: int | None, *, shows_errors: bool = True, **options: bool) -> None:
        super().__init__(**options)
        self.width = columns
        self._stderr_is_shown = shows_errors and columns is not None
        self.text = b""
        self.errors = b""

    @property
    def columns(self) -> int | None:
        return self.width

    def _write(self, stream: int, data: bytes) -> None:
        data = data.replace(b"\r\x1b[2K", b"<erase>")
        if stream == 1 or self._stderr_is_shown:
            self.text += data
        else:
            self.errors += data


@pytest.fixture
def make_stream(tmp_path):
    streams = []

    def make(columns: int | None = None, *, nodes: bool = False, **options) -> tuple[Stream, int]:
        read_end, write_end = os.pipe()
        log = (tmp_path / "stdout.log").open("wb")
        screen = _Screen(columns, **options)
        stream = Stream(read_end, 1, Source(3, 1, nodes), log, screen)
        streams.append((stream, write_end))
        return stream, write_end

    yield make
    for stream, write_end in streams:
        os.close(write_end)
        stream.close()


def _feed(stream: Stream, write_end: int, *pieces: bytes) -> bytes:
    for piece in pieces:
        os.write(write_end, piece)
        assert stream.pump()
    return stream.terminal.text


def test_a_line_written_in_pieces_comes_out_whole(make_stream):
    assert _feed(*make_stream(), b"hel", b"lo\nwor", b"ld\n") == b"3| hello\n3| world\n"


def test_the_log_has_the_bytes_as_they_were(make_stream, tmp_path):
    _feed(*make_stream(), b"50%\r100%\rdone\nrest")
    assert (tmp_path / "stdout.log").read_bytes() == b"50%\r100%\rdone\nrest"


def test_a_last_line_without_an_end_is_shown(make_stream):
    stream, write_end = make_stream()
    _feed(stream, write_end, b"no newline")
    stream.flush()
    assert stream.terminal.text == b"3| no newline\n"


def test_progress_is_a_live_line_on_a_terminal(make_stream):
    text = _feed(*make_stream(80), b"10%\r", b"20%\r", b"line\n")
    assert text == b"<erase>3| 10%<erase>3| 20%<erase>3| line\n3| 20%"


def test_a_live_line_fits_the_terminal_and_follows_its_size(make_stream):
    stream, write_end = make_stream(12)
    assert _feed(stream, write_end, b"0123456789abc\r") == b"<erase>3| 01234567"
    stream.terminal.width = 9
    assert _feed(stream, write_end, b"line\n").endswith(b"<erase>3| line\n3| 01234")


def test_no_live_line_gets_into_a_file_that_takes_stderr(make_stream):
    stream, write_end = make_stream(80, shows_errors=False)
    _feed(stream, write_end, b"10%\r")
    stream.terminal.write_lines(2, b"3| bad\n")
    stream.terminal.say("hello")
    assert stream.terminal.errors == b"3| bad\nechelon: hello\n"


@pytest.mark.parametrize("full", [1, 2])
def test_a_stream_that_takes_nothing_is_said_once_on_the_other(monkeypatch, tmp_path, full):
    paths = {full: Path("/dev/full"), 3 - full: tmp_path / "other"}
    with paths[1].open("w") as out, paths[2].open("w") as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        terminal = Terminal()
        for _ in range(3):
            terminal.write_lines(1, b"0| line\n")
            terminal.say("hello")
    text = (tmp_path / "other").read_text()
    name = {1: "stdout", 2: "stderr"}[full]
    assert text.count(f"cannot write to {name} (No space left on device)") == 1
    assert text.count({1: "hello", 2: "0| line"}[full]) == 3


def test_a_terminal_left_non_blocking_gets_everything(monkeypatch):
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    got = []

    def read() -> None:
        with os.fdopen(read_end, "rb") as pipe:
            got.append(pipe.read())

    reader = threading.Thread(target=read)
    with os.fdopen(write_end, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        reader.start()
        Terminal().write_lines(1, b"x" * (1 << 20) + b"\n")
    reader.join(60)
    assert got == [b"x" * (1 << 20) + b"\n"]


def test_progress_is_dropped_elsewhere(make_stream):
    assert _feed(*make_stream(), b"10%\r", b"20%\r", b"100%\n") == b"3| 100%\n"


def test_an_endless_line_does_not_fill_the_memory(make_stream):
    stream, write_end = make_stream()
    for _ in range(40):
        _feed(stream, write_end, b"x" * 32768)
    assert stream.terminal.text.count(b"\n") >= 1
    assert len(stream._rest) <= 1 << 20


def test_a_bare_carriage_return_takes_the_live_line_away(make_stream):
    text = _feed(*make_stream(80), b"10%\r", b"\x1b[2K\r", b"line\n")
    assert text == b"<erase>3| 10%<erase>3| line\n"


def test_with_several_nodes_the_prefix_names_the_node(make_stream):
    assert _feed(*make_stream(nodes=True), b"hello\n") == b"1:3| hello\n"


def test_lines_as_json(make_stream):
    text = _feed(*make_stream(as_json=True), b'say "x"\n')
    assert text == b'{"node": 1, "rank": 3, "stream": "stdout", "line": "say \\"x\\""}\n'


def test_folded_lines_come_at_the_end_at_the_latest(make_stream):
    stream, write_end = make_stream(fold=True)
    assert _feed(stream, write_end, b"a\n") == b""
    assert _feed(stream, write_end, b"b\n") == b"3| a\n"
    stream.terminal.end_live()
    assert stream.terminal.text == b"3| a\n3| b\n"


def test_filtered_lines_go_to_their_own_file_too(make_stream, tmp_path):
    stream, write_end = make_stream()
    stream.filtered = (tmp_path / "filtered.log").open("ab")
    stream.filters = (b"apple", b"orange")
    _feed(stream, write_end, b"an apple\na pear\noranges\n")
    assert (tmp_path / "filtered.log").read_bytes() == b"an apple\noranges\n"
