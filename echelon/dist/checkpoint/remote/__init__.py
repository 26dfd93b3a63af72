"""Checkpoints in object stores, with addresses such as `s3://bucket/run`, through `fsspec`."""
