"""Split a model of consecutive layers into stages of nearly equal cost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# Of each stage: all places, `stage:name`, of each of its parameters that other stages use too.
_shared: WeakKeyDictionary[nn.Module, list[list[str]]] = WeakKeyDictionary()


class Layers(nn.Module):
    """Layers that run one after another.

    Each layer keeps its name in the whole model, even if the name contains dots.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = list(layers)
        for name, layer in layers.items():
            *folders, last = name.split(".")
            holder: nn.Module = self
            for folder in folders:
                if folder not in dict(holder.named_children()):
                    holder.add_module(folder, nn.Module())
                holder = holder.get_submodule(folder)
            holder.add_module(last, layer)

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._names)

    def forward(self, *inputs: Any) -> Any:
        """Call the layers in order, each with the output of the previous layer."""
        for name in self._names:
            inputs = self.get_submodule(name)(*inputs)
            inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return inputs[0] if len(inputs) == 1 else inputs


def split(
    model: nn.Sequential | Sequence[nn.Module] | Mapping[str, nn.Module],
    num_stages: int,
    costs: Sequence[float] | None = None,
) -> list[nn.Module]:
    """Split consecutive layers into stages, minimizing the cost of the most expensive stage.

    The stages' parameters have the same names as in the whole model, so that a checkpoint of the
    stages can be loaded into the model or into any other number of stages. Layers in a list are
    named by their positions.

    Args:
        model: layers that run one after another, each on the output of the previous layer. A dict's
            keys are the layers' names in the model and can contain dots: `{"wte": wte, "h.0":
            block, ...}`.
        num_stages: the number of stages; at most the number of layers.
        costs: the cost of each layer, in any unit, preferably measured; None means the layer's
            number of parameters plus a small constant.

    Returns:
        The stages in order, as `nn.Sequential`s, or as `Layers` if `model` is a dict. The stages
            contain the model's own layers, not copies. A parameter that is used by stages on
            different ranks must be listed in the pipeline's `ties`.

    Raises:
        ValueError: the numbers of layers, stages and costs do not match.

    Example:
        >>> layers = [nn.Linear(8, 8) for _ in range(4)]
        >>> [len(stage) for stage in split(layers, num_stages=2, costs=[3, 1, 1, 1])]
        [1, 3]
    """
    names, layers = _named(model)
    if not all(isinstance(layer, nn.Module) for layer in layers):
        raise ValueError("split takes an nn.Sequential, a list or a dict of modules")
    if not 1 <= num_stages <= len(layers):
        raise ValueError(f"{len(layers)} layers cannot be split into {num_stages} stages")
    if costs is None:
        sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        costs = [size + 0.01 * (sum(sizes) or 1) / len(layers) for size in sizes]
    if len(costs) != len(layers) or min(costs) < 0:
        raise ValueError(f"costs must be {len(layers)} numbers >= 0, got {list(costs)}")
    ends = [*_cuts(list(costs), num_stages), len(layers)]
    parts = [
        OrderedDict(zip(names[start:end], layers[start:end], strict=True))
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    make = Layers if isinstance(model, Mapping) else nn.Sequential
    stages: list[nn.Module] = [make(part) for part in parts]
    _note_shared(stages)
    return stages


def shared_with(stage: nn.Module) -> Sequence[Sequence[str]]:
    """Return the parameters that a stage shares with other stages from the same call to `split`.

    Returns:
        For each shared parameter, all its names, as `stage:name`.
    """
    return _shared.get(stage, ())


def _note_shared(stages: Sequence[nn.Module]) -> None:
    places: dict[nn.Parameter, list[str]] = {}
    users: dict[nn.Parameter, set[int]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            places.setdefault(parameter, []).append(f"{number}:{name}")
            users.setdefault(parameter, set()).add(number)
    for parameter, numbers in users.items():
        if len(numbers) > 1:
            for number in numbers:
                _shared.setdefault(stages[number], []).append(places[parameter])


def _named(
    model: nn.Sequential | Sequence[nn.Module] | Mapping[str, nn.Module],
) -> tuple[list[str], list[nn.Module]]:
    if isinstance(model, nn.Sequential):  # named_children() leaves out a layer's second place
        return list(model._modules), list(model)
    if isinstance(model, Mapping):
        return list(model), list(model.values())
    return [str(number) for number in range(len(model))], list(model)


def _cuts(costs: list[float], num_parts: int) -> list[int]:
    """Split layers into parts by dynamic programming, minimizing the cost of the costliest part.

    Returns:
        The index of the first layer of each part except the first part.
    """
    total = [0.0, *accumulate(costs)]
    num = len(costs)
    # best[n]: the highest cost among the parts of the first n layers; cut[k][n]: where the last
    # part starts.
    best = total[:]
    cut: list[list[int]] = []
    for parts in range(2, num_parts + 1):
        row = [float("inf")] * (num + 1)
        chosen = [0] * (num + 1)
        for n in range(parts, num + 1):
            row[n], chosen[n] = min(
                (max(best[start], total[n] - total[start]), start) for start in range(parts - 1, n)
            )
        best = row
        cut.append(chosen)
    cuts: list[int] = []
    end = num
    for chosen in reversed(cut):
        end = chosen[end]
        cuts.append(end)
    return cuts[::-1]
