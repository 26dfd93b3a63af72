"""Where parameters lie, whose they are, and how their memory comes and goes."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from echelon.dist.fsdp.memory.pages import Pages  # noqa: E402
from echelon.dist.fsdp.memory.storage import DeviceStorage, HostStorage, Pool  # noqa: E402
from echelon.dist.fsdp.parameters.layout import plan_layout, tag_of, tagged_shape  # noqa: E402

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6)
CPU = torch.device("cpu")


@settings(deadline=None)
@given(SHAPES, st.integers(1, 5), st.sampled_from([1, 2, 4, 8]))
def test_each_element_belongs_to_one_rank(shapes, ranks, itemsize):
    layout = plan_layout(shapes, itemsize, ranks, 4096)
    assert layout.chunk_numel % 128 == 0
    end = 0
    for index, (piece, shape) in enumerate(zip(layout.pieces, shapes, strict=True)):
        assert piece.start >= end
        assert piece.start * itemsize % 64 == 0 or itemsize == 8
        end = piece.start + piece.numel
        parts = [layout.part(index, rank) for rank in range(ranks)]
        owned = [
            element for part in parts for element in range(part.start, part.start + part.length)
        ]
        assert owned == list(range(int(np.prod(shape))))
        for rank, part in enumerate(parts):
            if part.length:
                place = rank * layout.chunk_numel + part.offset
                assert place == piece.start + part.start
                assert part.offset + part.length <= layout.chunk_numel
    assert end <= layout.numel


@pytest.mark.parametrize("side", [100, 1000])
def test_small_units_are_divided_evenly_and_large_ones_by_pages(side):
    layout = plan_layout([(side, side), (side,)], 4, 4, 4096)
    held = [sum(layout.part(index, rank).length for index in (0, 1)) for rank in range(4)]
    assert sum(held) == side * side + side
    assert min(held) > 0.9 * max(held)
    assert (layout.chunk_numel * 4 % 4096 == 0) == (side == 1000)


@settings(deadline=None)
@given(st.integers(0, 127), st.integers(1, 1000))
def test_a_shape_tells_its_tag(tag, count):
    shape = tagged_shape(128 * count, tag)
    assert int(np.prod(shape)) == 128 * count
    assert tag_of(shape) == tag
    assert len(shape) <= 8  # as many dims as the black box records
    assert tag_of(shape[1:]) == -1


def resident(tensor) -> int:
    """Return how many bytes of a tensor's pages are in memory."""
    size, page = tensor.nbytes, resource.getpagesize()
    with Path("/proc/self/pagemap").open("rb") as table:
        table.seek(tensor.data_ptr() // page * 8)
        entries = np.frombuffer(table.read(-(-size // page) * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * page


def test_released_memory_moves_to_the_next_of_its_size():
    pages = Pages()
    storages = [HostStorage(1 << 20, torch.float32, pages) for _ in range(3)]
    odd = HostStorage(1 << 21, torch.float32, pages)
    first, second, third = storages
    for number, storage in enumerate([first, second]):
        storage.take()
        storage.tensor.fill_(number + 1.0)
    view = first.tensor[7:9]
    odd.take()
    odd.tensor.fill_(9.0)
    odd.release([])  # nobody else has its size
    assert resident(odd.tensor) == 0
    first.release([])
    assert pages.num_bytes == 4 << 20
    assert resident(first.tensor) == 4 << 20
    third.take()
    assert pages.num_bytes == 0
    assert resident(first.tensor) == 0
    assert resident(third.tensor) == 4 << 20
    assert second.tensor.sum() == 2 << 20  # what is in use is left alone
    first.take()
    first.tensor.fill_(5.0)
    assert view.tolist() == [5.0, 5.0]
    for storage in storages:
        storage.release([])
    assert pages.num_bytes == 8 << 20
    pages.trim()
    assert sum(resident(storage.tensor) for storage in storages) == 0


def test_a_part_can_be_kept():
    storage = HostStorage(4 << 20, torch.float32, Pages())
    storage.take()
    storage.tensor.fill_(3.0)
    storage.release([(1 << 20, 2 << 20)])
    assert resident(storage.tensor) == 4 << 20
    storage.take()
    assert storage.tensor[1 << 20 : 2 << 20].eq(3.0).all()
    storage.release([])
    assert resident(storage.tensor) == 0


def test_a_resized_storage_keeps_its_views():
    storage = DeviceStorage(64, torch.float32, CPU)
    storage.take()
    view = storage.tensor[8:16].view(2, 4)
    storage.release([])
    assert view.untyped_storage().size() == 0
    storage.take()
    storage.tensor.fill_(2.0)
    assert view.sum() == 16


def test_a_pool_never_holds_more_buffers_than_were_lent_at_once():
    pool = Pool()
    for count in (3000, 1000, 5000, 2000, 4000):
        buffer = pool.acquire(count, torch.float32, CPU)
        assert buffer.shape == (count,)
        pool.give_back(buffer)
    assert pool.num_bytes == 20000
    lent = [pool.acquire(100, torch.bfloat16, CPU) for _ in range(2)]
    for buffer in lent:
        pool.give_back(buffer)
    assert pool.num_bytes == 20200
