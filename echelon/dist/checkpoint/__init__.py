"""Checkpoints: saved by any number of ranks, loaded by any other number."""

from echelon.dist.checkpoint.export import export
from echelon.dist.checkpoint.load import load, peek
from echelon.dist.checkpoint.pending import PendingSave
from echelon.dist.checkpoint.random_state import RandomState
from echelon.dist.checkpoint.save import save

__all__ = ["save", "load", "peek", "export", "RandomState", "PendingSave"]
