"""Nothing that the recorder meets reaches the training program, and no half-made ring stays."""

from __future__ import annotations

import signal
import sys

import pytest

from echelon.recorder.format.schema import Live
from echelon.recorder.read import read_ring
from echelon.recorder.write import native
from tests.recorder.conftest import span_names

RECORD = """
from echelon.recorder import span, step
from echelon.recorder.current import current
"""
USE = """
for i in range(50):
    with span("compute", "detail"):
        step()
        recorder = current()
        if recorder is not None:
            group = recorder.group("world", (2, 3))
            number = recorder.begin(group, "all_reduce", sequence=i, dtype="float32")
            recorder.started(number)
            recorder.completed(number)
            recorder.failed(recorder.begin(group, "send"), ValueError("x"))
            recorder.identify(world_size=2)
            recorder.mark_initialised()
print("trained", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGSTOP])
def test_a_stack_signal_that_cannot_be_had_is_refused_in_one_line(program, number):
    one = program(RECORD + USE, ECHELON_STACK_SIGNAL=str(int(number)))
    code, out, err = one.end()
    assert (code, out) == (0, "trained\n"), err
    assert err.count("\n") == 1
    assert f"ECHELON_STACK_SIGNAL={int(number)}" in err
    record = read_ring(one.ring)
    assert record.identity.stack_signal == 0
    assert len(record.operations) == 100


BREAK = {
    "thread": "import threading; threading.Thread.start = fail",
    "excepthook": "import echelon.recorder.write.start as s; s._chain_excepthook = fail",
    "identity": "import echelon.recorder.write.recorder as r; r.Recorder.identify = fail",
}
FAIL = """
def fail(*_, **__):
    raise RuntimeError("can't do this")
"""


@pytest.mark.parametrize("what", BREAK)
def test_a_start_that_fails_half_way_leaves_no_ring(program, what):
    one = program(FAIL + RECORD + BREAK[what] + USE, PYTHONWARNINGS="error")
    code, out, err = one.end()
    assert (code, out) == (0, "trained\n"), err
    assert err.count("\n") == 1
    assert "not recording" in err
    assert "can't do this" in err
    assert not one.ring.exists()
    assert not one.ring.is_symlink()


def test_stacks_that_cannot_be_written_do_not_stop_recording(program):
    one = program(
        "import os; os.makedirs(os.environ['ECHELON_RANK_DIR'] + '/stacks')" + RECORD + USE
    )
    code, out, err = one.end()
    assert (code, out) == (0, "trained\n"), err
    record = read_ring(one.ring)
    assert record.identity.stack_signal == 0
    assert len(record.operations) == 100
    assert record.live[Live.CLOSED] == 1


def test_bad_arguments_are_the_recorders_own_business(program):
    one = program(
        RECORD
        + """
class Bad:
    def __str__(self):
        raise OSError("no text")
    __repr__ = __str__

for name, detail in ((Bad(), Bad()), (None, 3), ("a" * 100000, b"x"), ("\\udc80", "\\udc80")):
    with span(name, detail):
        step(Bad())
        step("x")
        step(2.0)
recorder = current()
group = recorder.group(Bad(), (1, 2))
recorder.group("x", [Bad()])
recorder.new_group(None, None)
number = recorder.begin(Bad(), Bad(), sequence=Bad(), shapes=Bad(), dtype=Bad(), timeout_s=Bad())
number = recorder.begin(0, "all_reduce", shapes=((1 << 70,), [3]), num_bytes=-(1 << 80))
for record in (number, None, Bad(), -5, 1 << 70, "x"):
    recorder.started(record)
    recorder.completed(record, Bad())
    recorder.failed(record, Bad())
recorder.identify(nonsense=1)
recorder.last_words(None, None, None)
with span("fine"):
    pass
print("trained", flush=True)
"""
    )
    code, out, err = one.end()
    assert (code, out, err) == (0, "trained\n", "")
    record = read_ring(one.ring)
    assert "fine" in span_names(record)
    assert len(record.open_spans) == 0
    assert set(record.spans["depth"].tolist()) == {0}


def test_a_deleted_ring_and_closed_descriptors_do_not_matter(program):
    one = program(
        RECORD
        + """
import os
current()
os.unlink(os.environ["ECHELON_RANK_DIR"] + "/ring")
os.closerange(3, 256)
"""
        + USE
    )
    code, out, err = one.end()
    assert (code, out) == (0, "trained\n"), err


@pytest.mark.skipif(not native.available(), reason="needs the C core")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
@pytest.mark.parametrize("size", [0, 4096, 300_000])
def test_a_ring_that_is_cut_off_costs_the_record_and_not_the_training(program, size):
    one = program(
        RECORD
        + f"""
import os
current()
os.truncate(os.environ["ECHELON_RANK_DIR"] + "/ring", {size})
"""
        + USE
    )
    code, out, err = one.end()
    assert (code, out) == (0, "trained\n"), err
    assert err.count("\\n") <= 1


def test_the_fatal_signals_are_not_faulthandlers_if_the_user_says_so(program):
    code = RECORD + "import faulthandler; current(); print(faulthandler.is_enabled())"
    assert program(code).end()[1] == "True\n"
    assert program(code, ECHELON_FAULTHANDLER="0").end()[1] == "False\n"
