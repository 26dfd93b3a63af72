"""Start recording a torch program when it creates its first process group.

Recording does not start earlier, because a launcher that runs in a rank's environment must not take
over the rank's ring. The wait for other ranks is recorded as a `store` span.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import echelon.recorder.current as black_box
from echelon.recorder import marks
from echelon.recorder.torch import spans
from echelon.recorder.torch.guarding import quietly
from echelon.recorder.torch.modules import Later
from echelon.recorder.torch.operations import Operations
from echelon.recorder.write.recorder import Recorder

_CHECKPOINTS = {
    "torch.distributed.checkpoint.state_dict_saver": ("save", "async_save"),
    "torch.distributed.checkpoint.state_dict_loader": ("load",),
    "safetensors.torch": ("save_file", "load_file", "save_model", "load_model"),
}
_operations: Operations | None = None


def recording(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that creates a process group, so that recording starts first."""

    @functools.wraps(make)
    def make_recorded(*args: Any, **named: Any) -> Any:
        recorder = quietly(_begin, args)
        if recorder is None:
            return make(*args, **named)
        quietly(_forget_group, args, named)
        span = spans.opened("store", "process group")
        try:
            made = make(*args, **named)
        finally:
            spans.closed(span)
        recorder.mark_initialized()
        return made

    return make_recorded


def _begin(args: tuple[Any, ...]) -> Recorder | None:
    """On the first call, open this rank's ring and install the hooks. Return the recorder."""
    if _operations is None:
        size, rank = int(args[0]), int(args[1])
        black_box.record_as_rank(rank, size)
        recorder = black_box.current()
        if recorder is None:
            return None
        if (recorder.identity.world_size, recorder.identity.rank) != (size, rank):
            recorder.identify(world_size=size, rank=rank)
        settings = {**recorder.identity.settings, "hooked": "torch"}
        recorder.identify(settings=settings)
        _install(recorder)
    return black_box.if_opened()


def _install(recorder: Recorder) -> None:
    global _operations
    torch = sys.modules["torch"]
    _operations = Operations(torch)
    quietly(_operations.install)
    quietly(_count_steps, recorder)
    quietly(spans.mark_loaders, torch)
    quietly(spans.mark_files, torch)
    quietly(spans.mark_stores, torch._C._distributed_c10d)
    later = Later()
    for module, functions in _CHECKPOINTS.items():
        later.run(module, functools.partial(_mark_functions, functions))
    later.run("torch._dynamo.callback", spans.mark_compilation)


def _mark_functions(functions: tuple[str, ...], module: Any) -> None:
    for name in functions:
        spans.mark_function(name, module)


def _count_steps(recorder: Recorder) -> None:
    """Count a training step after each optimizer step, unless the program marks its own steps."""
    optimizer = sys.modules["torch.optim.optimizer"]

    def after_step(*_: Any) -> None:
        recorder_now = black_box.if_opened()
        if recorder_now is not None and "step" not in marks.by_hand:
            recorder_now.step()
            if _operations is not None:
                quietly(_operations.pending.sweep)

    after_step._torchdynamo_disable = True  # type: ignore[attr-defined]
    optimizer.register_optimizer_step_post_hook(after_step)
    if "step" not in marks.by_hand:
        recorder.step(0, begins=False)  # the model is built first: the true beginning is not known


def _forget_group(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    name = args[5] if len(args) > 5 else named["group_name"]
    if _operations is not None:
        _operations.groups.forget(name)
