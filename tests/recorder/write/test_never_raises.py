"""Nothing that the recorder meets reaches the training program, and no half-made ring stays."""

from __future__ import annotations

import signal
import sys

import pytest

from echelon.recorder.format.schema import Live, State
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
            recorder.mark_initialized()
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
    "excepthook": "import echelon.recorder.write.setup.start as s; s._chain_hooks = fail",
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


LIMITS = {
    "files of no size": "resource.RLIMIT_FSIZE",
    "no descriptors": "resource.RLIMIT_NOFILE",
}


@pytest.mark.parametrize("is_open", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", LIMITS)
def test_limits_of_the_process_cost_the_record_at_most(program, what, is_open):
    """A ring that cannot be made, as on a full disk; one whose files cannot be touched again."""
    one = program(
        "import resource"
        + RECORD
        + f"is_open = {is_open}\n"
        + f"if is_open: current()\nresource.setrlimit({LIMITS[what]}, (0, 0))\n"
        + USE
    )
    code, out, err = one.end()
    assert (code, out) == (0, "trained\n"), err
    assert "Traceback" not in err
    if is_open:
        assert len(read_ring(one.ring).operations) == 100
    else:
        assert err.count("not recording") == 1
        assert not one.ring.exists()


HANDLE = """
import signal, sys
from pathlib import Path
from echelon.recorder.format.schema import Identity
from echelon.recorder.write.recorder import Recorder
from echelon.recorder.write.ring.ring import Ring

ring = Ring(Path(sys.argv[0]).with_name("ring"), Identity(rank=0), num_operations=8192, num_spans=8)
recorder = Recorder(ring, in_c={in_c})
num_handled = 0
is_over = False

def handle(*_):
    global num_handled
    num_handled += 1
    record(f"handler {{num_handled}}", num_handled % 50)
    if not is_over:
        signal.setitimer(signal.ITIMER_REAL, 0.0001)

def record(detail, size):
    span = recorder.open_span("span", detail, 1)
    number = recorder.begin(0, "all_reduce", dtype="float32", shapes=((size, num_handled),))
    recorder.started(number)
    recorder.completed(number)
    recorder.close_span(span)

signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0001)
num_own = 0
while num_handled < 300 or num_own < 300:
    record(f"main {{num_own}}", num_own)
    num_own += 1
    if num_own > 7000:
        break
# A signal that came before the timer stopped is still handled after it and must not start it again:
# the interpreter gives up its handlers as it ends, and the next alarm would kill it.
is_over = True
signal.setitimer(signal.ITIMER_REAL, 0)
print(num_own, num_handled, flush=True)
"""


@pytest.mark.parametrize("in_c", [True, False], ids=["c", "python"])
def test_a_signal_handler_may_record_inside_a_record(program, in_c):
    if in_c and not native.available():
        pytest.skip("the C core was not built")
    one = program(HANDLE.format(in_c=in_c))
    code, out, err = one.end()
    assert code == 0, err
    assert err == ""
    num_own, num_handled = (int(number) for number in out.split())
    assert num_handled > 0
    record = read_ring(one.rank_dir.with_name("ring"))
    # A handler inside the storing of a signature cannot store its own: its operation has none.
    assert set(record.warnings) <= {"the signature of an operation is damaged"}
    assert set(record.operations["state"].tolist()) == {State.COMPLETED}
    assert num_own < len(record.operations) <= num_own + num_handled
    assert len(record.open_spans) == 0
