"""Where the text comes from, how it is split, and which bytes make which batch."""

from __future__ import annotations

import dataclasses
import sysconfig
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt.text.data import (
    BLOCK_TOKENS,
    NOT_COUNTED,
    VALIDATION_EVERY,
    BatchSource,
    evaluation_batches,
    load_dataset,
    read_text,
    share,
    split,
    standard_library,
    validation_windows,
)

HELD_OUT = 255


def marked_text(block_bytes: int, num_blocks: int) -> bytes:
    """Text whose held-out blocks, and only those, consist of one telling byte."""
    blocks = [
        bytes([HELD_OUT if number % VALIDATION_EVERY == VALIDATION_EVERY - 1 else 0]) * block_bytes
        for number in range(num_blocks)
    ]
    return b"".join(blocks)


def source_of(blocks, *, rank=0, world_size=1, num_sequences=8, context=15) -> BatchSource:
    return BatchSource(
        blocks=blocks,
        num_sequences=num_sequences,
        context=context,
        seed=3,
        rank=rank,
        world_size=world_size,
    )


def test_the_split_is_a_function_of_the_text():
    text = bytes(range(256)) * 10
    first, second = split(text), split(text)
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.validation, second.validation)
    assert first.fingerprint == second.fingerprint != split(text + b"\n" * 256).fingerprint


def test_large_texts_are_cut_into_blocks_of_the_documented_size():
    dataset = split(bytes(BLOCK_TOKENS * 33 + 5))
    assert dataset.train.shape == (31, BLOCK_TOKENS)
    assert dataset.validation.shape == (2, BLOCK_TOKENS)


def test_no_training_window_reaches_into_held_out_text():
    dataset = split(marked_text(BLOCK_TOKENS, 33))
    assert (dataset.validation == HELD_OUT).all()
    source = source_of(dataset.train, num_sequences=64, context=1000)
    for step in range(20):
        tokens, targets = source.batch_at(64 * step)
        assert int(tokens.max()) == int(targets.max()) == 0


def test_every_position_of_a_block_can_be_trained_on():
    """Offsets run to the last window that fits, with one more byte for the target."""
    source = source_of(np.arange(17, dtype=np.uint8)[None], context=15)
    starts = {int(start) for step in range(20) for start in source.batch_at(8 * step)[0][:, 0]}
    assert starts == {0, 1}


def test_targets_are_the_bytes_that_follow(random):
    blocks = random.integers(0, 256, (4, 64), dtype=np.uint8)
    tokens, targets = source_of(blocks).batch_at(7)
    assert tokens.shape == targets.shape == (8, 15)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_ranks_shares_make_the_same_global_batch(random, world_size):
    blocks = random.integers(0, 256, (4, 64), dtype=np.uint8)
    alone, _ = source_of(blocks).batch_at(5)
    shares = [
        source_of(blocks, rank=rank, world_size=world_size).batch_at(5)[0]
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat(shares), alone)


def test_samples_are_drawn_by_number_and_seed(random):
    blocks = random.integers(0, 256, (4, 640), dtype=np.uint8)
    source = source_of(blocks)
    assert torch.equal(source.batch_at(8)[0], source.batch_at(8)[0])
    assert not torch.equal(source.batch_at(0)[0], source.batch_at(8)[0])
    other = dataclasses.replace(source, seed=4)
    assert not torch.equal(source.batch_at(0)[0], other.batch_at(0)[0])


def test_a_sample_is_the_same_in_batches_of_any_size(random):
    """So the position in the data is the number of samples, whatever the batches were."""
    blocks = random.integers(0, 256, (4, 640), dtype=np.uint8)
    large = source_of(blocks, num_sequences=12).batch_at(24)[0]
    small = [source_of(blocks, num_sequences=4).batch_at(first)[0] for first in (24, 28, 32)]
    assert torch.equal(torch.cat(small), large)


def test_samples_cover_the_text_evenly():
    blocks = np.arange(40, dtype=np.uint8).reshape(4, 10)
    tokens, _ = source_of(blocks, num_sequences=6000, context=4).batch_at(0)
    _, counts = np.unique(tokens[:, 0], return_counts=True)
    assert len(counts) == 4 * 6
    assert counts.min() > 200 < counts.max() < 300  # 250 each, and chance


def test_shares_cover_all_items_evenly():
    slices = [share(10, rank, 4) for rank in range(4)]
    assert [item for part in slices for item in range(10)[part]] == list(range(10))
    assert {part.stop - part.start for part in slices} == {2, 3}


def test_validation_windows_are_fixed_spread_and_disjoint():
    blocks = np.arange(2 * 100, dtype=np.uint8).reshape(2, 100)
    windows = validation_windows(blocks, num_windows=4, context=9)
    assert np.array_equal(windows, validation_windows(blocks, num_windows=4, context=9))
    assert windows.shape == (4, 10)
    assert np.unique(windows).size == windows.size
    assert windows[0, 0] == 0
    assert windows[-1, -1] == blocks[-1, -1]


def test_fewer_windows_than_asked_for_are_all_there_are():
    blocks = np.zeros((2, 100), np.uint8)
    assert len(validation_windows(blocks, num_windows=1000, context=9)) == 20


@pytest.mark.parametrize("text", [b"", b"too short"])
def test_a_text_too_short_to_split_is_refused(text):
    with pytest.raises(ValueError, match="splitting takes 16"):
        split(text)


def test_a_text_too_short_for_a_window_is_refused():
    dataset = split(bytes(16 * 20))
    dataset.require_windows_of(20)
    with pytest.raises(ValueError, match="20 bytes each, and a window needs 21"):
        dataset.require_windows_of(21)


def test_the_standard_library_is_walked_in_order_and_without_packages(tmp_path):
    for name in ("b.py", "a.py", "a.txt", "pkg/c.py", "site-packages/x.py", "__pycache__/y.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    names = [str(path.relative_to(tmp_path)) for path in standard_library(tmp_path)]
    assert names == ["a.py", "b.py", "pkg/c.py"]


def test_reading_stops_at_the_limit(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name * 10)
    paths = iter([tmp_path / "a", tmp_path / "b", tmp_path / "never opened"])
    assert read_text(paths, limit_bytes=15) == b"a" * 10 + b"b" * 5


def test_the_default_text_is_there():
    files = list(islice(standard_library(Path(sysconfig.get_path("stdlib"))), 3))
    assert all(file.suffix == ".py" for file in files)
    dataset = load_dataset(None, limit_bytes=1 << 20)
    assert dataset.train.size == 15 * BLOCK_TOKENS


def test_evaluation_counts_every_window_once_on_equally_many_batches():
    windows = np.arange(33 * 3, dtype=np.uint8).reshape(33, 3)
    everyones = [
        list(evaluation_batches(windows, rank=rank, world_size=2, num_sequences=16, at_least=4))
        for rank in range(2)
    ]
    assert [len(batches) for batches in everyones] == [2, 2]
    batches = [batch for batches in everyones for batch in batches]
    assert all(len(tokens) == len(targets) >= 4 for tokens, targets in batches)
    counted = [targets[targets[:, 0] != NOT_COUNTED] for _, targets in batches]
    assert torch.equal(torch.cat(counted), torch.from_numpy(windows[:, 1:].astype(np.int64)))
