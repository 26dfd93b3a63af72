"""Signals that end a rank leave what they were in the ring; a heartbeat that needs no lock."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from echelon.recorder.format.schema import Live
from echelon.recorder.read import LiveRing, read_dump, read_ring
from echelon.recorder.read.dump import write_dump
from echelon.recorder.write import native
from tests.recorder.conftest import wait_until

pytestmark = [
    pytest.mark.skipif(not native.available(), reason="needs the C core"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
]
START = "import ctypes, os\nfrom echelon.recorder import step\nstep()\nlibc = ctypes.CDLL(None)\n"


@pytest.mark.parametrize(
    ("does", "number", "address"),
    [
        ("ctypes.string_at(64)", signal.SIGSEGV, 64),
        ("libc.abort()", signal.SIGABRT, 0),
        ("os.kill(os.getpid(), 7)", signal.SIGBUS, 0),
        (
            "import threading as t; t = t.Thread(target=ctypes.string_at, args=(64,)); t.start()",
            signal.SIGSEGV,
            64,
        ),
    ],
    ids=["segfault", "abort", "sent", "thread"],
)
def test_what_ended_the_process_is_in_its_ring(program, tmp_path, does, number, address):
    one = program(START + does)
    code, _, err = one.end()
    assert code == -number
    assert "Fatal Python error" in err  # faulthandler still has its say
    record = read_ring(one.ring)
    fault = record.fault
    assert fault is not None
    assert (fault.signal, fault.address) == (number, address)
    assert fault.mono_ns > record.identity.mono_ns
    assert any("libc" in frame or "python" in frame for frame in fault.frames), fault
    if does.startswith("import"):
        assert fault.thread != record.identity.pid
    assert record.live[Live.CLOSED] == 0
    write_dump(record, tmp_path / "dump")
    assert read_dump(tmp_path / "dump").fault == fault


def test_cpp_terminate_is_an_abort_with_its_frames(program, tmp_path):
    source = tmp_path / "throws.cpp"
    source.write_text('extern "C" void throws() { throw 7; }')
    library = tmp_path / "libthrows.so"
    try:
        subprocess.run(
            ["c++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=600
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a C++ compiler")
    one = program(START + f"ctypes.CDLL({str(library)!r}).throws()")
    assert one.end()[0] == -signal.SIGABRT
    fault = read_ring(one.ring).fault
    assert fault is not None
    assert any("libthrows" in frame for frame in fault.frames)


def test_a_forked_childs_fault_is_not_the_ranks(program):
    one = program(
        START
        + """
pid = os.fork()
if pid == 0:
    ctypes.string_at(64)
assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
"""
    )
    assert one.end()[0] == 0
    assert read_ring(one.ring).fault is None


def test_anothers_handlers_stay(program):
    one = program(
        """
import ctypes, signal
libc = ctypes.CDLL(None)
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
libc.signal.restype = ctypes.c_void_p
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
ours = ctypes.cast(handler, ctypes.c_void_p).value
libc.signal(signal.SIGFPE, ours)
from echelon.recorder import step
step()
assert libc.signal(signal.SIGFPE, ours) == ours
""",
        ECHELON_FAULTHANDLER="0",
    )
    code, _, err = one.end()
    assert code == 0, err


def test_only_pythons_heartbeat_stops_while_c_code_holds_the_lock(program):
    one = program(START + "print('ready', flush=True)\nctypes.PyDLL(None).sleep(600)")
    one.wait_for("ready")
    live = LiveRing(one.ring)
    try:

        def is_told() -> bool:
            words, now = live.words(), time.monotonic_ns()
            python = now - words[Live.HEARTBEAT_MONO_NS]
            return python > 2.5e9 and words[Live.NATIVE_HEARTBEAT_MONO_NS] > now - python + 2e9

        wait_until(is_told, "a beat without Python's", timeout_s=60)
        one.process.send_signal(signal.SIGSTOP)  # and none without a processor
        stopped = time.monotonic_ns()
        wait_until(lambda: time.monotonic_ns() > stopped + 1.5e9, "the time")
        assert live.words()[Live.NATIVE_HEARTBEAT_MONO_NS] < stopped + 1e9
    finally:
        one.process.send_signal(signal.SIGCONT)
        live.close()


def test_a_ring_that_is_cut_off_under_its_reader(ring):
    live = LiveRing(ring.path)
    with ring.path.open("r+b") as file:
        file.truncate(0)
    assert live.words()[Live.NUM_OPERATIONS] == 0
    assert live.pending() == (0, 0)
    live.close()
