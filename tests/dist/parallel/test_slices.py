"""Where a run of a slice's elements lies in the whole tensor."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from echelon.dist.checkpoint.disk.pattern import Pattern  # noqa: E402
from echelon.dist.checkpoint.state import shards  # noqa: E402
from echelon.dist.fsdp.parameters.slices import Slice, set_slice, slice_of  # noqa: E402


def _places(one):
    num_runs = 1
    for count, _ in one.repeats:
        num_runs *= count
    pattern = Pattern(one.start, one.data.numel() // num_runs, one.repeats)
    starts = pattern.starts().tolist() if one.data.numel() else []
    return [first + k for first in starts for k in range(pattern.length)]


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_the_elements_of_the_whole_tensor(seed):
    chosen = random.Random(seed)
    count = chosen.choice([2, 3, 4])
    shape = [chosen.randint(1, 4) for _ in range(chosen.randint(1, 3))]
    dim = chosen.randrange(len(shape))
    shape[dim] *= count
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = Slice(tuple(shape), dim, chosen.randrange(count), count)
    flat = part.of(whole).reshape(-1)
    assert part.local_shape == tuple(part.of(whole).shape)
    start = chosen.randint(0, len(flat))
    stop = chosen.randint(start, len(flat))
    found = shards._pieces_of_slice(flat[start:stop], start, part)
    assert len(found) <= 3
    assert all(one.shape == tuple(shape) and one.sharded for one in found)
    elements = [value for one in found for value in one.data.reshape(-1).tolist()]
    assert elements == flat[start:stop].tolist()
    assert [place for one in found for place in _places(one)] == elements


def test_an_optimizers_state_has_the_places_of_its_parameter():
    part = Slice((3, 8), 1, 1, 2)
    parameter = nn.Parameter(part.of(torch.arange(24.0).view(3, 8)).contiguous())
    set_slice(parameter, part)
    assert slice_of(parameter) == part
    assert shards.whole_shape(parameter) == (3, 8)
    assert shards.is_divided(parameter)
    assert not shards.is_divided(nn.Parameter(torch.ones(2)))
    moments = torch.arange(12.0).view(3, 4)
    (one,) = shards.pieces_like(parameter, moments)
    assert (one.start, one.repeats, one.shape) == (4, ((3, 8),), (3, 8))
    assert one.data is moments or torch.equal(one.data, moments)
