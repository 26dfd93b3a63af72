"""Prepare text as token shards, and let any number of ranks read them from an exact position."""

from echelon.tokens.loader import Batch, TokenLoader
from echelon.tokens.mixture import Source
from echelon.tokens.shards import TokenShards
from echelon.tokens.writer import ShardWriter

__all__ = ["TokenLoader", "Batch", "Source", "TokenShards", "ShardWriter"]
