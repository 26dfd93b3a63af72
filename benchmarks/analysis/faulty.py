"""Faults of the fault matrix: every class is a job in which one rank fails, or none.

    echelon run --nproc-per-node 4 benchmarks/analysis/faulty.py HangInCode 2

trains for 40 steps with constants as gradients; rank 2 hangs in step 20. `faults.py` runs every
class and judges the verdicts.
"""
# ruff: noqa: D102 -- each class says in its own line what its overrides do

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

AT_STEP = 20
STEPS = 40


class Worker:
    """The behavior of every rank; a fault overrides one method, usually for the culprit only."""

    def __init__(self, world: Any, culprit: int) -> None:
        self.world = world
        self.culprit = culprit
        self.is_culprit = world.rank == culprit
        self.step = 0

    @property
    def is_due(self) -> bool:
        """True if this rank is the culprit and this is the step of the fault."""
        return self.is_culprit and self.step == AT_STEP

    def run(self) -> None:
        """Train all steps."""
        from echelon import recorder

        for step in range(self.num_steps()):
            self.step = step
            recorder.step()
            with recorder.span("data_wait"):
                self.data()
            with recorder.span("compute"):
                self.compute()
            for bucket in range(3):
                self.reduce(bucket)
            self.log()
        self.finish()

    def num_steps(self) -> int:
        """Return the number of steps that this rank runs."""
        return STEPS

    def data(self) -> None:
        """Fetch a batch."""

    def compute(self) -> None:
        """Compute gradients."""
        time.sleep(0.002)

    def reduce(self, bucket: int) -> None:
        """Average one bucket of gradients."""
        self.world.all_reduce(np.ones(256 * (bucket + 1), np.float32))

    def log(self) -> None:
        """Average the loss."""
        self.world.all_reduce(np.ones(1, np.float32))

    def finish(self) -> None:
        """Wait for all ranks in a barrier."""
        self.world.barrier()


def wait_for_ever() -> None:
    """Block indefinitely in ordinary code."""
    threading.Event().wait()


class OtherOperation(Worker):
    """A worker that broadcasts while the others all-reduce."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.broadcast(np.ones(512, np.float32), 0)
        else:
            super().reduce(bucket)


class OtherShape(Worker):
    """A worker that passes one element fewer than the others."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.all_reduce(np.ones(511, np.float32))
        else:
            super().reduce(bucket)


class OtherType(Worker):
    """A worker that passes float64 while the others pass float32."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.all_reduce(np.ones(512, np.float64))
        else:
            super().reduce(bucket)


class OtherReduction(Worker):
    """A worker that takes the maximum while the others sum."""

    def reduce(self, bucket: int) -> None:
        self.world.all_reduce(
            np.ones(256 * (bucket + 1), np.float32), "max" if self.is_due else "sum"
        )


class OtherRoot(Worker):
    """A worker that broadcasts from a different root."""

    def log(self) -> None:
        self.world.broadcast(np.ones(4, np.float32), 1 if self.is_due else 0)


class OtherSplits(Worker):
    """A worker that sends one element more to one rank than it expects."""

    def log(self) -> None:
        size = self.world.size
        sends, receives = [2] * size, [2] * size
        if self.is_due:
            sends[(self.world.rank + 1) % size] = 3
        data = np.ones(sum(sends), np.float32)
        self.world.all_to_all(np.empty(sum(receives), np.float32), data, receives, sends)


class SkipBucket(Worker):
    """A worker that skips a bucket whose size differs from the next one's."""

    def reduce(self, bucket: int) -> None:
        if not (self.is_due and bucket == 1):
            super().reduce(bucket)


class SkipEqualBucket(Worker):
    """A worker that skips one of several equal buckets; only the step number shows it."""

    def reduce(self, bucket: int) -> None:
        if not (self.is_due and bucket == 1):
            self.world.all_reduce(np.ones(256, np.float32))

    def log(self) -> None:
        self.world.all_reduce(np.ones(256, np.float32))


class FewerBatches(Worker):
    """A worker that runs out of data one step before the others."""

    def num_steps(self) -> int:
        return STEPS - (1 if self.is_culprit else 0)


class RepeatBucket(Worker):
    """A worker that reduces one bucket twice."""

    def reduce(self, bucket: int) -> None:
        for _ in range(2 if self.is_due and bucket == 1 else 1):
            super().reduce(bucket)


class HangInCode(Worker):
    """A worker that hangs in ordinary code."""

    def compute(self) -> None:
        if self.is_due:
            wait_for_ever()
        super().compute()


class SpinInCode(Worker):
    """A worker that computes indefinitely."""

    def compute(self) -> None:
        while self.is_due:
            sum(range(1000))
        super().compute()


class HangInFirstStep(HangInCode):
    """A worker that hangs before the first collective."""

    @property
    def is_due(self) -> bool:
        return self.is_culprit and self.step == 0


class StarveOfData(Worker):
    """A worker that waits for a batch that never arrives."""

    def data(self) -> None:
        if self.is_due:
            wait_for_ever()


class InSpan(Worker):
    """A worker that hangs inside a span named `name`."""

    name = ""

    def compute(self) -> None:
        from echelon import recorder

        if self.is_due:
            with recorder.span(self.name, "epoch/7"):
                wait_for_ever()
        super().compute()


class StallStorage(InSpan):
    """A worker that hangs in a checkpoint span."""

    name = "checkpoint"


class StallCompiler(InSpan):
    """A worker that hangs in a compile span."""

    name = "compile"


class WaitForStore(InSpan):
    """A worker that hangs in a store span."""

    name = "store"


