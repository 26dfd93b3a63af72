"""Define the collectives of a group.

Every call has two forms. By default, the call blocks until the operation has ended on this rank.
With `async_op=True`, it returns a `Work` immediately. The docstring of `ProcessGroup` describes
what all calls have in common: which ranks must make a call, which arrays a call accepts, and which
errors it raises.
"""

from __future__ import annotations

from typing import Literal, overload

from echelon.dist.calls.base import Calls, Splits, Timeout
from echelon.dist.operation.arrays import Array, view
from echelon.dist.operation.checks import (
    check_overlap,
    check_pair,
    check_reduce_op,
    check_rows,
    check_splits,
    check_uneven,
)
from echelon.dist.work import Work


class Collectives(Calls):
    """The calls that all members must make in the same order."""

    @overload
    def all_reduce(
        self, x: Array, op: str = ..., async_op: Literal[False] = ..., timeout_s: Timeout = ...
    ) -> None: ...

    @overload
    def all_reduce(
        self, x: Array, op: str = ..., *, async_op: Literal[True], timeout_s: Timeout = ...
    ) -> Work: ...

    @overload
    def all_reduce(
        self, x: Array, op: str = ..., async_op: bool = ..., timeout_s: Timeout = ...
    ) -> Work | None: ...

    def all_reduce(
        self, x: Array, op: str = "sum", async_op: bool = False, timeout_s: Timeout = None
    ) -> Work | None:
        """Reduce `x` over all ranks, in place.

        Args:
            x: any shape, the same on all ranks.
            op: sum, avg, min, max, prod; band, bor, bxor (integers and bool). The average of
                integers is their sum divided by the number of ranks and truncated toward zero; the
                sum wraps around at the width of the dtype. For bool, sum means "or", prod means
                "and", and avg is not supported.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.

        Returns:
            None once this rank's `x` holds the result; a `Work` if asynchronous.
        """
        data = view(x, "x", writable=True)
        op = check_reduce_op(op, data.dtype)
        return self._collective(
            "all_reduce", data, data, reduce_op=op, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def reduce(
        self,
        x: Array,
        root: int,
        op: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
    ) -> None: ...

    @overload
    def reduce(
        self,
        x: Array,
        root: int,
        op: str = ...,
        *,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
    ) -> Work: ...

    @overload
    def reduce(
        self, x: Array, root: int, op: str = ..., async_op: bool = ..., timeout_s: Timeout = ...
    ) -> Work | None: ...

    def reduce(
        self,
        x: Array,
        root: int,
        op: str = "sum",
        async_op: bool = False,
        timeout_s: Timeout = None,
    ) -> Work | None:
        """Reduce `x` over all ranks, and store the result in `x` on `root` only.

        Args:
            x: any shape, the same on all ranks.
            root: rank within this group that receives the result.
            op: as for `all_reduce`.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        root = self._check_rank(root, "root")
        data = view(x, "x", writable=root == self.rank)
        op = check_reduce_op(op, data.dtype)
        target = data if root == self.rank else None
        return self._collective(
            "reduce", data, target, reduce_op=op, root=root, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def all_gather(
        self,
        out: Array,
        x: Array,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
        *,
        output_splits: Splits = ...,
    ) -> None: ...

    @overload
    def all_gather(
        self,
        out: Array,
        x: Array,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
        *,
        output_splits: Splits = ...,
    ) -> Work: ...

    @overload
    def all_gather(
        self,
        out: Array,
        x: Array,
        async_op: bool = ...,
        timeout_s: Timeout = ...,
        *,
        output_splits: Splits = ...,
    ) -> Work | None: ...

    def all_gather(
        self,
        out: Array,
        x: Array,
        async_op: bool = False,
        timeout_s: Timeout = None,
        *,
        output_splits: Splits = None,
    ) -> Work | None:
        """Collect every rank's `x` into `out`, in rank order.

        Args:
            out: [size * n, ...] or, with `output_splits`, [sum(output_splits), ...]; with the dtype
                of `x`.
            x: [n, ...], with the same shape on all ranks; with `output_splits`,
                [output_splits[rank], ...]. It can be exactly this rank's shard of `out`, but must
                not otherwise overlap `out`.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
            output_splits: number of rows (dim 0) from each rank, the same on all ranks; None means
                equal splits.
        """
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        rows: tuple[int, ...] = ()
        counts: tuple[int, ...] = ()
        if output_splits is None:
            check_pair("all_gather", "out", target, "x", source, self.size, self.rank)
        else:
            rows, counts = check_uneven(
                "all_gather", ("out", target), ("x", source), ("output_splits", output_splits),
                self.size, self.rank,
            )  # fmt: skip
        return self._collective(
            "all_gather", source, target, output_splits=counts, splits=rows, timeout_s=timeout_s,
            async_op=async_op,
        )  # fmt: skip

    @overload
    def reduce_scatter(
        self,
        out: Array,
        x: Array,
        op: str = ...,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
        *,
        input_splits: Splits = ...,
    ) -> None: ...

    @overload
    def reduce_scatter(
        self,
        out: Array,
        x: Array,
        op: str = ...,
        *,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
        input_splits: Splits = ...,
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self,
        out: Array,
        x: Array,
        op: str = ...,
        async_op: bool = ...,
        timeout_s: Timeout = ...,
        *,
        input_splits: Splits = ...,
    ) -> Work | None: ...

    def reduce_scatter(
        self,
        out: Array,
        x: Array,
        op: str = "sum",
        async_op: bool = False,
        timeout_s: Timeout = None,
        *,
        input_splits: Splits = None,
    ) -> Work | None:
        """Reduce `x` over all ranks and store this rank's shard of the result in `out`.

        Args:
            out: [n, ...] or, with `input_splits`, [input_splits[rank], ...]; with the dtype of `x`.
                It can be exactly this rank's shard of `x`, but must not otherwise overlap `x`.
            x: [size * n, ...] or, with `input_splits`, [sum(input_splits), ...]; the same shape on
                all ranks.
            op: as for `all_reduce`.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
            input_splits: number of rows (dim 0) that each rank receives, the same on all ranks;
                None means equal splits.
        """
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        op = check_reduce_op(op, source.dtype)
        rows: tuple[int, ...] = ()
        counts: tuple[int, ...] = ()
        if input_splits is None:
            check_pair("reduce_scatter", "x", source, "out", target, self.size, self.rank)
        else:
            rows, counts = check_uneven(
                "reduce_scatter", ("x", source), ("out", target), ("input_splits", input_splits),
                self.size, self.rank,
            )  # fmt: skip
        return self._collective(
            "reduce_scatter", source, target, reduce_op=op, input_splits=counts, splits=rows,
            timeout_s=timeout_s, async_op=async_op,
        )  # fmt: skip

    @overload
    def broadcast(
        self, x: Array, root: int, async_op: Literal[False] = ..., timeout_s: Timeout = ...
    ) -> None: ...

    @overload
    def broadcast(
        self, x: Array, root: int, async_op: Literal[True], timeout_s: Timeout = ...
    ) -> Work: ...

    @overload
    def broadcast(
        self, x: Array, root: int, async_op: bool = ..., timeout_s: Timeout = ...
    ) -> Work | None: ...

    def broadcast(
        self, x: Array, root: int, async_op: bool = False, timeout_s: Timeout = None
    ) -> Work | None:
        """Copy `x` from `root` into `x` on every rank.

        Args:
            x: any shape, with the same dtype and number of elements on all ranks.
            root: rank within this group whose array is copied.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        root = self._check_rank(root, "root")
        data = view(x, "x", writable=root != self.rank)
        source, target = (data, None) if root == self.rank else (None, data)
        return self._collective(
            "broadcast", source, target, root=root, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def all_to_all(
        self,
        out: Array,
        x: Array,
        output_splits: Splits = ...,
        input_splits: Splits = ...,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
    ) -> None: ...

    @overload
    def all_to_all(
        self,
        out: Array,
        x: Array,
        output_splits: Splits = ...,
        input_splits: Splits = ...,
        *,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
    ) -> Work: ...

    @overload
    def all_to_all(
        self,
        out: Array,
        x: Array,
        output_splits: Splits = ...,
        input_splits: Splits = ...,
        async_op: bool = ...,
        timeout_s: Timeout = ...,
    ) -> Work | None: ...

    def all_to_all(
        self,
        out: Array,
        x: Array,
        output_splits: Splits = None,
        input_splits: Splits = None,
        async_op: bool = False,
        timeout_s: Timeout = None,
    ) -> Work | None:
        """Send rows of `x` to each rank, and store the rows received from each rank in `out`.

        Args:
            out: the array for the rows (dim 0) that this rank receives, ordered by sender.
            x: the rows to send, ordered by receiver, with the same dtype and row shape as
                `out`; must not share memory with `out`.
            output_splits: number of rows that each rank sends to this rank; None means equal
                splits.
            input_splits: number of rows to send to each rank; None means equal splits.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        source = view(x, "x", writable=False)
        target = view(out, "out", writable=True)
        check_rows("all_to_all", target, source)
        check_overlap("all_to_all", "out", target, "x", source)
        return self._collective(
            "all_to_all",
            source,
            target,
            input_splits=check_splits("input_splits", input_splits, source, self.size),
            output_splits=check_splits("output_splits", output_splits, target, self.size),
            timeout_s=timeout_s,
            async_op=async_op,
        )

    @overload
    def gather(
        self,
        out: Array | None,
        x: Array,
        root: int,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
    ) -> None: ...

    @overload
    def gather(
        self,
        out: Array | None,
        x: Array,
        root: int,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
    ) -> Work: ...

    @overload
    def gather(
        self, out: Array | None, x: Array, root: int, async_op: bool = ..., timeout_s: Timeout = ...
    ) -> Work | None: ...

    def gather(
        self,
        out: Array | None,
        x: Array,
        root: int,
        async_op: bool = False,
        timeout_s: Timeout = None,
    ) -> Work | None:
        """Collect every rank's `x` in `out` on `root`, in rank order.

        Args:
            out: on `root`, [size * n, ...] with the dtype of `x`; None on the other ranks.
            x: [n, ...], the same shape on all ranks.
            root: rank within this group that receives the arrays.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        root = self._check_rank(root, "root")
        source = view(x, "x", writable=False)
        target = self._rooted(out, "out", root, writable=True)
        if target is not None:
            check_pair("gather", "out", target, "x", source, self.size, self.rank)
        return self._collective(
            "gather", source, target, root=root, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def scatter(
        self,
        out: Array,
        x: Array | None,
        root: int,
        async_op: Literal[False] = ...,
        timeout_s: Timeout = ...,
    ) -> None: ...

    @overload
    def scatter(
        self,
        out: Array,
        x: Array | None,
        root: int,
        async_op: Literal[True],
        timeout_s: Timeout = ...,
    ) -> Work: ...

    @overload
    def scatter(
        self, out: Array, x: Array | None, root: int, async_op: bool = ..., timeout_s: Timeout = ...
    ) -> Work | None: ...

    def scatter(
        self,
        out: Array,
        x: Array | None,
        root: int,
        async_op: bool = False,
        timeout_s: Timeout = None,
    ) -> Work | None:
        """Send each rank its shard of the root's `x`, and store this rank's shard in `out`.

        Args:
            out: [n, ...], the same shape on all ranks.
            x: on `root`, [size * n, ...] with the dtype of `out`; None on the other ranks.
            root: rank within this group whose `x` is scattered.
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        root = self._check_rank(root, "root")
        target = view(out, "out", writable=True)
        source = self._rooted(x, "x", root, writable=False)
        if source is not None:
            check_pair("scatter", "x", source, "out", target, self.size, self.rank)
        return self._collective(
            "scatter", source, target, root=root, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def barrier(self, async_op: Literal[False] = ..., timeout_s: Timeout = ...) -> None: ...

    @overload
    def barrier(self, async_op: Literal[True], timeout_s: Timeout = ...) -> Work: ...

    @overload
    def barrier(self, async_op: bool = ..., timeout_s: Timeout = ...) -> Work | None: ...

    def barrier(self, async_op: bool = False, timeout_s: Timeout = None) -> Work | None:
        """Block until every rank of the group has called `barrier`.

        Args:
            async_op: return a `Work` immediately instead of blocking.
            timeout_s: timeout for this operation; None means the group's timeout.
        """
        return self._collective("barrier", None, None, timeout_s=timeout_s, async_op=async_op)

    def monitored_barrier(self, timeout_s: Timeout = None) -> None:
        """Block until every rank has called this method. A timeout error names the missing ranks.

        A rank that has called this method is not named, even if its process has since been stopped.
        On backends that use connections, the method requires two exchanges with the store.

        Args:
            timeout_s: timeout for this call; None means the group's timeout.

        Raises:
            CollectiveTimeoutError: some ranks did not call this method in time; the error's `ranks`
                lists their global ranks.
        """
        with self._state.evidence.arriving():
            self._collective("barrier", None, None, timeout_s=timeout_s)
