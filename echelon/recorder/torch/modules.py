"""Run an action on a module as soon as the module is loaded.

An entry in `sys.meta_path` intercepts the import of a watched module and runs the action after the
module's own code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from echelon.recorder.torch.guarding import quietly

Action = Callable[[Any], object]
_Spec = importlib.machinery.ModuleSpec


class Later(importlib.abc.MetaPathFinder):
    """An import finder that runs an action after the import of each watched module."""

    def __init__(self) -> None:
        self._actions: dict[str, Action] = {}

    def run(self, name: str, action: Action) -> None:
        """Run `action` on the module `name` now if it is imported, otherwise after its import."""
        module = sys.modules.get(name)
        if module is not None:
            quietly(action, module)
            return
        self._actions[name] = action
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> _Spec | None:
        """Find a watched module through the other finders, and attach its action."""
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else cast("_Spec | None", find(fullname, path, target))
            if spec is not None:
                quietly(_act_after, spec.loader, action)
                return spec
        return None


def _act_after(loader: Any, action: Action) -> None:
    """Make a loader run `action` on each module that it loads."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        quietly(action, module)

    loader.exec_module = exec_module
