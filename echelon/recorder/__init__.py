"""Write a rank's black box with `span`, `step` and `watch`, and read rings and dumps."""

from typing import TYPE_CHECKING, Any

from echelon.recorder.checkpoints import last_step
from echelon.recorder.marks import span, step, watch

if TYPE_CHECKING:
    from echelon.recorder.read.torch_export import export_torch

__all__ = ["span", "step", "watch", "last_step", "export_torch"]


def __getattr__(name: str) -> Any:
    if name != "export_torch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from echelon.recorder.read.torch_export import export_torch

    return export_torch
