"""Store checkpoints in object stores, at addresses such as `s3://bucket/run`."""
