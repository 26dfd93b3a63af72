"""Import gRPC without letting it print to stderr.

Otherwise a client with a wrong certificate would fill the job's output with gRPC's own lines; the
launcher reports the problem in one line. If the user has set GRPC_VERBOSITY, that value is kept.
The workers never see the launcher's value.
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
