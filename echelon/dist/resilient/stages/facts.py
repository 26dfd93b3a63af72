"""Record, by name, those settings of a rank's stages and optimizer that a step can change.

These are the settings of the optimizer's parameter groups, the `training` flag of each module, and
the `requires_grad` flag of each parameter. Rebuilt stages receive the values recorded under the
same names, regardless of which rank recorded them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from echelon.dist.resilient.digest import digest
from echelon.dist.resilient.stages.setup import PipelineSetup, named_modules, named_tensors

_OWN = ("params", "param_names")  # of a group of the optimizer; they differ between stages


def facts_of(setup: PipelineSetup[Any]) -> dict[str, Any]:
    """Return the settings to store in the index of a copy; see `Facts`."""
    stages = setup.pipe.stages
    names = _names(setup)
    modes: dict[str, set[bool]] = {}
    for name, module in named_modules(stages):
        modes.setdefault(name, set()).add(module.training)
    return {
        "modes": {name: found.pop() for name, found in modes.items() if len(found) == 1},
        "trains": {
            name: one.requires_grad
            for name, one, _ in named_tensors(stages)
            if isinstance(one, torch.nn.Parameter)
        },
        "groups of the optimizer": [
            [_settings(group), [name for one in group["params"] for name in names[one]]]
            for group in setup.optimizer.param_groups
        ],
    }


class Facts:
    """The settings of the whole model's stages, collected from all ranks' copies."""

    def __init__(self) -> None:
        self._modes: dict[str, set[bool]] = {}
        self._trains: dict[str, bool] = {}
        self._settings: dict[str, dict[str, Any]] = {}  # by parameter
        self._groups: dict[int, dict[str, Any]] = {}  # for groups that have no parameters here

    def add(self, facts: dict[str, Any]) -> None:
        """Add to these facts the settings in the index of one copy of the state."""
        for name, is_training in facts["modes"].items():
            self._modes.setdefault(name, set()).add(is_training)
        self._trains |= facts["trains"]
        for number, (settings, names) in enumerate(facts["groups of the optimizer"]):
            self._settings |= dict.fromkeys(names, settings)
            if names:
                self._groups.setdefault(number, settings)

    def apply(self, setup: PipelineSetup[Any]) -> None:
        """Apply the settings to the stages and the optimizer of a new world.

        Raises:
            ValueError: a parameter group contains parameters whose recorded settings differ.
        """
        stages = setup.pipe.stages
        for name, module in named_modules(stages):
            found = self._modes.get(name, set())
            if len(found) == 1:  # stages that have the same name may differ
                (module.training,) = found
        for name, tensor, _ in named_tensors(stages):
            trains = self._trains.get(name, tensor.requires_grad)
            if tensor.requires_grad != trains and tensor.is_leaf:
                tensor.requires_grad_(trains)
        names = _names(setup)
        for number, group in enumerate(setup.optimizer.param_groups):
            own = [name for one in group["params"] for name in names[one]]
            settings = self._settings_of(number, own)
            if settings is not None:
                for key in [key for key in group if key not in settings and key not in _OWN]:
                    del group[key]
                group.update(copy.deepcopy(settings))

    def _settings_of(self, number: int, names: list[str]) -> dict[str, Any] | None:
        known = [name for name in names if name in self._settings]
        if not known:
            return self._groups.get(number)
        settings = [self._settings[name] for name in known]
        digests = [digest(one) for one in settings]
        for name, one, found in zip(known, settings, digests, strict=True):
            if found != digests[0]:
                key = next(key for key in one if digest(one[key]) != digest(settings[0].get(key)))
                raise ValueError(
                    f"build put {known[0]!r} and {name!r} into one group of the optimizer, but "
                    f"{key!r} was {settings[0].get(key)!r} for one and {one[key]!r} for the other: "
                    "build the same groups in every world"
                )
        return settings[0]


def _names(setup: PipelineSetup[Any]) -> dict[torch.Tensor, list[str]]:
    """Map each tensor of the stages to its names in the whole model."""
    found: dict[torch.Tensor, list[str]] = {}
    for name, tensor, _ in named_tensors(setup.pipe.stages):
        found.setdefault(tensor, []).append(name)
    return found


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN}
