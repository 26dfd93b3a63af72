"""Calls that expect whole parameters, adapted to shards or refused."""
