"""The learning rate as a function of the step alone, so that a resumed run needs no state of it."""

from __future__ import annotations

import math

FLOOR = 0.1  # of the peak; a rate of nought would waste the last steps


def learning_rate(step: int, *, peak: float, num_warmup: int, num_steps: int) -> float:
    """Rise linearly to `peak` over the warm-up, then fall to a tenth of it along a cosine."""
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
