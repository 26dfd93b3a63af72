"""What a rank's time went into, as its ring shows it, from its first step on."""

from __future__ import annotations

import threading

import pytest

from echelon.recorder.format.schema import Live
from echelon.recorder.spent import spent


@pytest.fixture(autouse=True)
def _nothing_spent(monkeypatch):
    monkeypatch.setattr(spent, "spans_ns", {})
    monkeypatch.setattr(spent, "collectives_s", 0.0)


def _spend(waited_s: float, saving_ns: int, data_ns: int) -> None:
    spent.collectives_s += waited_s
    for name, ns in (("checkpoint", saving_ns), ("data_wait", data_ns)):
        spent.spans_ns[name] = spent.spans_ns.get(name, 0) + ns


def _words(look):
    live = look().live
    return live[Live.WAITED_NS], live[Live.CHECKPOINT_NS], live[Live.DATA_NS]


def test_what_was_spent_before_the_first_step_does_not_count(recorder, look):
    _spend(1.0, 10, 20)
    recorder.step(5)
    assert _words(look) == (0, 0, 0)
    _spend(0.5, 3, 4)
    recorder.step()
    assert _words(look) == (500_000_000, 3, 4)
    live = look().live
    assert live[Live.FIRST_STEP] - 1 == 5
    assert 0 < live[Live.FIRST_STEP_MONO_NS] < live[Live.STEP_MONO_NS]


def test_a_step_whose_begin_is_not_known_is_not_the_first(recorder, look):
    recorder.step(0, begins=False)
    assert look().live[Live.FIRST_STEP] == 0
    recorder.step()
    assert look().live[Live.FIRST_STEP] - 1 == 1


def test_an_orderly_end_publishes_what_the_last_step_spent(recorder, look):
    recorder.step(0)
    _spend(0.0, 7, 0)
    assert _words(look) == (0, 0, 0)
    recorder.close()
    assert _words(look) == (0, 7, 0)


def test_the_totals_of_another_thread_replace_nothing(recorder, look):
    recorder.step(0)
    _spend(0.0, 7, 0)
    recorder.step()
    other = threading.Thread(target=recorder.step)
    other.start()
    other.join()
    assert look().live[Live.STEP] - 1 == 2
    assert _words(look) == (0, 7, 0)


def test_checkpoints_are_noted_by_the_detail_of_their_span(recorder, look):
    recorder.step(12)
    recorder.note_checkpoint("wait for /runs/a")
    assert look().live[Live.SAVED_STEP] == 0
    for detail in ("save /runs/a", "torch.load a.pt", "load_file"):
        recorder.note_checkpoint(detail)
    assert look().live[Live.SAVED_STEP] - 1 == 12
    assert look().live[Live.NUM_LOADS] == 2
