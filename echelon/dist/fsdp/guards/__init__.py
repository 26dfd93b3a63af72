"""Adapt or refuse calls that expect whole parameters, since a shard is only part of one."""
