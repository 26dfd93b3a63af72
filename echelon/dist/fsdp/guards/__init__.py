"""Calls that work on whole parameters, made right for shards or refused."""
