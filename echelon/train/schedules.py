"""Define learning-rate schedules, which scale the peak rate as a function of the step.

    constant                 1   /----------------------
    cosine                   1   /--..__                      ends at `floor`
                                        ``--..__
    warmup-stable-decay      1   /---------------\\
                                                  \\           ends at `floor`

A schedule has no state, so a resumed run needs only the step. The first step is step 0. A warm-up
starts at 1 / num_warmup, so that no step is wasted on a rate of 0, and reaches the full rate at
step `num_warmup - 1`. From step `num_steps` on, a decaying schedule returns `floor`.

All schedules are frozen dataclasses that are called with the step. They can be compared and
printed, and can serve as the `lr_lambda` of `torch.optim.lr_scheduler.LambdaLR`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Schedule = Callable[[int], float]

_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A schedule that warms up over `num_warmup` steps and then stays at 1.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> schedule = Constant(num_warmup=4)
        >>> [schedule(step) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    num_warmup: int = 0

    def __post_init__(self) -> None:
        _check_count("num_warmup", self.num_warmup, least=0)

    def __call__(self, step: int) -> float:
        """Return the factor at a step; steps are counted from 0."""
        return _rise(_checked(step), self.num_warmup)


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """A schedule that warms up and then decays along half a cosine to `floor` at step `num_steps`.

    Args:
        num_steps: the length of the run in steps, including the warm-up.
        num_warmup: the number of steps over which the factor rises.
        floor: the final factor, between 0 and 1.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> schedule = Cosine(num_steps=100, num_warmup=10)
        >>> [round(schedule(step), 2) for step in (0, 9, 55, 100)]
        [0.1, 1.0, 0.55, 0.1]
    """

    num_steps: int
    num_warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        _check_run(self.num_steps, self.num_warmup, 0, self.floor)

    def __call__(self, step: int) -> float:
        """Return the factor at a step; steps are counted from 0."""
        if _checked(step) < self.num_warmup:
            return _rise(step, self.num_warmup)
        return _fall(step, self.num_warmup, self.num_steps, self.floor, _SHAPES["cosine"])


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay:
    """A schedule that warms up, stays at 1, and decays over the last `num_decay` steps.

    MiniCPM introduced this schedule (Hu et al. 2024).

    To extend a run, continue from a checkpoint saved before the decay, with a larger `num_steps`.
    Before the decay, the factor does not depend on `num_steps`.

    Args:
        num_steps: the length of the run in steps, including the warm-up and the decay.
        num_decay: the number of steps over which the factor decays; None means a tenth of the run,
            but at least 1.
        num_warmup: the number of steps over which the factor rises.
        floor: the final factor, between 0 and 1.
        shape: the shape of the decay: "linear", "sqrt" (1 - sqrt; Hägele et al. 2024) or "cosine".

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> schedule = WarmupStableDecay(num_steps=100, num_decay=20, num_warmup=10)
        >>> [round(schedule(step), 2) for step in (0, 10, 80, 90, 100)]
        [0.1, 1.0, 1.0, 0.5, 0.0]
    """

    num_steps: int
    num_decay: int | None = None
    num_warmup: int = 0
    floor: float = 0.0
    shape: str = "linear"

    def __post_init__(self) -> None:
        if self.num_decay is not None:
            _check_count("num_decay", self.num_decay, least=1)
        _check_run(self.num_steps, self.num_warmup, self.num_decay or 0, self.floor)
        if self.shape not in _SHAPES:
            raise ValueError(f"shape must be one of {', '.join(_SHAPES)}, got {self.shape!r}")

    def __call__(self, step: int) -> float:
        """Return the factor by which to multiply the peak rate at a step (counted from 0)."""
        if _checked(step) < self.num_warmup:
            return _rise(step, self.num_warmup)
        length = max(1, self.num_steps // 10) if self.num_decay is None else self.num_decay
        begin = max(self.num_warmup, self.num_steps - length)
        return _fall(step, begin, self.num_steps, self.floor, _SHAPES[self.shape])


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "wsd": WarmupStableDecay,
}


def make_schedule(name: str, **settings: Any) -> Schedule:
    """Return the schedule with the given name, for use with configuration files.

    Args:
        name: "constant", "cosine" or "wsd".
        settings: the arguments of that schedule, keyed by name.

    Raises:
        ValueError: the name is unknown, or a value is invalid.
        TypeError: a setting is missing, or the schedule has no such setting.

    Example:
        >>> make_schedule("cosine", num_steps=100) == Cosine(num_steps=100)
        True
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](**settings)


def set_learning_rate(optimizer: Any, factor: float) -> float:
    """Set the `lr` of each parameter group to the group's peak rate times `factor`.

    The peak rate is the group's `initial_lr`, which torch's schedulers also use. If the group has
    no `initial_lr`, the current `lr` is stored as `initial_lr`.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        factor: the result of a schedule.

    Returns:
        The new learning rate of the first group.

    Raises:
        ValueError: the factor is negative or not finite, or the optimizer has no groups.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> schedule = Cosine(num_steps=100)
        >>> for step in range(100):
        ...     rate = set_learning_rate(optimizer, schedule(step))
        ...     optimizer.step()
        >>> optimizer.param_groups[0]["initial_lr"]
        0.1
    """
    if not (factor >= 0.0 and math.isfinite(factor)):
        raise ValueError(f"factor must be finite and >= 0, got {factor!r}")
    if not optimizer.param_groups:
        raise ValueError("the optimizer has no parameter groups")
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def _rise(step: int, num_warmup: int) -> float:
    return min(1.0, (step + 1) / num_warmup) if num_warmup else 1.0


def _fall(step: int, begin: int, end: int, floor: float, shape: Callable[[float], float]) -> float:
    if step >= end:
        return floor
    progress = max(0.0, (step - begin) / (end - begin)) if end > begin else 0.0
    return floor + (1.0 - floor) * shape(progress)


def _checked(step: int) -> int:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an int >= 0, got {step!r}")
    return step


def _check_count(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")


def _check_run(num_steps: int, num_warmup: int, num_decay: int, floor: float) -> None:
    _check_count("num_steps", num_steps, least=1)
    _check_count("num_warmup", num_warmup, least=0)
    if num_warmup + num_decay > num_steps:
        parts = "num_warmup + num_decay" if num_decay else "num_warmup"
        raise ValueError(
            f"{parts} must be at most num_steps ({num_steps}), got {num_warmup + num_decay}"
        )
    if not isinstance(floor, (int, float)) or not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must be between 0 and 1, got {floor!r}")
