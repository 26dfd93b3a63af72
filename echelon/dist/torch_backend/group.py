"""Adapt an echelon ProcessGroup to torch's process group interface.

Torch's C++ and Python code calls the methods below by name; older names are aliases. An operation's
arguments are converted to contiguous arrays (tensors.py). The ProcessGroup checks, records and
executes the operation, and torch receives a `TorchWork` (work.py). A blocking call (`asyncOp`
false) runs on the calling thread, and its errors are raised unchanged on the same thread.

`TorchGroup` replaces torch's entire ProcessGroup, not only its backend. Tensors on the host and on
devices use the same echelon ProcessGroup, which has an engine for each kind of device. All rank
arguments are group ranks, because torch translates `src` and `dst`.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch

from echelon.dist.group import ProcessGroup
from echelon.dist.torch_backend import sparse, tensors
from echelon.dist.torch_backend.futures import FutureThreads, Job
from echelon.dist.torch_backend.identity import Identity
from echelon.dist.torch_backend.reduction import Reduction
from echelon.dist.torch_backend.tensors import Finish
from echelon.dist.torch_backend.work import TorchWork, joined
from echelon.dist.work import Work

Tensor = Any
Start = Callable[..., Work | None]  # called with async_op and timeout_s

_MOMENT_S = 0.001

_open_groups: weakref.WeakSet[TorchGroup] = weakref.WeakSet()


class Factory(Protocol):
    """The factory for the echelon group behind one torch group."""

    rank: int
    size: int
    timeout_s: float

    def make(self, description: str) -> ProcessGroup:
        """Create the group; block until all members have joined."""
        ...

    def close(self) -> None:
        """Disconnect from the store."""


class TorchGroup(Identity):
    """A torch group, with the methods of an echelon ProcessGroup under torch's names."""

    def __init__(self, maker: Factory, store: Any) -> None:
        super().__init__(maker.rank, maker.size, store)
        self._maker = maker
        self._made: ProcessGroup | None = None
        self._making = threading.Lock()
        self._futures = FutureThreads()
        self._coalesced: list[TorchWork] | None = None
        self._pid = os.getpid()
        self._closed = False
        _open_groups.add(self)

    def _get_backend(self, device: Any) -> TorchGroup:  # noqa: ARG002 -- one for all devices
        return self

    def __repr__(self) -> str:
        return f"TorchGroup({self._made or self._description!r})"

    # ---- one tensor per rank ----

    def allreduce(
        self, tensor: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Reduce a tensor over all ranks, in place."""
        reduction, data = Reduction.of(opts), tensors.only(tensor, "allreduce")
        if data.layout == torch.sparse_coo:
            sparse.all_reduce(self._group, data, reduction)
            return self._done([data])
        start, finish = self._reducing(data, reduction)
        return self._run_all(opts, [(start, finish)], [data], _limit(timeout))

    def allreduce_coalesced(self, data: Sequence[Tensor], opts: Any = None) -> TorchWork:
        """Reduce each of several tensors over all ranks, in place."""
        reduction = Reduction.of(opts)
        return self._run_all(opts, [self._reducing(one, reduction) for one in data], list(data))

    def _reducing(self, tensor: Tensor, reduction: Reduction) -> tuple[Start, Finish | None]:
        group, (x, finish) = self._group, tensors.target(tensor)

        def start(**how: Any) -> Work | None:
            numbers = reduction.real(x)
            if reduction.factor is not None:
                numbers.mul_(reduction.factor)
            work: Work | None = group.all_reduce(numbers, reduction.name, **how)
            return work

        return start, finish

    def reduce(self, tensor: Any, opts: Any = None) -> TorchWork:
        """Reduce a tensor over all ranks into the root's tensor."""
        reduction, data = Reduction.of(opts), tensors.only(tensor, "reduce")
        root = opts.rootRank
        group, (x, finish) = self._group, tensors.target(data)
        if root != self._maker.rank:
            finish = None
        if reduction.factor is not None:
            x = x * reduction.factor if root != self._maker.rank else x.mul_(reduction.factor)
        start = partial(group.reduce, reduction.real(x), root, reduction.name)
        return self._run(opts, start, [data], finish)

    def broadcast(self, tensor: Any, opts: Any = None) -> TorchWork:
        """Copy the root's tensor into every rank's tensor. All tensors must have the same size."""
        data, root = tensors.only(tensor, "broadcast"), opts.rootRank
        group, (x, finish) = self._group, tensors.target(data)
        return self._run(opts, partial(group.broadcast, x.reshape(-1), root), [data], finish)

    # ---- many tensors a rank ----

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Collect every rank's tensor into a list of tensors, whose sizes can differ."""
        outs, x = tensors.only_list(outputs, "allgather"), tensors.only(inputs, "allgather")
        self._check_list(outs, x, "all_gather")
        out, finish = tensors.flat_target(outs)
        flat, splits = tensors.source(x).reshape(-1), tensors.splits(outs)
        start = partial(self._group.all_gather, out, flat, output_splits=splits)
        return self._run(opts, start, list(outs), finish)

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> TorchWork:
        """Collect every rank's tensor into a single tensor."""
        out, finish = tensors.target(output)
        return self._run(opts, self._gathering(out, data), [output], finish)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> TorchWork:
        """Gather several tensors from all ranks, each into a single output tensor."""
        calls = []
        for output, data in zip(outputs, inputs, strict=True):
            out, finish = tensors.target(output)
            calls.append((self._gathering(out, data), finish))
        return self._run_all(opts, calls, list(outputs))

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> TorchWork:
        """Collect a list of tensors from every rank into one output list per rank."""
        calls = []
        for number, data in enumerate(inputs):
            out, finish = tensors.flat_target([of_rank[number] for of_rank in outputs])
            calls.append((self._gathering(out, data), finish))
        return self._run_all(opts, calls, [one for of_rank in outputs for one in of_rank])

    def _gathering(self, out: Tensor, data: Tensor) -> Start:
        return partial(self._group.all_gather, out, tensors.source(data))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Reduce a list of tensors, one per rank, over all ranks; store this rank's result.

        The tensors' sizes can differ.
        """
        name = "reduce_scatter"
        output, parts = tensors.only(outputs, name), tensors.only_list(inputs, name)
        self._check_list(parts, output, name)
        data, splits = tensors.flat_source(parts), tensors.splits(parts)
        start, finish = self._scattering(output, data, Reduction.of(opts), splits)
        return self._run(opts, start, [output], finish)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> TorchWork:
        """Reduce a tensor over all ranks, and store this rank's shard in the output."""
        start, finish = self._scattering(output, data, Reduction.of(opts))
        return self._run(opts, start, [output], finish)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> TorchWork:
        """Reduce several tensors over all ranks, and store this rank's shards in the outputs."""
        reduction = Reduction.of(opts)
        pairs = zip(outputs, inputs, strict=True)
        calls = [self._scattering(output, data, reduction) for output, data in pairs]
        return self._run_all(opts, calls, list(outputs))

    def _scattering(
        self,
        output: Tensor,
        data: Tensor,
        reduction: Reduction,
        splits: Sequence[int] | None = None,
    ) -> tuple[Start, Finish | None]:
        group, x = self._group, tensors.source(data)
        out, finish = tensors.target(output)
        if splits is not None:
            out = out.reshape(-1)

        def start(**how: Any) -> Work | None:
            numbers = x if reduction.factor is None else x * reduction.factor
            numbers, result = reduction.real(numbers), reduction.real(out)
            work: Work | None = group.reduce_scatter(
                result, numbers, reduction.name, input_splits=splits, **how
            )
            return work

        return start, finish

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Collect every rank's tensor into the root's list."""
        data, root = tensors.only(inputs, "gather"), opts.rootRank
        group, x = self._group, tensors.source(data)
        outs: Sequence[Tensor] = ()
        out: Tensor | None = None
        finish: Finish | None = None
        if root == self._maker.rank:
            outs = tensors.only_list(outputs, "gather")
            tensors.same_sizes([*outs, x], "gather")
            out, finish = tensors.flat_target(outs)
        return self._run(opts, partial(group.gather, out, x, root), list(outs), finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        """Send each rank its tensor from the root's list."""
        output, root = tensors.only(outputs, "scatter"), opts.rootRank
        group, (out, finish) = self._group, tensors.target(output)
        x: Tensor | None = None
        if root == self._maker.rank:
            parts = tensors.only_list(inputs, "scatter")
            tensors.same_sizes([*parts, out], "scatter")
            x = tensors.flat_source(parts)
        return self._run(opts, partial(group.scatter, out, x, root), [output], finish)

    def all_to_all_single(
        self,
        output: Tensor,
        data: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> TorchWork:
        """Send rows to each rank, and store the rows received from each rank in the output."""
        group, x = self._group, tensors.source(data)
        out, finish = tensors.target(output)
        splits = list(output_splits) or None, list(input_splits) or None
        return self._run(opts, partial(group.all_to_all, out, x, *splits), [output], finish)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> TorchWork:
        """Send a tensor to each rank, and receive a tensor from each rank."""
        group, x = self._group, tensors.flat_source(inputs)
        out, finish = tensors.flat_target(outputs)
        splits = [one.numel() for one in outputs], [one.numel() for one in inputs]
        return self._run(opts, partial(group.all_to_all, out, x, *splits), list(outputs), finish)

    # Names that older versions of torch use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- messages and barriers ----

    def send(self, data: Sequence[Tensor], to: int, tag: int = 0) -> TorchWork:
        """Send a tensor to a rank of the group."""
        tensor = tensors.only(data, "send")
        part = self._group.send(tensors.source(tensor), to, tag, async_op=True)
        return self._started([part], [tensor], None, f"send to {to}")

    def recv(self, data: Sequence[Tensor], source: int, tag: int = 0) -> TorchWork:
        """Receive a tensor from a rank of the group."""
        return self._receive(data, source, tag)

    def recv_anysource(self, data: Sequence[Tensor], tag: int = 0) -> TorchWork:
        """Receive the first tensor that arrives with this tag from any rank of the group."""
        return self._receive(data, None, tag)

    def _receive(self, data: Sequence[Tensor], source: int | None, tag: int) -> TorchWork:
        tensor = tensors.only(data, "recv")
        group, (x, finish) = self._group, tensors.target(tensor)
        part = group.recv(x, source, tag, async_op=True)
        return self._started([part], [tensor], finish, f"recv from {source}")

    def barrier(self, opts: Any = None) -> TorchWork:
        """Block until every rank of the group has called `barrier`."""
        return self._run(opts, self._group.barrier, [], None)

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: ARG002 -- the error always names all of them
    ) -> None:
        """Block until every rank has called this method. A timeout error names the missing ranks.

        With a timeout of 0, the method only checks once which ranks have called it, as Gloo does.
        """
        limit_s = None if timeout is None else max(timeout.total_seconds(), _MOMENT_S)
        self._group.monitored_barrier(limit_s)

    # ---- several at once ----

    def _start_coalescing(self, device: Any) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> TorchWork:  # noqa: ARG002
        works, self._coalesced = self._coalesced or [], None
        return joined(works, lambda job: self._futures.submit("coalesced", job))

    def _check_list(self, listed: Sequence[Tensor], own: Tensor, call: str) -> None:
        if len(listed) != self._maker.size:
            raise ValueError(
                f"{call}: expected a list of {self._maker.size} tensors, one per rank of the "
                f"group, got {len(listed)}"
            )
        tensors.check_own(listed, own, self._maker.rank, call)

    # ---- settings and the end ----

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the group's later operations."""
        self.set_timeout_s(timeout.total_seconds())

    def set_timeout_s(self, timeout_s: float) -> None:
        """Set the timeout of the group's later operations, in seconds."""
        self._maker.timeout_s = timeout_s
        if self._made is not None:
            self._made.timeout_s = timeout_s

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because the group has numbered its operations from the start."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.num_collectives

    def _has_hooks(self) -> bool:
        return False

    def abort(self) -> None:
        """Abort the group on all ranks within 1 s. Safe to call from any thread.

        Waiting operations raise an error.
        """
        if self._made is not None:
            self._made.abort()

    def shutdown(self) -> None:
        """Close the group on this rank and join its threads within a few seconds.

        Safe to call twice.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._made is not None:
            self._made.close()
        self._futures.close()
        self._maker.close()
        _open_groups.discard(self)

    # ---- dispatch ----

    @property
    def _group(self) -> ProcessGroup:
        """The underlying group, created on first use.

        All members must take part in creating the group.
        """
        return self._made or self._meet()

    def _meet(self) -> ProcessGroup:
        """Create the underlying group if it does not exist yet.

        Block until all members have joined.
        """
        with self._making:
            if self._closed:
                raise ValueError(f"group {self._description!r} is shut down")
            if self._made is None:
                self._made = self._maker.make(self._description)
            return self._made

    def _run(
        self, opts: Any, start: Start, result: list[Tensor], finish: Finish | None
    ) -> TorchWork:
        return self._run_all(opts, [(start, finish)], result)

    def _run_all(
        self,
        opts: Any,
        calls: Sequence[tuple[Start, Finish | None]],
        result: list[Tensor],
        timeout_s: float | None = None,
    ) -> TorchWork:
        is_async = self._coalesced is not None or getattr(opts, "asyncOp", True)
        limit_s = timeout_s or _limit(getattr(opts, "timeout", None))
        parts = [start(async_op=is_async, timeout_s=limit_s) for start, _ in calls]
        finish = tensors.both([finish for _, finish in calls])
        if not is_async:
            if finish is not None:
                finish()
            return self._done(result)
        return self._started(parts, result, finish, "collectives")

    def _started(
        self,
        parts: Sequence[Work | None],
        result: list[Tensor],
        finish: Finish | None,
        lane: str,
    ) -> TorchWork:
        works = [part for part in parts if part is not None]
        work = TorchWork(works, result, finish, lambda job: self._futures.submit(lane, job))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _done(self, result: list[Tensor]) -> TorchWork:
        return TorchWork((), result, None, _now)


def _limit(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds. Torch's 0 and -1 ms become None (the group's timeout)."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None


def _now(job: Job) -> None:
    job()


def _close_all() -> None:
    """At exit, close all open groups, whose waiting threads could otherwise crash the process."""
    for group in sorted(_open_groups, key=lambda one: one.group_name, reverse=True):
        group.shutdown()


atexit.register(_close_all)
