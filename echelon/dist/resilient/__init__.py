"""Continue training in the surviving processes when ranks are lost; see docs/resilience.md."""

from echelon.dist.resilient.kept import Stateful
from echelon.dist.resilient.running import run
from echelon.dist.resilient.running_pipeline import run_pipeline
from echelon.dist.resilient.stages.setup import PipelineSetup
from echelon.dist.resilient.training.world import World

__all__ = ["PipelineSetup", "Stateful", "World", "run", "run_pipeline"]
