"""What the terminal shows of many workers: whole lines, prefixed, and one live line."""

from __future__ import annotations

import os

import pytest

from echelon.launcher.output import Source, Stream, Terminal


class _Screen(Terminal):
    """Keeps what would be written."""

    def __init__(self, columns: int | None, **options: bool) -> None:
        super().__init__(**options)
        self.columns = columns
        self.text = b""

    def write_lines(self, stream: int, lines: bytes) -> None:
        self.text += lines + (b"<live:" + self._live + b">" if self._live else b"")


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
    assert text == b"<live:3| 10%><live:3| 20%>3| line\n<live:3| 20%>"


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
    assert text == b"<live:3| 10%>\r\x1b[2K3| line\n"


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
