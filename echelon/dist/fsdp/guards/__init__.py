"""Adapts or refuses calls that expect whole parameters, because shards hold only a part."""
