"""Convert text into token shards, and read the shards on any number of ranks."""

from echelon.tokens.loader import Batch, TokenLoader
from echelon.tokens.mixture import Source
from echelon.tokens.shards import TokenShards
from echelon.tokens.writer import ShardWriter

__all__ = ["TokenLoader", "Batch", "Source", "TokenShards", "ShardWriter"]
