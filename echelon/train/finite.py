"""Skip a training step on all ranks if any gradient is not finite.

A bad batch or a flipped bit can make a gradient infinite or NaN, and a single step with such a
gradient ruins all weights. A non-finite gradient also makes the norm infinite or NaN. The norm has
the same bits on every rank, so all ranks reach the same decision without further communication. The
gradients of a skipped step are left unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from echelon.dist.fsdp import clip_grad_norm_
from echelon.dist.fsdp.guards.clipping import groups_of, largest
from echelon.dist.fsdp.parameters.member import member_of
from echelon.dist.group import ProcessGroup
from echelon.errors import NonFiniteGradientError

_NAME_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """The location of infinite or NaN gradients, which is the same on all ranks.

    Attributes:
        rank: the lowest global rank that holds a non-finite gradient in its shard or its stage. A
            different rank might have computed the gradient before the reduction.
        parameter: the name of the first parameter on rank `rank`, in the model's order, whose
            gradient is not finite.
        ranks: all ranks that hold a non-finite gradient.

    Example:
        >>> guard = FiniteGuard(model)
        >>> (model(tokens).sum() * float("inf")).backward()
        >>> guard.locate()
        NonFinite(rank=0, parameter='token.weight', ranks=(0,))
    """

    rank: int
    parameter: str
    ranks: tuple[int, ...]


class FiniteGuard:
    """A guard that clips gradients and skips optimizer steps whose gradient norm is not finite.

    A gradient scaler already skips steps whose gradients overflow. With a scaler, call the guard
    only if `unscale_` returned True, so that steps in which the scale is still adapting are not
    counted.

    Args:
        model: the sharded model, or this rank's stages or pipeline.
        max_in_a_row: the number of consecutive skipped steps after which an error is raised.
        over: a group of all ranks that hold parameters of the model; needed for pipeline stages and
            experts. None means the largest group across which parameters are sharded.
        replicas: see `clip_grad_norm_`.
        aliases: see `clip_grad_norm_`.
        norm: a function that measures the norm instead of `clip_grad_norm_(model, inf, ...)`. It
            must return the same value on all ranks and must not change any gradient.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> guard = FiniteGuard(model)
        >>> loss_fn(model(tokens), targets).backward()
        >>> norm = guard.clip_grad_norm_(1.0)
        >>> guard.step(optimizer)
        True
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module | Any,
        *,
        max_in_a_row: int = 20,
        over: ProcessGroup | None = None,
        replicas: ProcessGroup | None = None,
        aliases: Iterable[torch.Tensor] = (),
        norm: Callable[[], float] | None = None,
    ) -> None:
        if isinstance(max_in_a_row, bool) or not isinstance(max_in_a_row, int) or max_in_a_row < 1:
            raise ValueError(f"max_in_a_row must be an int >= 1, got {max_in_a_row!r}")
        self._module: nn.Module = model if isinstance(model, nn.Module) else model.module
        self._max_in_a_row = max_in_a_row
        self._over = over
        self._replicas = replicas
        self._aliases = tuple(aliases)
        self._measure = norm
        self._is_finite = True
        self._num_skipped = 0
        self._num_in_a_row = 0

    @property
    def num_skipped(self) -> int:
        """The number of steps skipped since the start of the run."""
        return self._num_skipped

    @property
    def num_in_a_row(self) -> int:
        """The number of consecutive skipped steps, up to and including the latest step."""
        return self._num_in_a_row

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip the gradients' norm to `max_norm`; count a skipped step if the norm is not finite.

        Call the method once per step, after the last backward pass. It is collective among the
        ranks of `over` and blocks until the gradients have been reduced.

        Args:
            max_norm: the limit, as in `clip_grad_norm_`; with infinity, the norm is only measured.

        Returns:
            The norm before scaling, equal on all ranks. If the norm is not finite, the gradients
            are unchanged, and `step` will skip the optimizer's step.

        Raises:
            ValueError: an argument is invalid.
            NonFiniteGradientError: raised on all ranks after `max_in_a_row` consecutive skipped
                steps.
            CollectiveError: a rank was lost or did not join.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be >= 0, got {max_norm!r}")
        norm = self._norm() if self._measure is None else self._measure()
        self._is_finite = math.isfinite(norm)
        if self._is_finite:
            self._num_in_a_row = 0
            self._scale(max_norm / (norm + 1e-6))
        else:
            self._num_skipped += 1
            self._num_in_a_row += 1
            if self._num_in_a_row >= self._max_in_a_row:
                self._stop(norm)
        return norm

    def step(self, optimizer: Any) -> bool:
        """Take the optimizer's step if the last gradient norm was finite.

        Args:
            optimizer: any object that has a `step()` method.

        Returns:
            Whether the step was taken. The result is the same on all ranks.
        """
        if self._is_finite:
            optimizer.step()
        return self._is_finite

    def locate(self) -> NonFinite | None:
        """Find the ranks that hold infinite or NaN gradients. Collective for the ranks of `over`.

        Returns:
            These ranks, the lowest of them, and the first affected parameter on that rank; None
            if all gradients are finite.

        Raises:
            CollectiveError: a rank was lost or did not join.
        """
        name = next((name for name, grad in self._gradients() if not _is_finite(grad)), "")
        group = self._group()
        if group is None or group.size == 1:
            ranks, names = (0,) if group is None else group.ranks, [name]
        else:
            ranks, names = group.ranks, _share(name, group, self._device())
        bad = tuple(rank for rank, one in zip(ranks, names, strict=True) if one)
        if not bad:
            return None
        first = min(bad)
        return NonFinite(rank=first, parameter=names[ranks.index(first)], ranks=tuple(sorted(bad)))

    def state_dict(self) -> dict[str, int]:
        """Return the counts of skipped steps, for a checkpoint. All ranks return equal counts."""
        return {"num_skipped": self._num_skipped, "num_in_a_row": self._num_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load the counts of skipped steps from a checkpoint."""
        self._num_skipped = int(state["num_skipped"])
        self._num_in_a_row = int(state["num_in_a_row"])
        self._is_finite = True

    def _norm(self) -> float:
        return clip_grad_norm_(
            self._module, math.inf, over=self._over, replicas=self._replicas, aliases=self._aliases
        )

    def _scale(self, factor: float) -> None:
        gradients = [gradient for _, gradient in self._gradients()]
        if gradients and factor < 1.0:
            torch._foreach_mul_(gradients, factor)

    def _stop(self, norm: float) -> None:
        found = self.locate()
        where = "no rank holds a non-finite gradient now"
        if found is not None:
            ranks = ", ".join(map(str, found.ranks[:8])) + (" ..." if len(found.ranks) > 8 else "")
            where = (
                f"first affected parameter: {found.parameter!r} on rank {found.rank}; "
                f"non-finite gradients on ranks {ranks}"
            )
        raise NonFiniteGradientError(
            f"{self._num_in_a_row} steps in a row had non-finite gradients (norm {norm}, "
            f"{self._num_skipped} skipped in total)\n{where}\n"
            "Resume from an earlier checkpoint with a lower learning rate, or inspect the data",
            rank=None if found is None else found.rank,
            parameter=None if found is None else found.parameter,
        )

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return each distinct gradient that an optimizer uses, with its parameter's name."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, parameter in self._module.named_parameters():
            member = member_of(parameter)
            owner = parameter if member is None else member.shard
            if owner.grad is not None:
                found.setdefault(id(owner), (name, owner.grad))
        return list(found.values())

    def _group(self) -> ProcessGroup | None:
        if self._over is not None:
            return self._over
        members = [one for one in map(member_of, self._module.parameters()) if one is not None]
        return largest(groups_of(members))

    def _device(self) -> torch.device:
        for parameter in self._module.parameters():
            member = member_of(parameter)
            return parameter.device if member is None else member.flat.device
        return torch.device("cpu")


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())


def _share(name: str, group: ProcessGroup, device: torch.device) -> list[str]:
    """Exchange one name per rank; return all names, in rank order. Collective."""
    data = name.encode()[:_NAME_BYTES]
    mine = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    everyone = torch.zeros(group.size * _NAME_BYTES, dtype=torch.uint8, device=device)
    group.all_gather(everyone, mine.to(device))
    rows = everyone.cpu().view(group.size, _NAME_BYTES)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
