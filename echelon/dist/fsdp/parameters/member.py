"""Switch a parameter between its two forms, the leaf and the shard.

Both forms are defined in `flat.py`, [Note: the tensors in play]. While the unit is gathered, the
modules use the leaf, a view of the full vector. Otherwise they use the shard, a view of this rank's
chunk.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from echelon.dist.fsdp.parameters.layout import Part, Piece
from echelon.dist.fsdp.parameters.marks import attach, attached

if TYPE_CHECKING:
    from echelon.dist.fsdp.parameters.flat import Flat

Slot = tuple[nn.Module, str]

NO_HOOKS = (
    "has a hook from register_hook(), which would never be called: autograd computes gradients "
    "of whole parameters. register_post_accumulate_grad_hook() is called with the reduced "
    "gradient"
)


@dataclass(eq=False)
class Source:
    """A parameter to be sharded, and all module attributes that refer to it."""

    parameter: nn.Parameter
    name: str
    slots: list[Slot] = field(default_factory=list)


class Member:
    """One parameter of a `Flat`.

    A member holds only weak references to the modules. Strong references could form a cycle through
    autograd's graph, and the garbage collector cannot detect such a cycle.
    """

    def __init__(self, flat: Flat, source: Source, piece: Piece, part: Part) -> None:
        self.flat = flat
        self.name = source.name
        self._slots = [(weakref.ref(module), name) for module, name in source.slots]
        self.piece = piece
        self.part = part
        self.shard = source.parameter
        self.leaf = self._make_leaf()
        self.aside: torch.Tensor | None = None
        self._become_shard()
        self._gathered_version = self.shard._version
        self._has_moved = False  # changed between the last two gathers
        self._leaf_trains = self.leaf.requires_grad  # when it was shown

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def slots(self) -> list[Slot]:
        """The module attributes that refer to the parameter, as (module, name) pairs."""
        found = ((ref(), name) for ref, name in self._slots)
        return [(module, name) for module, name in found if module is not None]

    def add_slot(self, module: nn.Module, name: str) -> None:
        """Record another module attribute that refers to the parameter."""
        self._slots.append((weakref.ref(module), name))

    def show_leaf(self) -> None:
        """Make the modules use the leaf, a view of the full vector.

        Raises:
            ValueError: the program has replaced a module's parameter with another object.
        """
        if self.leaf.requires_grad != self.shard.requires_grad:
            self.leaf.requires_grad_(self.shard.requires_grad)
        self._leaf_trains = self.leaf.requires_grad
        for module, name in self.slots:
            found = module._parameters.get(name)
            if found is not self.leaf and found is not self.shard:
                raise ValueError(
                    f"parameter {name!r} of a {type(module).__name__} was replaced after "
                    "fully_shard, which still gathers the original parameter. Assign the "
                    "parameter before fully_shard, or change its values with load_state_dict()"
                )
            _put(module, name, self.leaf)

    def show_shard(self) -> None:
        """Make the modules use the shard, except where the program has replaced the parameter."""
        if self.leaf.requires_grad != self._leaf_trains:  # set while the leaf existed
            self._leaf_trains = self.leaf.requires_grad
            self.shard.requires_grad_(self._leaf_trains)
        for module, name in self.slots:
            if module._parameters.get(name) is self.leaf:
                _put(module, name, self.shard)

    def adopt(self) -> None:
        """Copy into the chunk the values that the program assigned with `shard.data = values`.

        Raises:
            ValueError: the values have a different dtype, device or shape, for example
                after `model.double()`.
        """
        if self.shard_is_ours():
            return
        place, data = self.of(self.flat.chunk), self.shard.data
        self._check_kind(data, place)
        if data.data_ptr() != place.data_ptr():  # else the chunk itself moved: share_memory()
            place.copy_(data)
            self.shard.data = place
            self._has_moved = True
        self._shard_address = self.shard.data_ptr()

    def shard_is_ours(self) -> bool:
        """Return whether the shard is still a view of the chunk."""
        shard = self.shard
        return shard.data_ptr() == self._shard_address and shard.dtype == self.flat.dtype

    def note_gather(self) -> None:
        """Record whether the shard has changed since the last gather.

        Raises:
            ValueError: the shard was converted or moved, or has an unsupported hook.
        """
        if self.shard._backward_hooks:
            raise ValueError(f"shard {self.name!r} {NO_HOOKS}")
        self.adopt()
        version = self.shard._version
        self._has_moved |= version != self._gathered_version
        self._gathered_version = version

    def take_move(self) -> int:
        """Return 1 if a gather since the last call to this method found a changed shard, else 0."""
        moved, self._has_moved = self._has_moved, False
        return int(moved)

    def check_leaf(self, *, was_written: bool) -> None:
        """Update the chunk with the values that the program has written or assigned to the leaf.

        Raises:
            ValueError: the program gave the leaf a different dtype, device or shape.
        """
        full = self.flat.full.tensor
        is_ours = self.leaf.data_ptr() == full.data_ptr() + self.piece.start * full.itemsize
        if is_ours or not self.piece.numel:
            if was_written:
                self._write_back()
            return
        data, place = self.leaf.data, self.within(full).data
        self.leaf.data = place
        self._check_kind(data, place)
        place.copy_(data)
        self._write_back()

    def _check_kind(self, data: torch.Tensor, place: torch.Tensor) -> None:
        if (data.shape, data.dtype, data.device) != (place.shape, place.dtype, place.device):
            raise ValueError(
                f"{self.name!r} was {_described(place)}, but was changed to {_described(data)} "
                "after fully_shard: convert or move the model before fully_shard"
            )

    def _write_back(self) -> None:
        part = self.part
        mine = self.leaf.detach().reshape(-1)[part.start : part.start + part.length]
        values = self.of(self.flat.chunk)
        changed = mine.view(values.shape).to(values.device)
        # In a shorter dtype of the computation, what was not written keeps the shard's precision.
        is_same = changed == values.to(changed.dtype)
        values.copy_(torch.where(is_same, values, changed.to(values.dtype)))

    @property
    def has_gradient(self) -> bool:
        """True if the parameter has a gradient that has not been reduced."""
        return self.leaf.grad is not None or self.aside is not None

    def set_aside(self) -> None:
        """Move the leaf's gradient to `aside`, adding it to any gradient already stored there.

        A gradient that already has the dtype of the reduction remains in the leaf.
        """
        gradient, dtype = self.leaf.grad, self.flat.reduce_dtype
        if gradient is None or gradient.dtype == dtype:
            return
        if self.aside is None:
            self.aside = gradient.to(dtype)
        else:
            self.aside.add_(gradient)
        self.leaf.grad = None

    def call_hooks(self) -> None:
        """Call the post-accumulate gradient hooks that the program registered on the shard."""
        hooks: Any = self.shard._post_accumulate_grad_hooks
        if hooks and self.shard.grad is not None:
            for hook in list(hooks.values()):
                hook(self.shard)

    def drop_gradient(self) -> None:
        """Drop the gradients that have not been reduced."""
        self.leaf.grad = self.aside = None

    def of(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return a view of this parameter's elements in a chunk-sized tensor."""
        part = self.part
        dims = (1,) * max(0, len(self.piece.shape) - 1)
        return chunk[part.offset : part.offset + part.length].view(part.length, *dims)

    def within(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of this parameter's elements in a full-sized tensor."""
        piece = self.piece
        return full[piece.start : piece.start + piece.numel].view(piece.shape)

    def move(self, piece: Piece, part: Part) -> None:
        """Switch to this rank's new shard after the flat vector has moved to another group."""
        self.piece, self.part = piece, part
        self.drop_gradient()
        self.leaf.data = self.within(self.flat.full.tensor).data
        self._leaf_trains = self.shard.requires_grad
        self.leaf.requires_grad_(self._leaf_trains)
        self._become_shard()
        self._has_moved = True
        self._gathered_version = self.shard._version

    def _make_leaf(self) -> nn.Parameter:
        # .data: a version counter of its own, or writing one parameter would invalidate what
        # autograd saved of the others.
        view = self.within(self.flat.full.tensor).data
        leaf = nn.Parameter(view, requires_grad=self.shard.requires_grad)
        leaf.__dict__.update(self.shard.__dict__)
        attach(leaf, self)
        return leaf

    def _become_shard(self) -> None:
        self.shard.grad = None
        self.shard.data = self.of(self.flat.chunk)
        self._shard_address = self.shard.data_ptr()
        attach(self.shard, self)


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[name] = parameter
    else:  # RNNs keep a list of their own beside it
        setattr(module, name, parameter)


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def member_of(parameter: Any) -> Member | None:
    """Return the member that a shard or leaf belongs to; None for any other object."""
    found = attached(parameter)
    return found if isinstance(found, Member) else None


def mark(gradient: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as the gradient of a shard."""
    attach(gradient, True)
    return gradient


def is_of_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the gradient of a shard."""
    return attached(tensor) is True
