"""Plans, which define a model's FSDP units, tensor-parallel modules and pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from torch import nn

    MakeStage = Callable[[nn.Module, int, int], nn.Module]

TensorStyle = Literal["region", "column", "row", "vocabulary", "embedding", "head"]
_STYLES = get_args(TensorStyle)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan for distributing one kind of model.

    In a pattern, `*` matches within one component of a dotted name.

    Attributes:
        blocks: patterns of the modules that become units of `fully_shard`, in the order of the
            model. All other parameters of the model, or of a stage, form one more unit.
        tensor: patterns of the modules that tensor parallelism changes, each with a style:

            * "region": a module that contains "column" and "row" modules, such as attention or a
              feed-forward network; its first argument enters the tensor-parallel region.
            * "column": an `nn.Linear` split along its output dimension.
            * "row": an `nn.Linear` split along its input dimension; its outputs are summed over
              the ranks.
            * "vocabulary": an `nn.Embedding` whose rows are split evenly, if possible; otherwise
              the same as "embedding".
            * "embedding": an `nn.Embedding` that every rank holds in full.
            * "head": an `nn.Linear` whose outputs are split evenly, if possible, and then
              gathered.

        stages: called with the model, the index of a stage and the number of stages; returns the
            stage's module, whose parameters are named as in the model. None if the model cannot run
            as a pipeline.
        divisors: numbers that must be multiples of the number of tensor-parallel ranks, such as
            the number of heads, keyed by the names that error messages use.

    Example:
        >>> plan = Plan(
        ...     blocks=("layers.*",),
        ...     tensor={"layers.*": "region", "layers.*.up": "column", "layers.*.down": "row"},
        ... )
    """

    blocks: tuple[str, ...] = ()
    tensor: Mapping[str, TensorStyle] = field(default_factory=dict)
    stages: MakeStage | None = None
    divisors: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that all styles are known.

        Raises:
            ValueError: a style is unknown.
        """
        for pattern, style in self.tensor.items():
            if style not in _STYLES:
                raise ValueError(
                    f"plan.tensor[{pattern!r}] must be one of {', '.join(_STYLES)}, got {style!r}"
                )


def is_match(name: str, pattern: str) -> bool:
    """Return whether a module's dotted name matches a pattern, component by component."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def matches(
    model: nn.Module, patterns: Iterator[str] | tuple[str, ...]
) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the name, module and pattern of each match, in the model's order.

    Raises:
        ValueError: a pattern does not match any module.
    """
    unused = list(patterns)
    wanted = tuple(unused)
    for name, module in model.named_modules():
        for pattern in wanted:
            if is_match(name, pattern):
                if pattern in unused:
                    unused.remove(pattern)
                yield name, module, pattern
                break
    if unused:
        raise ValueError(
            f"the plan's pattern {unused[0]!r} matches no module of {type(model).__name__}"
        )
