"""Connect a unit's modules and autograd to the unit's driver with hooks.

The hooks run outside compiled code. A compiled block sees gathered parameters as plain tensors.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp.order.entry import UNWATCHED, State
from echelon.dist.fsdp.parameters.member import Member
from echelon.dist.fsdp.parameters.unit import Unit, unit_of
from echelon.dist.fsdp.step.driver import driver_of
from echelon.dist.fsdp.step.nested import map_tensors, tensors_in
from echelon.dist.fsdp.uncompiled import uncompiled

_numbers = itertools.count(UNWATCHED + 1)
_hooks: weakref.WeakKeyDictionary[Unit, weakref.ref[_ModuleHooks]] = weakref.WeakKeyDictionary()


def install(unit: Unit, modules: Sequence[nn.Module]) -> None:
    """Install hooks on a unit's modules and parameters."""
    hooks = _ModuleHooks(unit)
    _hooks[unit] = weakref.ref(hooks)  # the modules' hooks own it
    before = uncompiled(hooks.before)
    after = uncompiled(hooks.after)
    for module in modules:
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)
    for part in {module for member in unit.members for module, _ in member.slots}:
        if part not in modules:
            part.register_forward_pre_hook(_PartHook(unit), prepend=True)
    for member in unit.members:
        _hook_gradient(unit, member)


def follow_move(unit: Unit) -> None:
    """Make a unit's hooks report to the unit's new driver."""
    hooks = _hooks[unit]()
    assert hooks is not None, unit
    hooks.follow_move()


def register_forward_method(module: nn.Module, name: str) -> None:
    """Make a method of a sharded module gather the module's parameters, as `forward` does.

    Args:
        module: a module that was passed to `fully_shard`.
        name: the name of a method that computes with the module's parameters, such as "encode".

    Raises:
        ValueError: the module is not sharded or does not have such a method.

    Example:
        >>> _ = fully_shard(model)
        >>> register_forward_method(model, "hidden")
        >>> model.hidden(tokens).shape
        torch.Size([2, 8, 16])
    """
    unit = unit_of(module)
    if unit is None:
        raise ValueError(f"this {type(module).__name__} was not passed to fully_shard")
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {name!r}")
    hooks = _hooks[unit]()
    assert hooks is not None, unit

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.before(module, args, kwargs)
        return hooks.after(module, args, method(*args, **kwargs))

    module.__dict__[name] = call


def _hook_gradient(unit: Unit, member: Member) -> None:
    # The garbage collector does not look into these hooks: what they own would never be freed.
    unit_ref, member_ref = weakref.ref(unit), weakref.ref(member)

    def arrived(leaf: torch.Tensor) -> None:  # noqa: ARG001
        unit, member = unit_ref(), member_ref()
        if unit is None or member is None or member.leaf.grad is None:
            return  # None: frozen between forward and backward
        if member.leaf.grad.is_sparse:
            raise RuntimeError(
                f"the gradient of {member} in {unit} is sparse, but shards are reduced as dense "
                "vectors: use sparse=False, or pass the parameter to ignored_params="
            )
        driver_of(unit).gradient_arrives(unit, member)

    if member.leaf.is_floating_point():
        wanted = member.leaf.requires_grad
        # A frozen parameter may be thawed later, and only one that wants gradients takes hooks.
        member.leaf.requires_grad_(True)
        member.leaf.register_post_accumulate_grad_hook(uncompiled(arrived))  # type: ignore[no-untyped-call]
        member.leaf.requires_grad_(wanted)


