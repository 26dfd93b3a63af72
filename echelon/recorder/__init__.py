"""The black box of a rank: `span`, `step` and `watch` for users, the ring and dumps beneath."""

from echelon.recorder.recorder import span, step, watch

__all__ = ["span", "step", "watch"]
