"""Present a `transformers` folder as a source of a module's tensors, under echelon's names.

Tensors are read on demand, from `model.safetensors` or from the files that
`model.safetensors.index.json` lists. Transposed tensors are read whole, one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.dist.checkpoint.disk.manifest import Manifest, StoredTensor
from echelon.dist.checkpoint.disk.pattern import Repeats
from echelon.dist.checkpoint.disk.source import runs
from echelon.dist.checkpoint.disk.tensor_bytes import dtype_named
from echelon.dist.checkpoint.foreign.safetensors_file import SafetensorsFile
from echelon.dist.checkpoint.state.entries import MODULE
from echelon.errors import CheckpointError
from echelon.train.models.config import ModelConfig
from echelon.train.models.hugging_face.names import (
    HEAD,
    PREFIX,
    TOKEN,
    Part,
    Whole,
    is_derived,
    lacks_prefix,
    wholes,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
KEY = "model"  # of the state that is loaded
_FILE = "file"
_WEIGHT_DTYPES = ("float64", "float32", "bfloat16", "float16")
_COMPARED_ELEMENTS = 1 << 24
_MAX_NAMED = 4


class HuggingFaceFolder:
    """The tensors of a folder, presented as a checkpoint of the model.

    Args:
        folder: a folder of safetensors files.
        config: the config of the stored model.
        compare: whether to compare a stored head with the embedding that it is tied to; only one
            rank needs to make this comparison.

    Attributes:
        path: the folder.
        manifest: the tensors' names in echelon, their shapes and their dtypes.

    Raises:
        CheckpointError: a file is missing or damaged; tensors are missing or unexpected, or their
            shapes do not match the config; or a head differs from the embedding that it is tied to.
    """

    def __init__(self, folder: Path, config: ModelConfig, *, compare: bool = True) -> None:
        self.path = folder
        self._files: list[SafetensorsFile] = []
        self._last: tuple[str, Tensor] | None = None
        try:
            self._places = self._open()
            expected = wholes(config)
            self._check(expected, config)
            if compare and config.tied:
                self._compare_head(expected)
        except BaseException:
            self.close()
            raise
        self._parts = {f"{KEY}/{part.ours}": (one, part) for one in expected for part in one.parts}
        self.manifest = Manifest(
            world_size=1,
            kinds={KEY: MODULE},
            tensors={
                path: StoredTensor(part.shape, self._stored(one.name).dtype, ())
                for path, (one, part) in self._parts.items()
            },
            aliases={f"{KEY}/{HEAD}": f"{KEY}/{TOKEN}"} if config.tied else {},
        )

    def read(self, path: str, start: int, out: Tensor, repeats: Repeats = ()) -> None:
        """Fill `out` with a tensor's elements from index `start` onward; see `Source.read`.

        Raises:
            CheckpointError: a file is truncated.
        """
        whole, part = self._parts[self.manifest.aliases.get(path, path)]
        if not part.transposed and len(whole.parts) == 1:
            self._read_file(whole.name, start, out, repeats)
            return
        stored = self._read_part(whole, part).reshape(-1)
        for first, piece in runs(start, out, repeats):
            piece.copy_(stored[first : first + piece.numel()])

    def close(self) -> None:
        """Close the files. Can be called more than once."""
        self._last = None
        while self._files:
            self._files.pop().close()

    def _read_part(self, whole: Whole, part: Part) -> Tensor:
        columns = self._read_whole(whole.name).narrow(-1, part.start, part.length)
        return columns.t() if part.transposed else columns

    def _read_whole(self, name: str) -> Tensor:
        """Return one of the folder's tensors, and cache it until another tensor is read."""
        if self._last is None or self._last[0] != name:
            self._last = None
            stored = self._stored(name)
            content = torch.empty(stored.numel, dtype=dtype_named(stored.dtype))
            self._read_file(name, 0, content)
            self._last = (name, content.reshape(stored.shape))
        return self._last[1]

    # ---- contents ----

    def _open(self) -> dict[str, SafetensorsFile]:
        """Open all files; return the file that contains each tensor, keyed by tensor name."""
        listed = {} if (self.path / SINGLE).exists() else self._read_index()
        places: dict[str, SafetensorsFile] = {}
        for name in sorted(set(listed.values())) or [SINGLE]:
            file = SafetensorsFile(self.path / name, {_FILE: nn.Module()})
            self._files.append(file)
            for path in file.manifest.tensors:
                tensor = path.removeprefix(f"{_FILE}/")
                if listed and listed.get(tensor) != name:
                    raise self._error(
                        f"{name} contains {tensor}, which {INDEX} does not list for this file"
                    )
                places[tensor] = file
        gone = sorted(set(listed) - set(places))
        if gone:
            raise self._error(f"{INDEX} lists tensors that are missing: {_some(gone)}")
        if lacks_prefix(places):
            places = {
                name if name.startswith(("lm_head.", PREFIX)) else f"{PREFIX}{name}": file
                for name, file in places.items()
            }
            self._bare = True
        return places

    _bare = False  # GPT-2's names are stored without their prefix

    def _read_index(self) -> dict[str, str]:
        path = self.path / INDEX
        try:
            listed = json.loads(path.read_bytes())["weight_map"]
        except OSError:
            hint = ""
            if any(self.path.glob("*.bin")):
                hint = "; its .bin files are pickles: save the model again with transformers"
            raise self._error(f"the folder contains neither {SINGLE} nor {INDEX}{hint}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: the file is not a valid index ({error!r})", path=path
            ) from None
        if not listed or not isinstance(listed, dict) or not all(map(_is_plain, listed.values())):
            raise CheckpointError(
                f"{path}: weight_map must map tensor names to files in the same folder", path=path
            )
        return listed

    def _check(self, expected: Iterable[Whole], config: ModelConfig) -> None:
        shapes = {one.name: one.shape for one in expected}
        there = {name for name in self._places if not is_derived(name)}
        if config.tied:
            there -= {"lm_head.weight"}
        problems = []
        if missing := sorted(set(shapes) - there):
            problems.append(f"missing: {_some(missing)}")
        if extra := sorted(there - set(shapes)):
            problems.append(
                f"these tensors are not part of a model with this config: {_some(extra)}"
            )
        wrong = [
            f"{name} {list(self._stored(name).shape)}, not {list(shapes[name])}"
            for name in sorted(there & set(shapes))
            if self._stored(name).shape != shapes[name]
        ]
        if wrong:
            problems.append(
                f"these tensors have a shape that differs from the config: {_some(wrong)}"
            )
        kinds = {self._stored(name).dtype for name in there & set(shapes)} - {*_WEIGHT_DTYPES}
        if kinds:
            problems.append(f"weights of {_some(sorted(kinds))} are not implemented")
        if problems:
            raise self._error("; ".join(problems))

    def _compare_head(self, expected: Iterable[Whole]) -> None:
        """Check that a stored head equals the embedding to which the config ties it."""
        head = "lm_head.weight"
        if head not in self._places:
            return
        embedding = next(one.name for one in expected if one.parts[0].ours == TOKEN)
        names = (embedding, head)
        stored = [self._stored(name) for name in names]
        same = stored[0].shape == stored[1].shape and stored[0].dtype == stored[1].dtype
        for start in range(0, stored[0].numel if same else 0, _COMPARED_ELEMENTS):
            length = min(_COMPARED_ELEMENTS, stored[0].numel - start)
            pieces = [torch.empty(length, dtype=dtype_named(stored[0].dtype)) for _ in names]
            for name, piece in zip(names, pieces, strict=True):
                self._read_file(name, start, piece)
            same = same and torch.equal(*pieces)
        if not same:
            raise self._error(f"{head} differs from {embedding}, although the config ties them")

    def _read_file(self, name: str, start: int, out: Tensor, repeats: Repeats = ()) -> None:
        self._places[name].read(self._path_in_file(name), start, out, repeats)

    def _stored(self, name: str) -> StoredTensor:
        return self._places[name].manifest.tensors[self._path_in_file(name)]

    def _path_in_file(self, name: str) -> str:
        return f"{_FILE}/{name.removeprefix(PREFIX) if self._bare else name}"

    def _error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}", path=self.path)


def _is_plain(name: Any) -> bool:
    """Return whether a name refers to a file directly in the folder."""
    return isinstance(name, str) and Path(name).name == name


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(list(names)[:_MAX_NAMED]) + more
