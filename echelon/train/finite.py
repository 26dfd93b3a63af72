"""Skip a step on all ranks alike if a gradient is not finite.

A bad batch or a flipped bit can make one gradient infinite or NaN, and a single such step ruins all
weights. The norm that clipping needs anyway is then not finite, and it has the same bits on every
rank, so all ranks reach the same decision without further communication. In that case the gradients
are left unchanged: clipping by such a norm would make all of them NaN and hide the one that came
first.
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
from echelon.dist.fsdp.parameters.flat import member_of
from echelon.dist.group import ProcessGroup
from echelon.errors import NonFiniteGradientError

_NAME_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class NonFinite:
    """Where gradients are not finite, equal on all ranks.

    Attributes:
        rank: the lowest rank (global) that holds one, in its shard or its stage. This is where it
            is after the reduction, which need not be where it was computed.
        parameter: the first such parameter there, in the model's order.
        ranks: all ranks that hold one.

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
    """Clips gradients, and skips the optimizer's step where their norm is not finite.

    With a gradient scaler, the scaler itself skips overflows: call this guard only if `unscale_`
    returned True, so that a scale that is still adapting is not counted.

    Args:
        model: the sharded model, this rank's stages or pipeline.
        max_in_a_row: raise an error after this many skipped steps in a row.
        over: a group with all ranks that hold parameters of the model: needed for the stages of a
            pipeline and for experts. None: the largest group among which parameters are divided.
        replicas: see `clip_grad_norm_`.
        aliases: see `clip_grad_norm_`.
        norm: replaces `clip_grad_norm_(model, inf, ...)` as the measurement; must return the same
            value on all ranks and change no gradient.

    Raises:
        ValueError: an invalid argument.

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
        """How many steps have been skipped since the beginning of the run."""
        return self._num_skipped

    @property
    def num_in_a_row(self) -> int:
        """How many of the most recent steps were skipped in a row."""
        return self._num_in_a_row

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients so that their norm is at most `max_norm`, or count a skip.

        Once per step, after the last backward. Collective among the ranks of `over`; blocks until
        the gradients are reduced.

        Args:
            max_norm: as in `clip_grad_norm_`; infinite: only measure.

        Returns:
            The norm before scaling, equal on all ranks. Not finite: nothing was scaled, and `step`
            will skip.

        Raises:
            ValueError: an invalid argument.
            NonFiniteGradientError: `max_in_a_row` steps in a row were to be skipped; on all ranks.
            CollectiveError: a rank is lost or did not join.
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
        """Take the optimizer's step if the last norm was finite.

        Args:
            optimizer: any object with a `step()`.

        Returns:
            Whether it was taken; equal on all ranks.
        """
        if self._is_finite:
            optimizer.step()
        return self._is_finite

    def locate(self) -> NonFinite | None:
        """Find the ranks that hold a gradient that is not finite. Collective among `over`.

        Returns:
            None if all gradients are finite.

        Raises:
            CollectiveError: a rank is lost or did not join.
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
        """Return the counts, for a checkpoint; equal on all ranks."""
        return {"num_skipped": self._num_skipped, "num_in_a_row": self._num_in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load the counts from a checkpoint."""
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
        where = "no rank holds a gradient that is not finite now"
        if found is not None:
            ranks = ", ".join(map(str, found.ranks[:8])) + (" ..." if len(found.ranks) > 8 else "")
            where = f"first: {found.parameter!r} on rank {found.rank}; on ranks {ranks}"
        raise NonFiniteGradientError(
            f"{self._num_in_a_row} steps in a row had gradients that are not finite (norm {norm}, "
            f"{self._num_skipped} skipped in all)\n{where}\n"
            "Resume from an earlier checkpoint with a lower learning rate, or inspect the data",
            rank=None if found is None else found.rank,
            parameter=None if found is None else found.parameter,
        )

    def _gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return the gradients that an optimizer uses, by the parameter's name, each one once."""
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
    """Return every rank's name. Collective."""
    data = name.encode()[:_NAME_BYTES]
    mine = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    everyone = torch.zeros(group.size * _NAME_BYTES, dtype=torch.uint8, device=device)
    group.all_gather(everyone, mine.to(device))
    rows = everyone.cpu().view(group.size, _NAME_BYTES)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]
