"""Combine Muon with AdamW, for full or sharded parameters.

Muon (Keller Jordan 2024) replaces the momentum of a hidden matrix with the momentum's orthogonal
factor. The update is scaled by 0.2 * sqrt(max(n, m)), which makes it as large as an AdamW update,
so that both optimizers can share a learning rate and a decoupled weight decay (Liu et al. 2025,
"Muon is Scalable for LLM Training"). Torch's own AdamW function updates all other parameters.

Muon needs full matrices, not shards. The momentum is stored in shards, like AdamW's state. In each
step, each matrix is assembled on one rank, which computes the update for all ranks (`matrices.py`).
If tensor parallelism splits a matrix, that rank and the other ranks of its group on axis "tp"
assemble the matrix from its slices. Except for the rounding of the gradients, the results equal
those of a single process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.fsdp.parameters.slices import Slice, slice_of
from echelon.dist.group import ProcessGroup
from echelon.dist.mesh import DeviceMesh
from echelon.train.optimizers.groups import matrix_groups, whole_shape
from echelon.train.optimizers.matrices import Buckets
from echelon.train.optimizers.newton_schulz import orthogonalize

_SCALES: dict[str, Callable[[int, int], float]] = {
    "rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
_ALGORITHMS = ("muon", "adamw")


class Muon(Optimizer):
    """An optimizer that uses Muon for hidden matrices and AdamW for all other parameters.

    Under `fully_shard`, a step is collective among the ranks of each unit: either all of these
    ranks or none of them must take the step. `GradScaler` and `FiniteGuard` satisfy this condition.
    Clip with `clip_grad_norm_` as usual, although the norm of a matrix's gradient does not affect
    the matrix's update.

    Args:
        params: a module, a pipeline or the result of `parallelize`, whose parameters
            `matrix_groups` splits; parameter groups, each with "algorithm" set to "muon" or
            "adamw"; or a list of matrices.
        lr: the learning rate of all groups that do not set their own.
        weight_decay: the decoupled weight decay, which is multiplied by `lr`.
        momentum: Muon's momentum.
        nesterov: whether Muon uses Nesterov momentum.
        num_iterations: the number of Newton-Schulz iterations.
        scale: how Muon's update is scaled: "rms" (0.2 * sqrt(max(n, m))) or "original" (sqrt(max(1,
            n / m))).
        betas: AdamW's betas.
        eps: AdamW's epsilon.
        compute_dtype: the dtype of the Newton-Schulz iterations and of the exchange. None means
            bfloat16 on accelerators, as in Keller Jordan's code, and float32 on the CPU (float64
            for float64 parameters), where bfloat16 is slow.
        tensor_group: the ranks of axis "tp", `mesh.group("tp")`, if this axis splits matrices. The
            result of `parallelize` provides the group by default.

    Raises:
        ValueError: an argument is invalid; or a parameter for Muon is not a matrix, is a DTensor,
            or is split by axis "tp" without a `tensor_group`.

    Example:
        >>> optimizer = Muon(model, lr=1e-3)
        >>> loss_fn(model(tokens), targets).backward()
        >>> optimizer.step()
    """

    handles_shards = True  # without it, `fully_shard` refuses optimizers that are not elementwise

    def __init__(
        self,
        params: nn.Module | Any | Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        num_iterations: int = 5,
        scale: str = "rms",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        compute_dtype: torch.dtype | None = None,
        tensor_group: ProcessGroup | None = None,
    ) -> None:
        groups = matrix_groups(params) if hasattr(params, "parameters") else list(params)
        if compute_dtype is not None and not compute_dtype.is_floating_point:
            raise ValueError(
                f"compute_dtype must be a floating-point dtype or None, got {compute_dtype}"
            )
        self._compute_dtype = compute_dtype
        mesh = getattr(params, "mesh", None)  # of the result of `parallelize`
        if tensor_group is None and isinstance(mesh, DeviceMesh) and "tp" in mesh.names:
            tensor_group = mesh.group("tp")
        self._tensor_group = tensor_group
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "algorithm": "muon",
            "momentum": momentum,
            "nesterov": nesterov,
            "num_iterations": num_iterations,
            "scale": scale,
            "betas": tuple(betas),
            "eps": eps,
        }
        super().__init__(groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see `Muon`.

        Raises:
            ValueError: the group is invalid, as described for `Muon`.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], self._tensor_group)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take an optimizer step. Collective if parameters are sharded; see the class.

        Returns:
            The result of the closure.

        Raises:
            ValueError: gradients have not been reduced, or sharded parameters are still gathered.
            CollectiveError: a rank was lost or did not join.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [one for one in group["params"] if one.grad is not None]
            if group["algorithm"] == "adamw":
                self._step_adamw(group, trained)
            else:
                self._step_muon(group, trained)
        return loss

    def _step_muon(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        buckets: dict[torch.dtype, Buckets] = {}
        for parameter in trained:
            momentum = functools.partial(self._momentum, group, parameter)
            compute = functools.partial(self._compute, group, parameter)
            apply = functools.partial(_apply, group, parameter)
            dtype = self._dtype_of(parameter)
            if member_of(parameter) is not None:
                buckets.setdefault(dtype, Buckets()).add(parameter, momentum, compute, apply)
            else:
                apply(compute(momentum().to(dtype)))
        for dtype, found in buckets.items():
            for bucket in found:
                bucket.run(dtype)

    def _momentum(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Update the momentum of a matrix or shard; return the values to orthogonalize."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average: Tensor = state["momentum_buffer"]
        average.lerp_(gradient, 1.0 - group["momentum"])
        return gradient.lerp(average, group["momentum"]) if group["nesterov"] else average

    def _compute(self, group: dict[str, Any], parameter: Tensor, matrix: Tensor) -> Tensor:
        """Return a matrix's orthogonal factor.

        If `matrix` is a slice of a larger matrix, return the same slice of that matrix's factor. In
        this case, the call is collective across the tensor-parallel group.
        """
        part, ranks = slice_of(parameter), self._tensor_group
        if part is None or ranks is None:
            return orthogonalize(matrix, group["num_iterations"])
        parts = matrix.new_empty(part.count, *matrix.shape)
        ranks.all_gather(parts.view(-1), matrix.contiguous().view(-1))
        whole = torch.cat(parts.unbind(0), part.dim)
        return part.of(orthogonalize(whole, group["num_iterations"]))

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        if self._compute_dtype is not None:
            return self._compute_dtype
        member = member_of(parameter)
        device = parameter.device if member is None else member.flat.device
        if device.type != "cpu":
            return torch.bfloat16
        return torch.promote_types(parameter.dtype, torch.float32)

    def _step_adamw(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        if not trained:
            return
        states = [self.state[one] for one in trained]
        adamw(
            trained,
            [_gradient(one) for one in trained],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _apply(group: dict[str, Any], parameter: Tensor, change: Tensor) -> None:
    """Apply the weight decay and the update to a matrix or this rank's shard of it."""
    rate = group["lr"]
    parameter.mul_(1.0 - rate * group["weight_decay"])
    scale = _SCALES[group["scale"]](*whole_shape(parameter))
    parameter.add_(change.view(parameter.shape).to(parameter.device), alpha=-rate * scale)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _check_group(group: dict[str, Any], tensor_group: ProcessGroup | None) -> None:
    _check_settings(group)
    if group["algorithm"] == "adamw":
        return
    for parameter in group["params"]:
        shape = whole_shape(parameter)
        if len(shape) != 2 or not parameter.is_floating_point():
            raise ValueError(
                f"Muon trains only matrices, got a parameter of {parameter.dtype} "
                f'{list(shape)}: put it into a group with "algorithm": "adamw", as '
                "matrix_groups(model) does"
            )
        part = slice_of(parameter)
        if part is not None and not _joins(tensor_group, part):
            raise ValueError(
                f"Muon needs whole matrices, but a parameter of shape {list(shape)} is split "
                f"across the {part.count} ranks of axis tp: pass tensor_group=mesh.group('tp'), "
                f"not {tensor_group!r}"
            )
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"Muon needs whole matrices, but a DTensor of shape {list(shape)} has placements "
                f'{parameter.placements}: put it into a group with "algorithm": "adamw"'
            )


def _joins(group: ProcessGroup | None, part: Slice) -> bool:
    return group is not None and (group.size, group.rank) == (part.count, part.index)


def _check_settings(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "eps"):
        if not (isinstance(group[name], (int, float)) and 0.0 <= group[name] < math.inf):
            raise ValueError(f"{name} must be a number >= 0, got {group[name]!r}")
    for name, value in (("momentum", group["momentum"]), *(("betas", b) for b in group["betas"])):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {group[name]!r}")
    if group["algorithm"] not in _ALGORITHMS:
        raise ValueError(f"algorithm must be one of {_ALGORITHMS}, got {group['algorithm']!r}")
    if group["scale"] not in _SCALES:
        raise ValueError(f"scale must be one of {', '.join(_SCALES)}, got {group['scale']!r}")
    count = group["num_iterations"]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 20:
        raise ValueError(f"num_iterations must be an int from 1 to 20, got {count!r}")
