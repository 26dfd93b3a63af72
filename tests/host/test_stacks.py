"""Stacks by py-spy: invented output, and the real program if it is installed."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from echelon.host.stacks import HOLDS_LOCK, can_spy, spy_stacks

THREADS = [
    {
        "thread_id": 140475500709568,
        "thread_name": "helper",
        "frames": [{"name": "Thread.run", "filename": "/usr/lib/threading.py", "line": 982}],
    },
    {
        "thread_id": 0x7F0000000002,
        "thread_name": "MainThread",
        "frames": [
            {"name": "hang", "filename": "/home/me/job.py", "line": 4},
            {"name": "<module>", "filename": "/home/me/job.py", "line": 5},
        ],
    },
]
TEXT = """\
Thread 0x00007fc2e5afe6c0 (most recent call first):
  File "/usr/lib/threading.py", line 982 in run

Thread 0x00007f0000000002 (most recent call first):
  File "/home/me/job.py", line 4 in hang
  File "/home/me/job.py", line 5 in <module>
"""


@pytest.fixture
def py_spy(tmp_path, monkeypatch):
    """Put a py-spy on the path that does what a test says."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def does(code: str) -> None:
        path = tmp_path / "py-spy"
        path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
        path.chmod(0o700)

    return does


def test_its_threads_read_like_faulthandlers(py_spy):
    py_spy(f"assert sys.argv[-2:] == ['--pid', '17'], sys.argv\nprint('''{json.dumps(THREADS)}''')")
    stacks = spy_stacks(17)
    assert stacks.splitlines()[1:] == TEXT.splitlines()[1:]
    assert stacks.startswith(f"Thread 0x{THREADS[0]['thread_id']:016x} ")


def test_a_thread_that_holds_the_interpreters_lock_is_marked(py_spy):
    shown = json.dumps([{**THREADS[0], "owns_gil": True}, {**THREADS[1], "owns_gil": False}])
    py_spy(f"import json\nprint(json.dumps({json.loads(shown)!r}))")
    heads = [line for line in spy_stacks(17).splitlines() if line.startswith("Thread")]
    assert [HOLDS_LOCK in head for head in heads] == [True, False]


@pytest.mark.parametrize(
    "code",
    [
        "sys.exit(1)",
        "print('Error: Permission Denied')",
        "print('[{}]')",
        "print('[5]')",
        "print('7')",
        "while True: pass",
    ],
)
def test_a_failing_one_brings_nothing(py_spy, code):
    py_spy(code)
    assert spy_stacks(17, timeout_s=0.5) == ""


@pytest.mark.parametrize(
    ("said", "denied"),
    [
        ("Permission Denied: Try running again with elevated permissions", ["ptrace"]),
        ("Operation not permitted (os error 1)", ["ptrace"]),
        ("Error: Failed to find python version from target process", []),
    ],
)
def test_a_refusal_is_told_from_another_failure(py_spy, said, denied):
    py_spy(f"sys.exit({said!r})")
    found: list[str] = []
    assert spy_stacks(17, denied=found) == ""
    assert found == denied


def test_without_one_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert spy_stacks(17) == ""


@pytest.mark.skipif(not can_spy(), reason="needs py-spy")
def test_the_real_one_sees_a_stopped_process(program):
    one = program("def stands_here():\n    print('ready', flush=True)\n    input()\nstands_here()")
    one.wait_for("ready")
    one.process.send_signal(signal.SIGSTOP)
    stacks = spy_stacks(one.process.pid)
    assert "in stands_here" in stacks
    assert Path(stacks.split('File "')[1].split('"')[0]).name == "program.py"
