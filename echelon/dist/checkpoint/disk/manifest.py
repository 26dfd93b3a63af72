"""Define the manifest, which holds plain values and records where tensors are stored.

A tensor is treated as a sequence of elements in row-major order. Each rank writes parts of tensors
to its own file, and a `Range` describes each part. A loading rank reads the ranges that overlap the
elements it needs, so any number of ranks can load a checkpoint.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgpack
import numpy as np

from echelon.dist.checkpoint.disk.pattern import Pattern, Repeats

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

FORMAT = 1
BLOCK_BYTES = 1 << 20  # a file has a checksum for each block, so that a part can be read alone
_SEAL_BYTES = 4
_DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


def dtype_bytes(dtype: str) -> int:
    """Return the size in bytes of one element of this dtype.

    Raises:
        ValueError: a checkpoint cannot hold this dtype.
    """
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"a checkpoint cannot hold tensors of dtype {dtype}")
    return _DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class Range:
    """Elements of a tensor that are contiguous in a file, starting at byte `offset`.

    The first `length` elements have the indices [start, start + length). `repeats` describes
    further groups of `length` elements; see `Pattern`.
    """

    file: int
    offset: int
    start: int
    length: int
    repeats: Repeats = ()

    @property
    def pattern(self) -> Pattern:
        """The indices of the range's elements within the tensor, as a `Pattern`."""
        return Pattern(self.start, self.length, self.repeats)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's shape and dtype, and its ranges, sorted by `start`."""

    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file's name and size, and the CRC-32 of each of its blocks."""

    name: str
    num_bytes: int
    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint's contents, or of the part that one rank wrote.

    Attributes:
        world_size: the number of ranks that saved the checkpoint.
        save: the token of the save.
        kinds: the kind of each state entry (module, optimizer, object, random or value).
        tensors: the stored tensors, keyed by a path such as "model/blocks.0.weight".
        aliases: the additional paths of tensors that are stored only once, such as tied weights.
        values: the packed plain values, keyed by path.
        files: the ranks' files, keyed by rank.
    """

    world_size: int
    save: str = ""
    kinds: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    files: dict[int, StoredFile] = field(default_factory=dict)

    def tensor(self, path: str) -> StoredTensor | None:
        """Return the tensor stored under a path or an alias, or None if there is none."""
        return self.tensors.get(self.aliases.get(path, path))

    def paths(self) -> set[str]:
        """Return the paths and aliases of all tensors."""
        return {*self.tensors, *self.aliases}


# ---- bytes ----


def seal(data: bytes) -> bytes:
    """Return the data with a checksum appended."""
    return data + zlib.crc32(data).to_bytes(_SEAL_BYTES, "little")


def unseal(data: bytes) -> bytes:
    """Verify and remove the checksum that `seal` appended.

    Raises:
        ValueError: the checksum does not match.
    """
    content, checksum = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if len(checksum) < _SEAL_BYTES or zlib.crc32(content).to_bytes(4, "little") != checksum:
        raise ValueError("the manifest's checksum is wrong")
    return content


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as bytes that end with a checksum (see `seal`)."""
    content = {
        "format": FORMAT,
        "block_bytes": BLOCK_BYTES,
        "world_size": manifest.world_size,
        "save": manifest.save,
        "kinds": manifest.kinds,
        "tensors": {
            path: [
                list(tensor.shape),
                tensor.dtype,
                [_pack_range(one) for one in tensor.ranges],
            ]
            for path, tensor in manifest.tensors.items()
        },
        "aliases": manifest.aliases,
        "values": manifest.values,
        "files": {
            number: [file.name, file.num_bytes, list(file.checksums)]
            for number, file in manifest.files.items()
        },
    }
    packed: bytes = msgpack.packb(content, use_bin_type=True)
    return seal(packed)


