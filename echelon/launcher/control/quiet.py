"""Import gRPC with its log output to stderr disabled.

The launcher reports connection problems itself. If the user has set GRPC_VERBOSITY, the user's
setting applies.
"""

from __future__ import annotations

import os

_theirs = os.environ.get("GRPC_VERBOSITY")
os.environ["GRPC_VERBOSITY"] = _theirs or "NONE"  # read once, during the import

import grpc  # noqa: E402
import grpc.aio  # noqa: E402

if _theirs is None:
    del os.environ["GRPC_VERBOSITY"]

__all__ = ["grpc"]
