"""Provide optimizers that compute on full matrices even if the parameters are sharded."""

from echelon.train.optimizers.groups import matrix_groups
from echelon.train.optimizers.muon import Muon
from echelon.train.optimizers.newton_schulz import orthogonalize

__all__ = ["Muon", "matrix_groups", "orthogonalize"]
