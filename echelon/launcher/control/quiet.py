"""gRPC, loaded so that it writes nothing of its own to stderr.

A client with a wrong certificate would otherwise fill the job's output with its lines; what
matters we say ourselves, in one. A GRPC_VERBOSITY that the user has set counts, and workers never
see ours.
"""

from __future__ import annotations

import os

_theirs = os.environ.get("GRPC_VERBOSITY")
os.environ["GRPC_VERBOSITY"] = _theirs or "NONE"  # read once, as it is loaded

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

if _theirs is None:
    del os.environ["GRPC_VERBOSITY"]

__all__ = ["grpc"]
