"""Convert text into token shards, and read them on any number of ranks from an exact position."""

from echelon.tokens.loader import Batch, TokenLoader
from echelon.tokens.mixture import Source
from echelon.tokens.shards import TokenShards
from echelon.tokens.writer import ShardWriter

__all__ = ["TokenLoader", "Batch", "Source", "TokenShards", "ShardWriter"]
