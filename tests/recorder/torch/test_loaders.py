"""The end of a loop over a loader is marked: the last batch, or a loop that is left early."""

from __future__ import annotations

import gc

import pytest

from echelon.recorder.torch import spans

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.dataloader import _BaseDataLoaderIter  # noqa: E402


@pytest.fixture
def marks(monkeypatch):
    """Return the names of the spans that are opened from now on."""
    found: list[str] = []
    monkeypatch.setattr(spans, "opened", lambda name, _="": found.append(name))
    original = _BaseDataLoaderIter.__next__
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", spans._next_batch(original))
    spans.ended_loaders.clear()
    yield found
    spans.ended_loaders.clear()


def _loader() -> DataLoader:
    return DataLoader(torch.ones(6, 2), batch_size=2)


def test_the_last_batch_ends_an_iteration(marks):
    assert len(list(_loader())) == 3
    assert marks == ["data_wait"] * 4
    spans.mark_ended_loaders()
    spans.mark_ended_loaders()
    assert marks == ["data_wait"] * 4 + ["data_end"], "once, at the next operation"


def test_a_loop_that_is_left_early_ends_an_iteration(marks):
    for _ in _loader():
        spans.mark_ended_loaders()
        break
    assert marks == ["data_wait"], "not while it lasts"
    spans.mark_ended_loaders()
    assert marks == ["data_wait", "data_end"]


def test_a_loop_through_a_generator_that_is_left_early_ends_an_iteration(marks):
    def doubled():
        for batch in _loader():
            yield 2 * batch

    for _ in enumerate(doubled()):
        break
    spans.mark_ended_loaders()
    assert marks == ["data_wait", "data_end"]


def test_the_next_epoch_follows_the_end_of_the_last(marks):
    loader = _loader()
    for _ in range(2):
        list(loader)
    spans.mark_ended_loaders()
    assert marks == (["data_wait"] * 4 + ["data_end"]) * 2


def test_an_iterator_that_a_loader_keeps_for_the_next_epoch_ends_each_time(marks):
    iterator = iter(_loader())
    for _ in range(2):
        assert len(list(iterator)) == 3
        spans.mark_ended_loaders()
        iterator._reset(_loader(), first_iter=False)
    assert marks == (["data_wait"] * 4 + ["data_end"]) * 2
    del iterator
    gc.collect()