class _PartHook:
    """A hook that raises an error if an inner module runs while the unit is not gathered."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002
        if torch.compiler.is_compiling() or self._unit.state is State.WHOLE:
            return
        raise RuntimeError(
            f"a {type(module).__name__} inside {self._unit} was called outside the unit's forward "
            "pass, while this rank holds only a shard of the unit's parameters. Call the unit, "
            "make this module a unit of its own, or register the method that you call with "
            "register_forward_method(module, name)"
        )


class _ModuleHooks:
    """The hooks that run before and after the forward pass of a unit's modules."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._driver = driver_of(unit)
        self._ran: set[nn.Module] = set()
        self._call: int | None = None  # of the forward that runs; None: not followed
        self._inputs: list[weakref.ref[torch.Tensor]] = []  # those that are watched

    def follow_move(self) -> None:
        """Switch to the unit's new driver, and forget any unfinished forward pass."""
        self._driver = driver_of(self._unit)
        self._ran.clear()
        self._call, self._inputs = None, []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        driver = self._driver
        if module in self._ran and not driver.is_nested(self._unit):
            self._ran.clear()  # an earlier forward of the unit raised before its end
        first = not self._ran
        if first:
            driver.before_forward(self._unit, trains=_trains(args, kwargs))
        self._ran.add(module)
        args, kwargs = self._prepare((args, kwargs), watched=first)
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        unit, driver, call = self._unit, self._driver, self._call
        if unit.precision.output_dtype is not None:
            output = _cast(output, unit.precision.output_dtype)
        output = self._detached_from_unit(output)
        has_graph = _watch(output, lambda: driver.outputs_have_gradients(unit, call))
        if len(self._ran) == unit.num_modules:
            self._ran.clear()
            self._inputs = []
            driver.after_forward(unit, has_graph=has_graph)
        return output

    def _detached_from_unit(self, output: Any) -> Any:
        """Return new tensors in place of outputs that are inputs or share memory with parameters.

        The unit's backward pass begins when an output's gradient is computed, and ends when an
        input's gradient is computed. A tensor must therefore not be both an input and an output.
        """
        inputs = {id(tensor) for ref in self._inputs if (tensor := ref()) is not None}

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if self._unit.has_memory_of(tensor):
                return tensor.clone()
            return tensor.view_as(tensor) if id(tensor) in inputs else tensor

        if not any(
            id(one) in inputs or self._unit.has_memory_of(one) for one in tensors_in(output)
        ):
            return output
        return map_tensors(change, output)

    def _prepare(self, inputs: Any, *, watched: bool) -> Any:
        unit, driver, precision = self._unit, self._driver, self._unit.precision
        if precision.param_dtype is not None and precision.cast_forward_inputs:
            inputs = _cast(inputs, precision.param_dtype)
        if not watched:
            return inputs
        self._call, self._inputs = None, []
        if not torch.is_grad_enabled():
            return inputs
        # A forward that is computed again was watched when it ran with gradients. Within a
        # reentrant checkpoint it ran without.
        if driver.in_backward and (unit.entry.calls or unit.entry.is_unwatched):
            return inputs
        call = next(_numbers)

        # What a unit changes in place has no gradient of its own: its original's is complete later.
        told = _Told(lambda: driver.inputs_have_gradients(unit, call))
        gone = weakref.finalize(told, unit.entry.drop_call, call)
        gone.atexit = False
        _watch_all([one for one in tensors_in(inputs) if not one.is_leaf], told.by_originals)
        inputs = map_tensors(_inner, inputs)
        self._inputs = [weakref.ref(one) for one in tensors_in(inputs) if one.requires_grad]
        is_watched = _watch_all(tensors_in(inputs), told.by_inputs)
        self._call = call if is_watched else UNWATCHED
        unit.entry.begin_call(self._call)
        return inputs


def _trains(args: Any, kwargs: Any) -> bool:
    """Return whether a backward pass can follow a forward pass with these arguments."""
    return torch.is_grad_enabled() or any(
        tensor.requires_grad for tensor in tensors_in((args, kwargs))
    )


def _watch(value: Any, told: Callable[[], None]) -> bool:
    """Call `told` whenever any tensor in `value` receives a gradient.

    Returns:
        False if no tensor requires a gradient, otherwise True.
    """

    def hook(gradient: torch.Tensor) -> None:  # noqa: ARG001
        told()

    watched = False
    for tensor in tensors_in(value):
        if tensor.requires_grad:
            tensor.register_hook(uncompiled(hook))  # type: ignore[no-untyped-call]
            watched = True
    return watched


class _Told:
    """A callback that runs once per backward pass, when all inputs of a call have gradients."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._num_by_inputs = self._num_by_originals = 0

    def by_inputs(self) -> None:
        self._num_by_inputs += 1
        self._tell()

    def by_originals(self) -> None:
        self._num_by_originals += 1
        if self._num_by_originals > self._num_by_inputs:
            self._tell()


def _watch_all(tensors: Iterable[torch.Tensor], told: Callable[[], None]) -> bool:
    """Call `told` as soon as all tensors have gradients.

    Tensors that the unit does not use are ignored.

    Returns:
        False if no tensor requires a gradient, otherwise True.
    """
    watched = [tensor for tensor in tensors if tensor.requires_grad]

    def hook(gradients: Sequence[torch.Tensor | None]) -> None:  # noqa: ARG001
        told()

    if len(watched) == 1:  # a hook on several refers to the graph that refers to it
        watched[0].register_hook(uncompiled(lambda _: told()))  # type: ignore[no-untyped-call]
    elif watched:
        torch.autograd.graph.register_multi_grad_hook(watched, uncompiled(hook))
    return bool(watched)


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor, to be used only inside the unit.

    The view's gradient is complete when the unit's backward pass is complete. The tensor's own
    gradient can also include contributions from other units.
    """
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(change, value)
