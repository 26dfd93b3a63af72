"""Continue training in the surviving processes when ranks are lost; see docs/resilience.md."""

from echelon.dist.resilient.kept import Stateful
from echelon.dist.resilient.running import run
from echelon.dist.resilient.training.world import World

__all__ = ["Stateful", "World", "run"]
