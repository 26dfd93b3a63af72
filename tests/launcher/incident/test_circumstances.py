"""The facts on which a restart depends beside the verdict, read from a rank's dump."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echelon.launcher.incident.circumstances import (
    Circumstances,
    circumstances,
    circumstances_of,
    idle_ranks,
)
from echelon.recorder.format.schema import SPAN, HostFacts, Identity, LastWords, Live, Record
from echelon.recorder.read.dump import empty_record

_TRACE = """Traceback (most recent call last):
  File "/home/x/train.py", line 88, in step
    fail()
{error}
"""
_FULL = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    "total capacity of 80.00 GiB of which {free} GiB is free. Including non-PyTorch memory, this "
    "process has {own} GiB memory in use."
)


def _of(**facts: object) -> Circumstances:
    return circumstances_of(empty_record(Path("x"), Identity(rank=3), HostFacts(**facts)), 3)


def _raised(error: str) -> Circumstances:
    return _of(exit_code=1, stderr_tail=_TRACE.format(error=error))


@pytest.mark.parametrize("where", ["stderr_tail", "error_file"])
def test_an_error_is_known_by_its_type_and_line(where):
    found = _of(exit_code=1, **{where: _TRACE.format(error="ValueError: bad batch 17")})
    assert found.site == "ValueError at train.py:88 in step"
    assert (found.cause, found.is_outside) == ("exception", False)
    assert Circumstances.from_json(found.to_json()) == found


def test_the_ranks_own_last_words_and_step_count():
    record = empty_record(Path("x"), Identity(rank=3), HostFacts(exit_code=1))
    live = [0] * Live.NUM_WORDS
    live[Live.STEP] = 58
    words = LastWords(
        type="KeyError", message="'a'", site="/home/x/train.py:9 load", traceback="", mono_ns=1
    )
    found = circumstances_of(replace(record, last_words=words, live=tuple(live)), 3)
    assert (found.site, found.last_step) == ("KeyError at train.py:9 in load", 57)
    assert circumstances_of(record, 3).last_step == -1


@pytest.mark.parametrize(
    ("error", "is_outside"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("requests.exceptions.ReadTimeout: read timed out", True),
        ("OSError: [Errno 116] Stale file handle: '/data/x'", True),
        ("OSError: [Errno 28] No space left on device", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x'", False),
        ("RuntimeError: shapes do not match", False),
    ],
)
def test_errors_of_the_network_and_of_storage_are_told_from_the_programs(error, is_outside):
    assert _raised(error).is_outside is is_outside


@pytest.mark.parametrize(
    ("free", "own", "expected"),
    [("0.50", "79.00", True), ("0.50", "40.00", False), ("30.00", "49.00", True)],
)
def test_whose_memory_of_a_device_it_was(free, own, expected):
    found = _raised(_FULL.format(free=free, own=own))
    assert (found.cause, found.owns_memory) == ("out_of_memory", expected)


@pytest.mark.parametrize(
    ("limit", "expected"), [(8 << 30, True), (None, None), (9223372036854771712, None)]
)
def test_a_kill_at_the_limit_of_the_ranks_own_cgroup_is_its_own_growth(limit, expected):
    found = _of(exit_code=-9, oom_kill=True, memory_limit_bytes=limit)
    assert found.owns_memory is expected


def test_an_error_about_a_lost_peer_is_not_the_ranks_own(tmp_path, monkeypatch):
    errors = {0: "echelon.errors.PeerLostError: rank 1 died", 1: "ValueError: bad"}

    def read(path: Path) -> Record:
        rank = int(path.name.removeprefix("rank_"))
        facts = HostFacts(exit_code=1, stderr_tail=_TRACE.format(error=errors[rank]))
        return empty_record(path, Identity(rank=rank), facts)

    monkeypatch.setattr("echelon.launcher.incident.circumstances.read", read)
    found = circumstances(tmp_path, [0, 1])
    assert found is not None
    assert (found.rank, found.cause) == (1, "exception")


@pytest.mark.parametrize(
    ("names", "saving_s"),
    [
        ((), 0.0),
        (("compute",), 0.0),
        (("checkpoint",), 9.0),
        (("checkpoint_write", "checkpoint"), 9.0),
    ],
)
def test_how_long_a_checkpoint_has_been_written_is_known_on_whatever_thread(names, saving_s):
    record = empty_record(Path("x"), Identity(rank=0), HostFacts(snapshot_mono_ns=10_000_000_000))
    spans = np.zeros(len(names), SPAN)
    spans["name"] = range(len(names))
    spans["started_mono_ns"] = [(1 + 5 * i) * 1_000_000_000 for i in range(len(names))]
    found = circumstances_of(replace(record, strings=names, open_spans=spans), 0)
    assert found.saving_s == saving_s


def test_ranks_without_a_dump_are_passed_over(tmp_path):
    assert circumstances(tmp_path, [0, 1]) is None


def test_only_ranks_that_are_known_to_compute_nothing_are_idle(tmp_path, monkeypatch):
    known = {
        0: HostFacts(process_state="S", cpu_share=0.01),
        1: HostFacts(process_state="R", cpu_share=0.0),  # others have the cores
        2: HostFacts(process_state="S", cpu_share=0.15),
        3: HostFacts(process_state="S"),
    }

    def read_known(path: Path) -> Record:
        rank = int(path.name.removeprefix("rank_"))
        if rank not in known:
            raise FileNotFoundError(path)
        return empty_record(path, Identity(rank=rank), known[rank])

    monkeypatch.setattr("echelon.launcher.incident.circumstances.read", read_known)
    assert idle_ranks(tmp_path, [0, 1, 2, 3, 4]) == (0,)
