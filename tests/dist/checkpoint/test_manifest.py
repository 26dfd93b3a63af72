"""The arithmetic of ranges, and manifests that are not what was written."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from echelon.dist.checkpoint.disk.manifest import (  # noqa: E402
    Manifest,
    Range,
    StoredFile,
    StoredTensor,
    decode,
    encode,
    merge,
    seal,
)
from echelon.dist.checkpoint.state.checksum import checksum, sums  # noqa: E402
from echelon.dist.checkpoint.state.held import Held, share  # noqa: E402
from echelon.dist.checkpoint.state.plain import TensorAt, pack, unpack  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(DTYPES)), max_size=6),
    count=st.integers(1, 5),
)
@settings(max_examples=200, deadline=None)
def test_shares_hold_every_element_once_and_are_even(sizes, count):
    held = [Held(f"t{i}", (n,), torch.zeros(n, dtype=dtype)) for i, (n, dtype) in enumerate(sizes)]
    shares = [list(share(held, index, count)) for index in range(count)]
    for one in held:
        parts = [part for mine in shares for part in mine if part.path == one.path]
        elements = [i for part in parts for i in range(part.start, part.start + part.length)]
        assert sorted(elements) == list(range(one.length))
        assert parts, "an empty tensor is written too: it has a shape"
    num_bytes = [sum(part.data.nbytes for part in mine) for mine in shares]
    assert max(num_bytes) - min(num_bytes) <= 2 * 8  # an element at each end


def tensor(numel, *ranges):
    return StoredTensor((numel,), "float32", tuple(Range(*numbers) for numbers in ranges))


def written(numel, *ranges_of_ranks):
    return [
        Manifest(world_size=2, tensors={"t": tensor(numel, *ranges)}) for ranges in ranges_of_ranks
    ]


def test_ranges_of_several_ranks_are_put_in_order():
    parts = written(10, [(0, 0, 4, 6)], [(1, 8, 0, 4)], [])
    assert merge(parts).tensors["t"].ranges == (Range(1, 8, 0, 4), Range(0, 0, 4, 6))


@pytest.mark.parametrize(
    "ranges", [[], [[(0, 0, 1, 9)]], [[(0, 0, 0, 4)], [(1, 0, 5, 5)]], [[(0, 0, 0, 9)]]]
)
def test_elements_that_no_rank_wrote_are_an_error_that_names_the_first(ranges):
    with pytest.raises(ValueError, match=r"^t: no rank holds element (0|4|9) of 10$"):
        merge(written(10, *ranges or [[]]))


def test_elements_that_two_ranks_wrote_are_an_error():
    """... unless they are equal: stages that share a weight may divide it in different ways."""
    parts = written(10, [(0, 0, 0, 6)], [(1, 0, 4, 6)])
    with pytest.raises(ValueError, match=r"^t: element 4 differs between files 0 and 1$"):
        merge(parts)
    compared = []
    whole = merge(parts, lambda one, other: not compared.append((one, other)))
    assert compared == [(Range(1, 0, 4, 2), Range(0, 16, 4, 2))]
    assert whole.tensors["t"].ranges == (Range(0, 0, 0, 6), Range(1, 8, 6, 4))


def test_ranks_that_disagree_on_a_shape_are_an_error():
    parts = [Manifest(world_size=2, tensors={"t": tensor(n)}) for n in (4, 5)]
    with pytest.raises(
        ValueError, match=r"t is float32\[5\] on rank 1, but float32\[4\] on a lower rank"
    ):
        merge(parts)


def example() -> Manifest:
    return Manifest(
        world_size=2,
        kinds={"model": "module", "step": "value"},
        tensors={
            "model/w": tensor(6, (0, 0, 0, 4), (1, 0, 4, 2)),
            "model/s": tensor(1, (0, 16, 0, 1)),
        },
        aliases={"model/v": "model/w"},
        values={"step": pack(7, "step")},
        files={0: StoredFile("a.bin", 20, (1,)), 1: StoredFile("b.bin", 8, (2,))},
    )


def test_a_manifest_comes_back_as_it_was():
    assert decode(encode(example())) == example()


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_is_noticed(position, bit):
    data = bytearray(encode(example()))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(ValueError, match="checksum"):
        decode(bytes(data))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(
    field=st.sampled_from(sorted(msgpack.unpackb(encode(example())[:-4], strict_map_key=False))),
    value=ANYTHING,
)
@settings(max_examples=300, deadline=None)
def test_a_forged_manifest_is_refused_with_one_kind_of_error(field, value):
    """Whatever stands in a field, it is read as a manifest that makes sense, or is a ValueError."""
    content = msgpack.unpackb(encode(example())[:-4], strict_map_key=False)
    content[field] = value
    try:
        manifest = decode(seal(msgpack.packb(content)))
    except ValueError:
        return
    for stored in manifest.tensors.values():
        for one in stored.ranges:
            assert one.offset + 4 * one.length <= manifest.files[one.file].num_bytes


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", ".hidden"])
def test_a_manifest_cannot_name_a_file_elsewhere(name):
    content = msgpack.unpackb(encode(example())[:-4], strict_map_key=False)
    content["files"][0][0] = name
    with pytest.raises(ValueError, match="is not valid"):
        decode(seal(msgpack.packb(content)))


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
        | st.builds(TensorAt, st.text(max_size=5), st.sampled_from(["tensor", "array", "part"])),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers(0, 9), inner)
        ),
        max_leaves=10,
    )
)
@settings(max_examples=200, deadline=None)
def test_plain_values_come_back_as_they_were(value):
    """Tuples stay tuples, and integers may be of any size."""
    back = unpack(pack(value, "here"))
    assert back == value
    assert repr(back) == repr(value)


def test_numpy_scalars_become_plain_numbers():
    assert unpack(pack({"a": np.float64(0.5), "b": np.int32(3), "c": np.bool_(True)}, "x")) == {
        "a": 0.5,
        "b": 3,
        "c": True,
    }


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}, {"a": [object()]}, 1j, int])
def test_what_is_not_plain_is_refused_by_name(value):
    with pytest.raises(TypeError, match=r"^state/a: .*; a checkpoint holds tensors"):
        pack(value, "state/a")


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_noise_for_values_is_one_kind_of_error(data):
    try:
        unpack(data)
    except ValueError:
        return


@given(
    numel=st.integers(1, 5000),
    dtype=st.sampled_from(DTYPES),
    changes=st.lists(st.tuples(st.integers(0, 4999), st.integers(1, 255)), max_size=3),
)
@settings(max_examples=100, deadline=None)
def test_sums_differ_if_up_to_three_bytes_do(numel, dtype, changes):
    """What is compared where tensors are on a device: row and column sums of 32-bit words."""
    one = torch.arange(numel).to(dtype)
    other = one.clone()
    flat = other.view(torch.uint8)
    for position, change in changes:
        flat[position % flat.numel()] ^= change
    is_same = torch.equal(one.view(torch.uint8), flat)
    assert torch.equal(sums(one), sums(other)) == is_same
    assert (checksum(one) == checksum(other)) == is_same


def test_a_checksum_does_not_depend_on_how_the_elements_lie():
    matrix = torch.randn(70, 90)
    for kind in (checksum, lambda tensor: sums(tensor).sum().item()):
        assert kind(matrix.t()) == kind(matrix.t().contiguous())
    assert checksum(matrix) != checksum(matrix.t())
