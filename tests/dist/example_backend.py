"""A whole third-party engine: collectives over the job's store. Slow, small, and correct."""

from __future__ import annotations

import contextlib

import numpy as np

from echelon.dist.arithmetic.reduce import reduce
from echelon.dist.backends.interface import CHECK_EVERY_S
from echelon.dist.errors.mismatch import mismatch_error
from echelon.dist.progress.serial import Serial
from echelon.errors import StoreTimeoutError


class StoreEngine:
    """Each rank publishes its bytes; each rank reads all ranks' bytes."""

    name = "store"
    device = "cpu"
    nests = True  # Serial carries out a handler's collective after the interrupted one

    def __init__(self, members, store):
        self._members, self._store = members, store
        self._serial = Serial("echelon-store", self._carry_out)
        self._written = []  # keys; numbers may have gaps, where another engine took an operation

    # ---- what the group calls ----

    def refuses(self, kind, dtype, reduce_op):
        known = ("all_reduce", "all_gather", "broadcast", "barrier")
        return "" if kind in known else f"has no {kind}"

    def prepare(self, operation):
        if operation.kind == "all_gather" and operation.output_splits:
            raise ValueError("all_gather: backend 'store' takes parts of equal size only")

    def execute(self, operation, watch):
        self._serial.run(operation, watch)

    def submit(self, operation, watch):
        return self._serial.submit(operation, watch)

    def batch(self):
        return contextlib.nullcontext()

    def cut(self, reason):
        pass  # nothing blocks here for longer than until the next watch.check()

    def close(self):
        self._serial.close(1.0)

    # ---- one collective, on Serial's thread ----

    def _carry_out(self, operation, watch):
        rows = self._exchange(operation, watch)
        if operation.kind == "all_reduce":
            parts = [np.frombuffer(row, operation.source.dtype) for row in rows]
            reduce(operation.target, parts, operation.reduce_op, operation.dtype)
        elif operation.kind == "all_gather":
            operation.target.view(np.uint8)[:] = np.frombuffer(b"".join(rows), np.uint8)
        elif operation.kind == "broadcast" and operation.target is not None:
            operation.target.view(np.uint8)[:] = np.frombuffer(rows[operation.root], np.uint8)

    def _exchange(self, operation, watch):
        """Return every rank's bytes, if all called the same."""
        data = b"" if operation.source is None else operation.source.tobytes()
        keys = [f"{operation.sequence}/{rank}" for rank in range(self._members.size)]
        self._store.set(keys[self._members.rank], operation.call + data)
        self._written.append(keys[self._members.rank])
        if len(self._written) > 2:  # all ranks have ended the one before the last: none reads it
            self._store.delete_key(self._written.pop(0))
        values = self._wait(keys, watch)
        calls = [value[: len(operation.call)] for value in values]
        if set(calls) != {operation.call}:
            raise mismatch_error(self._members, operation, calls)
        return [value[len(operation.call) :] for value in values]

    def _wait(self, keys, watch):
        while True:
            try:
                return self._store.multi_get(keys, timeout=CHECK_EVERY_S)
            except StoreTimeoutError as err:
                late = [int(str(key).rsplit("/", 1)[1]) for key in err.missing]
            watch.check(lambda late=late: late)  # raises at the deadline, and names these ranks


def create(members, store, timeout_s):
    return StoreEngine(members, store)
