"""Continue training in the surviving processes when ranks are lost; see docs/resilience.md."""

from echelon.dist.resilient.kept import Stateful
from echelon.dist.resilient.training import World, run

__all__ = ["Stateful", "World", "run"]
