"""Store a copy of a rank's training state at the start of a step, in the rank's own memory.

Tensors are copied into memory that is reused in every step. Their values are restored in place, so
the model, the optimizer and the caller retain the same parameter objects.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from echelon.dist.fsdp.parameters.member import member_of


class Stateful(Protocol):
    """An object with its own state, such as a schedule, a weight average or a sampler.

    Example:
        >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        >>> prepare = lambda world: lambda step: (optimizer.step(), schedule.step())
        >>> run(prepare, model, optimizer, total=2, also=[schedule])
        >>> round(optimizer.param_groups[0]["lr"], 6)
        0.00081
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state that `state_dict` returned."""


class KeptState:
    """A copy of the state of a model, its optimizer and the random number generators.

    The copy needs as much memory as the parameters, the buffers and the optimizer's state. The
    shards of a sharded model and their optimizer state are excluded; see `sharded.ShardedState`.

    Args:
        model: the model. Parameters that are not sharded must be replicated on all ranks.
        optimizer: the optimizer of the model's parameters.
        also: other objects whose state the steps change.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, also: Sequence[Stateful] = ()
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._also = list(also)
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []  # (live, its copy)
        self._trains: list[tuple[torch.Tensor, bool]] = []  # requires_grad, also of shards
        self._modes: list[tuple[nn.Module, bool]] = []  # `training` of each module
        self._owned: list[tuple[dict[str, Any], dict[str, Any]]] = []  # modules' tensors by name
        self._state: dict[torch.Tensor, dict[str, Any]] = {}  # the optimizer's, by parameter
        self._settings: list[dict[str, Any]] = []  # of its parameter groups
        self._others: list[dict[str, Any]] = []
        self._random = random_state()

    @property
    def num_bytes(self) -> int:
        """The total size in bytes of the copies of all tensors."""
        copies = [kept for _, kept in self._tensors]
        copies += [v for one in self._state.values() for v in one.values() if _is_tensor(v)]
        return sum(one.numel() * one.element_size() for one in copies)

    @torch.no_grad()
    def keep(self, step: int = 0) -> None:  # noqa: ARG002 -- as of `ShardedState`
        """Copy the current state over the previous copy. Local."""
        self._owned = [
            (values, dict(values))
            for module in self._model.modules()
            for values in (module._parameters, module._buffers)
        ]
        owned = [one for _, values in self._owned for one in values.values() if one is not None]
        every = {id(one): one for one in [*owned, *self._trained()]}
        live = [one for one in every.values() if member_of(one) is None]
        before = {id(one): kept for one, kept in self._tensors}
        self._tensors = [(one, _copied(one, before.get(id(one)))) for one in live]
        self._trains = [(one, one.requires_grad) for one in every.values()]
        self._modes = [(module, module.training) for module in self._model.modules()]
        known, self._state = self._state, {}
        for parameter, values in self._optimizer.state.items():
            if member_of(parameter) is not None:
                continue
            old = known.get(parameter, {})
            self._state[parameter] = {k: _copied(v, old.get(k)) for k, v in values.items()}
        self._settings = [_settings(group) for group in self._optimizer.param_groups]
        self._others = [copy.deepcopy(one.state_dict()) for one in self._also]
        self._random = random_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the stored state in place, and discard the gradients. Local."""
        for values, before in self._owned:  # a step may have assigned other tensors
            values.clear()
            values.update(before)
        for module, is_training in self._modes:
            module.training = is_training
        for live, trains in self._trains:
            if live.requires_grad != trains and live.is_leaf:
                live.requires_grad_(trains)
        for live, kept in self._tensors:
            if live.shape == kept.shape:
                live.copy_(kept)
            else:
                live.set_(kept.clone())  # type: ignore[call-overload]
            live.grad = None
        self._restore_optimizer()
        for one, state in zip(self._also, self._others, strict=True):
            one.load_state_dict(copy.deepcopy(state))
        set_random_state(self._random)

    def parts(self) -> dict[str, Any]:
        """Return the state that should be identical on all ranks, keyed by description."""
        names = {id(one): f"parameter {name!r}" for name, one in self._model.named_parameters()}
        names |= {id(one): f"buffer {name!r}" for name, one in self._model.named_buffers()}
        own = {names[id(live)]: kept for live, kept in self._tensors if id(live) in names}
        places = self._places()
        return {
            **own,
            "a parameter outside the model": [
                kept for live, kept in self._tensors if id(live) not in names
            ],
            "the optimizer's state": {
                places[one]: values for one, values in self._state.items() if one in places
            },
            "the optimizer's state outside its groups": [
                values for one, values in self._state.items() if one not in places
            ],
            "the optimizer's settings": self._settings,
            "also": self._others,
        }

    def joined_parts(self) -> dict[str, Any]:
        """Return the state to compare after a rank has joined, keyed by description.

        This is the state that the joining rank receives, without the RNG states.
        """
        return {
            **self.parts(),
            "the training mode of a module": self._named_modes(),
            "requires_grad of a parameter": self._named_trains(),
        }

    def contents(self) -> dict[str, Any]:
        """Return everything that a joining rank needs; see `fill`.

        Raises:
            ValueError: the optimizer has state that belongs to none of its parameter groups.
        """
        places, names = self._places(), self._names()
        if not self._state.keys() <= places.keys():
            raise ValueError("the optimizer has state that belongs to none of its parameter groups")
        return {
            "tensors": [[names[id(live)], kept] for live, kept in self._tensors],
            "trains": self._named_trains(),
            "modes": self._named_modes(),
            "groups": self._groups(),
            "state": [[places[one], values] for one, values in self._state.items()],
            "settings": self._settings,
            "also": self._others,
            "random": self._random,
        }

    def fill(self, contents: dict[str, Any]) -> None:
        """Adopt another rank's stored state, which `restore` then makes this rank's live state.

        Raises:
            ValueError: this rank's model, optimizer or `also` objects do not match those of the
                other rank.
        """
        self.keep()  # what is there to be restored
        names = self._names()
        own = [[names[id(live)], live.dtype] for live, _ in self._tensors]
        told = contents["tensors"]
        alike = {
            "the parameters and buffers differ": own == [[name, one.dtype] for name, one in told]
            and [name for name, _ in self._named_trains()]
            == [name for name, _ in contents["trains"]],
            "the modules differ": [name for name, _ in self._named_modes()]
            == [name for name, _ in contents["modes"]],
            "the optimizer's groups differ": self._groups() == contents["groups"],
            "also= differs": len(contents["also"]) == len(self._also),
        }
        for what, is_alike in alike.items():
            if not is_alike:
                raise ValueError(f"{what} from those of the other ranks")
        self._tensors = [
            (live, kept.to(live.device))
            for (live, _), (_, kept) in zip(self._tensors, told, strict=True)
        ]
        self._trains = [
            (live, trains)
            for (live, _), (_, trains) in zip(self._trains, contents["trains"], strict=True)
        ]
        self._modes = [
            (module, is_training)
            for (module, _), (_, is_training) in zip(self._modes, contents["modes"], strict=True)
        ]
        trained = self._trained()
        self._state = {
            trained[at]: {key: _beside(trained[at], one) for key, one in values.items()}
            for at, values in contents["state"]
        }
        self._settings, self._others = contents["settings"], contents["also"]
        self._random = contents["random"]

    def _trained(self) -> list[torch.Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]

    def _places(self) -> dict[torch.Tensor, int]:
        """Return each optimized parameter's index, counted across all parameter groups."""
        return {one: at for at, one in enumerate(self._trained())}

    def _groups(self) -> list[list[str]]:
        """Return the names of the parameters in each of the optimizer's parameter groups."""
        names = self._names()
        return [
            [names[id(one)] for one in group["params"]] for group in self._optimizer.param_groups
        ]

    def _named_trains(self) -> list[list[Any]]:
        """Return the name and the stored `requires_grad` flag of each parameter and buffer."""
        names = self._names()
        return [[names[id(live)], trains] for live, trains in self._trains]

    def _named_modes(self) -> list[list[Any]]:
        """Return the name and the stored `training` flag of each module."""
        modes = {id(module): is_training for module, is_training in self._modes}
        return [
            [name, modes.get(id(module), module.training)]
            for name, module in self._model.named_modules()
        ]

    def _names(self) -> dict[int, str]:
        """Return a name for each tensor, keyed by the tensor's id()."""
        names = {id(one): f"parameter {at}" for at, one in enumerate(self._trained())}
        for prefix, module in reversed(list(self._model.named_modules())):
            for values in (module._parameters, module._buffers):
                names |= {
                    id(one): f"{prefix}.{name}" for name, one in values.items() if one is not None
                }
        return names

    def drop(self) -> None:
        """Release all copies. Call this if no other rank is left, or after the last step."""
        self._tensors.clear()
        self._trains.clear()
        self._modes.clear()
        self._owned.clear()
        self._state.clear()

    def _restore_optimizer(self) -> None:
        state = self._optimizer.state
        for parameter in [one for one in state if one not in self._state]:
            if member_of(parameter) is None:
                del state[parameter]  # made by the step that is dropped
        for parameter, kept in self._state.items():
            now = state[parameter]
            for key in [key for key in now if key not in kept]:
                del now[key]
            for key, value in kept.items():
                now[key] = _copied(value, now.get(key))
        del self._optimizer.param_groups[len(self._settings) :]
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for key in [key for key in group if key not in settings and key != "params"]:
                del group[key]
            group.update(copy.deepcopy(settings))


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    """Return a value of an optimizer's state, moved to the parameter's device.

    A scalar is returned without being moved.
    """
    on_device = isinstance(value, torch.Tensor) and value.dim() > 0
    return value.to(parameter.device) if on_device else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(value: Any, place: Any) -> Any:
    """Return a copy of a value; reuse the tensor `place` if shape, dtype and device match."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    is_alike = (
        isinstance(place, torch.Tensor)
        and place.shape == value.shape
        and place.dtype == value.dtype
        and place.device == value.device
    )
    if not is_alike:
        return value.detach().clone()
    return place.copy_(value)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def random_state() -> dict[str, Any]:
    """Return the RNG states of torch, Python and, if they are in use, CUDA and NumPy."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used:
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore RNG states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
