"""Checkpoints in object stores, by addresses such as `s3://bucket/run`, through `fsspec`."""
