"""Adapt or refuse calls that expect whole parameters, because shards hold only a part of them."""
