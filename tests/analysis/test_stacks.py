"""The line that matters: the innermost frame of the user's own code."""

from __future__ import annotations

import faulthandler
import tempfile
import threading

import pytest

from echelon.analysis.evidence.stacks.frames import (
    Frame,
    last_traceback,
    main_thread,
    short_site,
    threads,
    users_frame,
)

TEXT = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/u/loader.py", line 5 in work
  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/ssl.py", line 9 in read
  File "/venv/lib/python3.11/site-packages/httpx/client.py", line 7 in get
  File "/src/echelon/dist/group.py", line 5 in all_reduce
  File "/home/u/my code/train.py", line 88 in wait_for_tokenizer
  File "/home/u/my code/train.py", line 140 in <module>
"""


def test_the_main_thread_is_the_one_that_began_in_a_script() -> None:
    thread = main_thread(TEXT)
    assert thread is not None
    assert thread.frames[-1].function == "<module>"
    reordered = "\n".join(reversed(TEXT.split("\n\n")))
    assert main_thread(reordered) == thread


def test_the_users_line() -> None:
    thread = main_thread(TEXT)
    assert thread is not None
    assert str(users_frame(thread.frames)) == "train.py:88 in wait_for_tokenizer"


def test_without_own_code_the_innermost_frame_counts() -> None:
    frames = (Frame("/usr/lib/python3.11/ssl.py", 9, "read"),)
    assert str(users_frame(frames)) == "ssl.py:9 in read"
    assert users_frame(()) is None


def test_of_two_snapshots_the_last_counts() -> None:
    later = TEXT.replace("line 88", "line 99")
    thread = main_thread(TEXT + later)
    assert thread is not None
    assert thread.frames[-2].line == 99
    assert len(threads(TEXT + later)) == 2


def test_what_faulthandler_really_writes() -> None:
    ready, stop = threading.Event(), threading.Event()

    def other() -> None:
        ready.set()
        stop.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    stop.set()
    thread.join()
    assert len(threads(text)) >= 2
    functions = {frame.function for one in threads(text) for frame in one.frames}
    assert {"other", "test_what_faulthandler_really_writes"} <= functions


@pytest.mark.parametrize(
    "text", ["", "garbage", "Thread 0x1 (most recent call first):\n", "\x00" * 99]
)
def test_text_that_is_no_stack(text: str) -> None:
    thread = main_thread(text)
    assert thread is None or users_frame(thread.frames) is None


@pytest.mark.parametrize(
    ("site", "short"),
    [
        ("/home/u/train.py:211 step", "train.py:211 in step"),
        ("C:\\jobs\\train.py:7 <module>", "train.py:7 in <module>"),
        ("somewhere", "somewhere"),
        ("", ""),
    ],
)
def test_short_site(site: str, short: str) -> None:
    assert short_site(site) == short


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3.11/queue.py",
        "/opt/py/lib/python3.13t/queue.py",
        "C:\\Python311\\Lib\\queue.py",
        "/venv/lib/python3.11/site-packages/torch/x.py",
        "/usr/lib/python3/dist-packages/numpy/x.py",
        "/src/echelon/recorder/recorder.py",
        "<frozen runpy>",
    ],
)
def test_library_files_are_not_the_users(file: str) -> None:
    assert not Frame(file, 1, "f").is_users


@pytest.mark.parametrize(
    "file", ["/home/u/train.py", "train.py", "/src/echelon/examples/a.py", "<stdin>"]
)
def test_other_files_are_the_users(file: str) -> None:
    assert Frame(file, 1, "f").is_users


def test_the_last_traceback_of_a_stderr() -> None:
    stderr = (
        "Traceback (most recent call last):\nKeyError: 1\n\nIn handling the above exception, "
        "another exception occurred:\n\nTraceback (most recent call last):\n"
        '  File "/home/u/train.py", line 9, in main\n    step()\n    ^^^^^^\n'
        '  File "/usr/lib/python3.11/json.py", line 3, in loads\n    raise x\n'
        "mypkg.errors.BadBatch: sample 7\nsome later line\n"
    )
    raised = last_traceback(stderr)
    assert raised is not None
    assert (raised.type, raised.message, str(raised.frame)) == (
        "mypkg.errors.BadBatch",
        "sample 7",
        "train.py:9 in main",
    )
    assert last_traceback("all is well") is None


@pytest.mark.parametrize(
    "before",
    [
        "Exception ignored in: <function Pool.__del__ at 0x7f>",
        "Exception ignored in atexit callback <function f at 0x7f>:",
        "--- Logging error ---",
        "Error in atexit._run_exitfuncs:",
        "Exception in thread Thread-1 (work):",
    ],
)
def test_a_traceback_that_ended_nothing_does_not_count(before: str) -> None:
    stderr = (
        'Traceback (most recent call last):\n  File "/u/t.py", line 3, in main\nKeyError: 1\n'
        f'{before}\nTraceback (most recent call last):\n  File "/u/p.py", line 9, in f\n'
        "TypeError: no\n"
    )
    raised = last_traceback(stderr)
    assert raised is not None
    assert (raised.type, str(raised.frame)) == ("KeyError", "t.py:3 in main")


def test_a_group_of_exceptions_shows_its_frames() -> None:
    stderr = (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "/u/train.py", line 6, in <module>\n  |     raise g\n'
        "  | ExceptionGroup: several (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/u/train.py", line 3, in load\n    |     raise e\n'
        "    | ValueError: bad\n    +------------------------------------\n"
    )
    raised = last_traceback(stderr)
    assert raised is not None
    assert (raised.type, raised.message, str(raised.frame)) == (
        "ValueError",
        "bad",
        "train.py:3 in load",
    )


@pytest.mark.parametrize(
    "file", ["<string>", "<attrs generated init x>", "/tmp/torchinductor_u/a.py"]
)
def test_generated_code_is_named_only_if_nothing_else_is_there(file: str) -> None:
    generated = Frame(file, 117, "__init__")
    library = Frame("/v/site-packages/transformers/x.py", 5, "post")
    user = Frame("/u/train.py", 4, "main")
    assert users_frame((library, generated, user)) == user
    assert users_frame((generated, library)) != Frame("<string>", 117, "__init__")
