"""Save checkpoints on any number of ranks, and load them on the same or a different number."""

from echelon.dist.checkpoint.exporting import export
from echelon.dist.checkpoint.life.keeper import Keeper
from echelon.dist.checkpoint.life.newest import newest
from echelon.dist.checkpoint.life.schedule import SaveSchedule
from echelon.dist.checkpoint.loading import load, peek
from echelon.dist.checkpoint.ranks.pending import PendingSave
from echelon.dist.checkpoint.saving import save
from echelon.dist.checkpoint.state.random_state import RandomState

__all__ = [
    "save",
    "load",
    "peek",
    "newest",
    "Keeper",
    "SaveSchedule",
    "export",
    "RandomState",
    "PendingSave",
]