class HoldLock(Worker):
    """A worker that computes in C for hours while holding the GIL."""

    def compute(self) -> None:
        if self.is_due:
            pow(7, 1 << 33)  # a sleep in C would be ended by the signal that asks for stacks
        super().compute()


class DeviceNeverDone(Worker):
    """A worker that enters an operation that never ends, as on a stuck device's stream."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            engine: Any = self.world._engine
            carry_out = engine.execute

            def never_done(operation: object, watch: object) -> None:
                carry_out(operation, watch)
                wait_for_ever()

            engine.execute = never_done
        super().reduce(bucket)


class Freeze(Worker):
    """A worker that is stopped by SIGSTOP."""

    def compute(self) -> None:
        if self.is_due:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().compute()


class Raise(Worker):
    """A worker that raises an exception."""

    def compute(self) -> None:
        if self.is_due:
            raise ValueError("a corrupt batch")
        super().compute()


class Kill(Worker):
    """A worker that dies of SIGKILL."""

    def compute(self) -> None:
        if self.is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        super().compute()


class Segfault(Worker):
    """A worker that dies of a segmentation fault."""

    def compute(self) -> None:
        if self.is_due:
            ctypes.string_at(0)
        super().compute()


class ExitAtOnce(Worker):
    """A worker that exits through os._exit."""

    def compute(self) -> None:
        if self.is_due:
            os._exit(7)
        super().compute()


class ExitQuietly(Worker):
    """A worker that exits through sys.exit with a nonzero code."""

    def compute(self) -> None:
        if self.is_due:
            sys.exit(3)
        super().compute()


class UseUpMemory(Worker):
    """A worker that allocates more memory than the host has."""

    def compute(self) -> None:
        if self.is_due:
            bytearray(1 << 60)
        super().compute()


class LagBehind(Worker):
    """A worker that is slower than the others in every step."""

    def num_steps(self) -> int:
        return 80

    def compute(self) -> None:
        time.sleep(0.03 if self.is_culprit else 0.005)


class Desync(Worker):
    """A worker that calls two groups' collectives in the opposite order, on half of the ranks."""

    def __init__(self, world: Any, culprit: int) -> None:
        super().__init__(world, culprit)
        import echelon.dist as dist

        everybody = list(range(world.size))
        self.groups = [dist.new_group(everybody, name=name) for name in ("left", "right")]

    def log(self) -> None:
        half = self.world.rank >= self.world.size // 2
        turned = half and self.step == AT_STEP
        for group in reversed(self.groups) if turned else self.groups:
            group.all_reduce(np.ones(4, np.float32))


class HangInSubgroup(Worker):
    """A worker that hangs before a subgroup's collective; the other subgroup continues."""

    def __init__(self, world: Any, culprit: int) -> None:
        super().__init__(world, culprit)
        import echelon.dist as dist

        half = world.size // 2
        low = dist.new_group(list(range(half)), name="low")
        high = dist.new_group(list(range(half, world.size)), name="high")
        self.group = low if world.rank < half else high

    def log(self) -> None:
        if self.is_due:
            wait_for_ever()
        self.group.all_reduce(np.ones(4, np.float32))


class Pipeline(Worker):
    """A worker that passes a tensor from rank to rank."""

    def log(self) -> None:
        rank, last = self.world.rank, self.world.size - 1
        if rank > 0:
            self.before_receiving()
            self.world.recv(np.empty(4, np.float32), self.source())
        if rank < last:
            self.world.send(np.ones(4, np.float32), rank + 1)

    def before_receiving(self) -> None:
        """Do nothing; a hook for faults."""

    def source(self) -> int:
        """Return the rank to receive from."""
        return self.world.rank - 1


class HangInPipeline(Pipeline):
    """A worker that hangs before receiving."""

    def before_receiving(self) -> None:
        if self.is_due:
            wait_for_ever()


class WrongPeer(Pipeline):
    """A worker that receives from the next rank instead of the previous one."""

    def source(self) -> int:
        return self.world.rank + 1 if self.is_due else self.world.rank - 1


class Jitter(Worker):
    """A worker whose compute time differs in every step."""

    def compute(self) -> None:
        time.sleep(((self.step * 7 + self.world.rank * 13) % 11) / 1000)


class SaveSometimes(Worker):
    """A worker of which rank 0 occasionally writes a checkpoint."""

    def compute(self) -> None:
        from echelon import recorder

        if self.world.rank == 0 and self.step % 15 == 14:
            with recorder.span("checkpoint"):
                time.sleep(0.2)
        super().compute()


class Mixed(Worker):
    """A worker that uses several collectives, with changing roots."""

    def log(self) -> None:
        size = self.world.size
        self.world.broadcast(np.ones(8, np.float32), self.step % size)
        out = np.empty(4 * size, np.float32)
        self.world.all_gather(out, np.ones(4, np.float32))
        self.world.reduce_scatter(np.empty(4, np.float32), out)


class Overlapped(Worker):
    """A worker that issues buckets asynchronously and waits at the end of the step."""

    def reduce(self, bucket: int) -> None:
        self.works = [] if bucket == 0 else self.works
        data = np.ones(256 * (bucket + 1), np.float32)
        self.works.append(self.world.all_reduce(data, async_op=True))

    def log(self) -> None:
        for work in self.works:
            work.wait()
        super().log()


class Catch(Worker):
    """A worker that raises and catches an exception in every step."""

    def compute(self) -> None:
        try:
            raise ValueError("and nobody minds")
        except ValueError:
            super().compute()


def main() -> None:
    """Run as one rank of a job; the arguments are the class and the culprit's rank."""
    import echelon.dist as dist

    name, culprit = sys.argv[1:]
    world = dist.init()
    globals()[name](world, int(culprit)).run()
    dist.shutdown()


if __name__ == "__main__":
    main()
