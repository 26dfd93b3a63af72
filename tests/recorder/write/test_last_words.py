"""The exception that ends a rank, and the waits of a loader, as programs see them."""

from __future__ import annotations

from echelon.recorder.format.schema import Live
from echelon.recorder.read import read_ring
from tests.recorder.conftest import span_names


def test_an_uncaught_exception_is_recorded_with_the_users_line(program):
    one = program(
        """
import json
from echelon.recorder import step

class BadBatchError(ValueError):
    pass

def train():
    step()
    try:
        json.loads("{")
    except ValueError as err:
        raise BadBatchError("batch 7") from err

train()
"""
    )
    code, _, err = one.end()
    assert code == 1
    assert "BadBatchError: batch 7" in err  # Python's own report is still there
    record = read_ring(one.ring)
    words = record.last_words
    assert words is not None
    assert words.type == "__main__.BadBatchError"
    assert words.message == "batch 7"
    assert words.bases == ("builtins.ValueError", "builtins.Exception", "builtins.BaseException")
    assert words.site.endswith("program.py:13 train")
    assert "JSONDecodeError" in words.traceback
    assert words.mono_ns > record.identity.mono_ns


THREADS = """
import sys, threading, time
from echelon.recorder import step
step()
def fetch(text):
    raise ValueError(text)
def run(text, **how):
    thread = threading.Thread(target=fetch, args=(text,), **how)
    thread.start()
    thread.join()
"""


def test_an_exception_that_ends_a_thread_is_recorded_with_its_name(program):
    one = program(THREADS + 'run("first", name="prefetch")\nrun("second")\n')
    code, _, err = one.end()
    assert code == 0
    assert "ValueError: first" in err  # Python's own report
    assert "ValueError: second" in err
    words = read_ring(one.ring).last_words
    assert words is not None
    assert (words.thread, words.type, words.message) == ("prefetch", "builtins.ValueError", "first")
    assert words.site.endswith("program.py:6 fetch")


def test_the_exception_that_ends_the_process_comes_before_a_threads(program):
    one = program(THREADS + 'run("of a thread")\nraise OSError("of the process")\n')
    assert one.end()[0] == 1
    words = read_ring(one.ring).last_words
    assert words is not None
    assert (words.thread, words.message) == ("", "of the process")


def test_a_thread_that_threading_did_not_start_has_last_words(program):
    one = program(
        THREADS
        + """
import _thread
ended = threading.Event()
before = sys.unraisablehook
def hook(args):
    before(args)
    ended.set()
sys.unraisablehook = hook
_thread.start_new_thread(fetch, ("raw",))
assert ended.wait(60)
"""
    )
    code, _, err = one.end()
    assert code == 0, err
    words = read_ring(one.ring).last_words
    assert words is not None
    assert (words.message, bool(words.thread)) == ("raw", True)


def test_what_ends_no_thread_by_an_exception_is_no_last_word(program):
    """An exit of a thread, and exceptions that Python ignores."""
    one = program(
        THREADS
        + """
class Broken:
    def __del__(self):
        raise ValueError("ignored")
Broken()
fetch = sys.exit
run(3)
"""
    )
    assert one.end()[0] == 0
    assert read_ring(one.ring).last_words is None


def test_the_site_is_the_users_frame_when_a_library_raises(program):
    one = program(
        """
import json
from echelon.recorder import step
step()
json.loads("{")
"""
    )
    assert one.end()[0] == 1
    words = read_ring(one.ring).last_words
    assert words is not None
    assert words.site.endswith("program.py:5 <module>")


def test_long_last_words_are_cut_to_what_fits(program):
    one = program(
        """
from echelon.recorder import step
step()
def fall(n):
    if n:
        fall(n - 1)
    raise RuntimeError("é" * 100_000)
fall(500)
"""
    )
    assert one.end()[0] == 1
    words = read_ring(one.ring).last_words
    assert words is not None
    assert words.message.startswith("éééé")
    assert words.site.endswith("fall")


def test_an_exit_is_no_last_word_and_an_orderly_end_is_noted(program):
    one = program("import sys; from echelon.recorder import step; step(); sys.exit(7)")
    assert one.end()[0] == 7
    record = read_ring(one.ring)
    assert record.last_words is None
    assert record.live[Live.CLOSED] == 1


def test_watch_records_a_wait_for_each_item(program):
    one = program(
        """
from echelon.recorder import watch
def batches():
    yield from "ab"
    raise OSError("disk")
got = []
try:
    for item in watch(batches()):
        got.append(item)
except OSError as err:
    got.append(str(err))
print(got)
"""
    )
    code, out, _ = one.end()
    assert (code, out.strip()) == (0, "['a', 'b', 'disk']")
    record = read_ring(one.ring)
    assert span_names(record) == ["data_wait"] * 3
    assert len(record.open_spans) == 0
    sites = {record.strings[row["site"]] for row in record.spans} - {""}
    assert [site.rpartition("/")[2] for site in sites] == ["program.py:8 <module>"]
