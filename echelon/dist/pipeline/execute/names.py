"""Combine a rank's stages into one module with parameters named as in the whole model.

Checkpoints store tensors by name. If each stage numbered its layers from 0, names would clash
between stages, and a checkpoint could be loaded only into a model that is split in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from echelon.dist.pipeline.execute.stage import Stage


class StageModules(nn.Module):
    """A rank's stages as one module with parameters and state named as in the whole model.

    The module is only a container for the stages' modules and has no `forward`.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        super().__init__()
        self._stages = list(stages)
        self.stages = nn.ModuleList([stage.module for stage in stages])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the whole model, parameter) pairs; see torch's `named_parameters`."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self._whole_name(name), parameter

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """Return the stages' states under the names used in the whole model.

        Raises:
            ValueError: two stages use the same name.
        """
        states: dict[str, Any] = {}
        owner: dict[str, Stage] = {}
        for stage in self._stages:
            for name, value in stage.module.state_dict(keep_vars=keep_vars).items():
                whole = stage.prefix + name
                if whole in states:
                    raise ValueError(
                        f"{owner[whole]} and {stage} both have a parameter or buffer named "
                        f"{whole!r}: make stages with split(), which keeps the model's names, or "
                        "pass Stage(prefix=...)"
                    )
                states[whole], owner[whole] = value, stage
        return states

    def load_state_dict(  # type: ignore[override]
        self, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Load a state that `state_dict` returned.

        Names that belong to other ranks' stages are ignored.
        """
        for stage in self._stages:
            start = len(stage.prefix)
            names = stage.module.state_dict()
            own = {
                name[start:]: value
                for name, value in state_dict.items()
                if name.startswith(stage.prefix) and name[start:] in names
            }
            stage.module.load_state_dict(own, strict=strict)

    def _whole_name(self, name: str) -> str:
        """Convert a name such as `stages.1.layer.weight` to the name used in the whole model."""
        _, number, local = name.split(".", 2)
        return self._stages[int(number)].prefix + local
