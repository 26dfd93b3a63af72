"""A whole third-party backend: collectives over the job's store. Slow, small, and correct."""

from __future__ import annotations

import numpy as np

from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.errors import build
from echelon.dist.errors.mismatch import mismatch_error
from echelon.dist.progress.executor import LaneBackend
from echelon.errors import StoreTimeoutError


class StoreBackend(LaneBackend):
    """Every rank publishes its bytes; everybody reads everybody's."""

    name = "store"

    def __init__(self, members, store, timeout_s):
        super().__init__()
        self._members, self._store = members, store

    def refuses(self, kind, dtype, reduce_op):
        known = ("all_reduce", "all_gather", "broadcast", "barrier")
        return "" if kind in known else f"has no {kind}"

    def _carry_out(self, operation):
        rows = self._exchange(operation)
        if operation.kind == "all_reduce":
            parts = [np.frombuffer(row, operation.source.dtype) for row in rows]
            reduce(operation.target, parts, operation.reduce_op, operation.dtype)
        elif operation.kind == "all_gather":
            operation.target.view(np.uint8)[:] = np.frombuffer(b"".join(rows), np.uint8)
        elif operation.kind == "broadcast" and operation.target is not None:
            operation.target.view(np.uint8)[:] = np.frombuffer(rows[operation.root], np.uint8)

    def _exchange(self, operation):
        data = b"" if operation.source is None else operation.source.tobytes()
        me, size = self._members.rank, self._members.size
        try:
            values = self._store.gather(
                "data", me, size, operation.call + data, timeout=operation.timeout_s
            )
        except StoreTimeoutError as err:
            missing = [int(rank) for rank in err.missing]
            raise build.timed_out(self._members, operation, missing) from err
        calls = [value[: len(operation.call)] for value in values]
        if set(calls) != {operation.call}:
            raise mismatch_error(self._members, operation, calls)
        return [value[len(operation.call) :] for value in values]

    def abort(self):
        pass

    def close(self):
        self.close_lanes()


def create(members, store, timeout_s):
    return StoreBackend(members, store, timeout_s)