def decode(data: bytes) -> Manifest:
    """Decode a manifest that `encode` produced, and validate its contents.

    Raises:
        ValueError: the data is damaged, inconsistent, or in an unsupported format.
    """
    content = unseal(data)
    try:
        plain = msgpack.unpackb(content, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"the file is not a manifest ({error})") from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        found = plain.get("format") if isinstance(plain, dict) else None
        raise ValueError(
            f"the manifest has format {found}, but this version of echelon reads format {FORMAT}"
        )
    try:
        manifest = _read(plain)
        _check(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the file is not a manifest ({type(error).__name__}: {error})") from None
    return manifest


def _pack_range(one: Range) -> list[int]:
    numbers = [one.file, one.offset, one.start, one.length]
    return numbers + [number for repeat in one.repeats for number in repeat]


def _read_range(numbers: list[Any]) -> Range:
    file, offset, start, length, *rest = (_whole(number) for number in numbers)
    return Range(file, offset, start, length, tuple(zip(rest[::2], rest[1::2], strict=True)))


def _read(plain: dict[str, Any]) -> Manifest:
    if plain["block_bytes"] != BLOCK_BYTES:
        raise ValueError(
            f"the manifest's block size is {plain['block_bytes']} bytes; expected {BLOCK_BYTES}"
        )
    return Manifest(
        world_size=_whole(plain["world_size"]),
        save=_text(plain.get("save", "")),
        kinds={_text(path): _text(kind) for path, kind in plain["kinds"].items()},
        tensors={
            _text(path): StoredTensor(
                shape=tuple(_whole(length) for length in shape),
                dtype=_text(dtype),
                ranges=tuple(_read_range(numbers) for numbers in ranges),
            )
            for path, (shape, dtype, ranges) in plain["tensors"].items()
        },
        aliases={_text(path): _text(target) for path, target in plain["aliases"].items()},
        values={_text(path): bytes(value) for path, value in plain["values"].items()},
        files={
            _whole(number): StoredFile(
                _text(name), _whole(num_bytes), tuple(_whole(crc) for crc in checksums)
            )
            for number, (name, num_bytes, checksums) in plain["files"].items()
        },
    )


def _whole(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise TypeError(f"expected an integer >= 0, got {number!r}")
    return number


def _text(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(f"expected a string, got {text!r}")
    return text


def _check(manifest: Manifest) -> None:
    for file in manifest.files.values():
        num_blocks = -(-file.num_bytes // BLOCK_BYTES)
        if "/" in file.name or file.name.startswith(".") or len(file.checksums) != num_blocks:
            raise ValueError(f"the entry for file {file.name!r} is not valid")
    for path, tensor in manifest.tensors.items():
        size = dtype_bytes(tensor.dtype)
        for one in tensor.ranges:
            limit, pattern = manifest.files[one.file].num_bytes, one.pattern
            is_outside = pattern.stop > tensor.numel or pattern.numel > tensor.numel
            if is_outside or one.offset + pattern.numel * size > limit or pattern.num_runs < 1:
                raise ValueError(f"{path}: a range lies outside the tensor or its file")


def check_complete(manifest: Manifest) -> None:
    """Check that the files contain each element of each tensor exactly once.

    Raises:
        ValueError: an element is missing or stored twice, or an alias refers to a missing tensor.
    """
    for path, tensor in manifest.tensors.items():
        _check_cover(path, tensor)
    for path, target in manifest.aliases.items():
        if target not in manifest.tensors:
            raise ValueError(f"{path} is an alias of a tensor that is missing")


def _check_cover(path: str, tensor: StoredTensor) -> None:
    position, last = 0, -1
    for start, length, file in _runs(tensor):
        if start > position:
            break
        if start < position:
            raise ValueError(
                f"{path}: element {start} is stored in both file {last} and file {file}"
            )
        position, last = start + length, file
    if position < tensor.numel:
        raise ValueError(f"{path}: no rank holds element {position} of {tensor.numel}")


def _runs(tensor: StoredTensor) -> Iterable[tuple[int, int, int]]:
    """Return the start, length and file of each contiguous range of a tensor, sorted by start."""
    if not any(one.repeats for one in tensor.ranges):
        return ((one.start, one.length, one.file) for one in tensor.ranges)
    columns = [
        np.stack(np.broadcast_arrays(one.pattern.starts(), one.length, one.file), axis=1)
        for one in tensor.ranges
    ]
    rows = np.concatenate(columns)
    ordered = rows[np.argsort(rows[:, 0], kind="stable")]
    return (tuple(row) for row in ordered.tolist())


# ---- several ranks' into one ----


Compare = Callable[[Range, Range], bool]  # of one length: whether their bytes are equal


def merge(parts: Sequence[Manifest], compare: Compare | None = None) -> Manifest:
    """Merge the ranks' parts of a manifest.

    If several ranks stored a plain value under the same path, the lowest rank's value is used. If
    two ranks wrote the same elements, `compare` checks that both copies are equal.

    Raises:
        ValueError: the parts contradict each other, or elements are missing.
    """
    whole = Manifest(world_size=len(parts), save=parts[0].save)
    ranges: dict[str, list[Range]] = {}
    for rank, part in enumerate(parts):
        _add(whole.kinds, part.kinds)
        _add(whole.aliases, part.aliases)
        _add(whole.values, part.values)
        _add(whole.files, part.files)
        for path, tensor in part.tensors.items():
            known = whole.tensors.setdefault(path, tensor)
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"{path} is {tensor.dtype}{list(tensor.shape)} on rank {rank}, but "
                    f"{known.dtype}{list(known.shape)} on a lower rank"
                )
            ranges.setdefault(path, []).extend(tensor.ranges)
    for path, tensor in whole.tensors.items():
        in_order = sorted(ranges[path], key=lambda one: (one.start, one.file))
        if not any(one.repeats for one in in_order):
            in_order = _without_overlaps(path, dtype_bytes(tensor.dtype), in_order, compare)
        whole.tensors[path] = StoredTensor(tensor.shape, tensor.dtype, tuple(in_order))
        whole.aliases.pop(path, None)
    check_complete(whole)
    return whole


def _without_overlaps(
    path: str, size: int, in_order: Sequence[Range], compare: Compare | None
) -> list[Range]:
    chosen: list[Range] = []
    position = 0
    for one in in_order:
        stop = one.start + one.length
        for known in chosen:
            first, last = max(one.start, known.start), min(stop, known.start + known.length)
            if first >= last:
                continue
            pair = _cut(one, first, last, size), _cut(known, first, last, size)
            if compare is None or not compare(*pair):
                raise ValueError(
                    f"{path}: element {first} differs between files {known.file} and {one.file}"
                )
        if stop > position:
            chosen.append(_cut(one, max(position, one.start), stop, size))
            position = stop
    return chosen


def _cut(one: Range, first: int, last: int, size: int) -> Range:
    return Range(one.file, one.offset + (first - one.start) * size, first, last - first)


def _add(ours: dict[_Key, _Value], theirs: dict[_Key, _Value]) -> None:
    for key, value in theirs.items():
        ours.setdefault(key, value)
