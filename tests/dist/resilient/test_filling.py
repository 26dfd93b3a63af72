"""Copies with a CRC in one pass: the C core and torch write the same bytes."""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from echelon.dist.resilient.copies import filling

_HAS_CORE = filling._has_core
_LENGTHS = (0, 1, 3, 15, 16, 63, 64, 65, 80, 127, 128, 129, 255, 256, 272, 1000)


@pytest.fixture(params=["C, wide", "C", "torch"])
def has_core(request, monkeypatch):
    if request.param != "torch" and not _HAS_CORE:
        pytest.skip("the C core was not built, or the processor lacks the instructions")
    monkeypatch.setattr(filling, "_has_core", request.param != "torch")
    if not _HAS_CORE:
        yield
        return
    is_wide = filling._native.widen(request.param == "C, wide")
    if request.param == "C, wide" and not is_wide:
        pytest.skip("the processor lacks the wide instructions")
    yield
    filling._native.widen(True)


def _random_bytes(draw, length):
    return torch.frombuffer(bytearray(draw.randbytes(length + 1)), dtype=torch.uint8)[:length]


@pytest.mark.usefixtures("has_core")
@pytest.mark.parametrize("start", [0, 1, 16, 32])
def test_pieces_lie_where_they_should_with_zeros_between(start):
    draw = random.Random(start)
    for _ in range(60):
        pieces, stop = [], 0
        expected = bytearray()
        for length in draw.sample(_LENGTHS, draw.randint(0, 6)):
            first = stop + draw.choice((0, 1, 16, 70))
            data = _random_bytes(draw, length + 1)[1:]  # from any address
            pieces.append((first, data))
            expected += bytes(first - stop) + data.numpy().tobytes()
            stop = first + length
        expected += bytes(draw.choice((0, 5, 64)))
        vector = _random_bytes(draw, start + len(expected))[start:]
        crc = filling.fill(vector, pieces)
        assert vector.numpy().tobytes() == bytes(expected)
        assert crc == zlib.crc32(expected)


@pytest.mark.usefixtures("has_core")
def test_the_crc_is_that_of_zlib_at_any_length():
    draw = random.Random(1)
    for length in [*range(300), 4095, 4096, 100_001]:
        data = _random_bytes(draw, length)
        assert filling.crc_of(data) == zlib.crc32(data.numpy().tobytes()), length


@pytest.mark.usefixtures("has_core")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_elements_of_any_dtype_keep_their_bits(dtype):
    values = torch.tensor([1.5, -0.0, float("nan"), 3e30]).repeat(9).to(dtype)
    vector = torch.empty(values.numel() * values.itemsize, dtype=torch.uint8)
    filling.fill(vector, [(0, values.view(6, 6))])
    assert torch.equal(vector, values.view(torch.uint8))


@pytest.mark.skipif(not _HAS_CORE, reason="no C core here")
@pytest.mark.parametrize("firsts", [(0, 3), (-1, 8), (0, 13), (8, 0)])
def test_the_core_writes_nothing_outside(firsts):
    vector = torch.zeros(16, dtype=torch.uint8)
    four = torch.ones(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="overlaps the one before, or exceeds"):
        filling.fill(vector, [(first, four) for first in firsts])
    assert not vector.any()
