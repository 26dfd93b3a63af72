"""Faults of the fault matrix: every class is a job in which one rank errs, or none.

    echelon run --nproc-per-node 4 benchmarks/analysis/faulty.py HangInCode 2

trains for 40 steps with numbers for gradients; rank 2 hangs in step 20. `faults.py` runs all of
them and judges the verdicts.
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
    """The behaviour of every rank; faults override one part of it on one rank."""

    def __init__(self, world: Any, culprit: int) -> None:
        self.world = world
        self.culprit = culprit
        self.is_culprit = world.rank == culprit
        self.step = 0

    @property
    def is_due(self) -> bool:
        """Whether this rank is to go wrong now."""
        return self.is_culprit and self.step == AT_STEP

    def run(self) -> None:
        """Train for a while."""
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
        """How many steps this rank runs."""
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
        """Meet at the end."""
        self.world.barrier()


def wait_for_ever() -> None:
    """Block in ordinary code."""
    threading.Event().wait()


class OtherOperation(Worker):
    """Broadcasts where the others reduce."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.broadcast(np.ones(512, np.float32), 0)
        else:
            super().reduce(bucket)


class OtherShape(Worker):
    """Passes one element less."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.all_reduce(np.ones(511, np.float32))
        else:
            super().reduce(bucket)


class OtherType(Worker):
    """Passes float64."""

    def reduce(self, bucket: int) -> None:
        if self.is_due and bucket == 1:
            self.world.all_reduce(np.ones(512, np.float64))
        else:
            super().reduce(bucket)


class OtherReduction(Worker):
    """Takes the maximum where the others sum."""

    def reduce(self, bucket: int) -> None:
        self.world.all_reduce(
            np.ones(256 * (bucket + 1), np.float32), "max" if self.is_due else "sum"
        )


class OtherRoot(Worker):
    """Broadcasts from another root."""

    def log(self) -> None:
        self.world.broadcast(np.ones(4, np.float32), 1 if self.is_due else 0)


class OtherSplits(Worker):
    """Sends one element more to one rank than it expects."""

    def log(self) -> None:
        size = self.world.size
        sends, receives = [2] * size, [2] * size
        if self.is_due:
            sends[(self.world.rank + 1) % size] = 3
        data = np.ones(sum(sends), np.float32)
        self.world.all_to_all(np.empty(sum(receives), np.float32), data, receives, sends)


class SkipBucket(Worker):
    """Leaves out a bucket whose size differs from the next one's."""

    def reduce(self, bucket: int) -> None:
        if not (self.is_due and bucket == 1):
            super().reduce(bucket)


class SkipEqualBucket(Worker):
    """Leaves out one of several equal buckets: only the step number shows it."""

    def reduce(self, bucket: int) -> None:
        if not (self.is_due and bucket == 1):
            self.world.all_reduce(np.ones(256, np.float32))

    def log(self) -> None:
        self.world.all_reduce(np.ones(256, np.float32))


class FewerBatches(Worker):
    """Runs out of data one step before the others."""

    def num_steps(self) -> int:
        return STEPS - (1 if self.is_culprit else 0)


class RepeatBucket(Worker):
    """Reduces one bucket twice."""

    def reduce(self, bucket: int) -> None:
        for _ in range(2 if self.is_due and bucket == 1 else 1):
            super().reduce(bucket)


class HangInCode(Worker):
    """Waits in ordinary code."""

    def compute(self) -> None:
        if self.is_due:
            wait_for_ever()
        super().compute()


class SpinInCode(Worker):
    """Computes indefinitely."""

    def compute(self) -> None:
        while self.is_due:
            sum(range(1000))
        super().compute()


class HangInFirstStep(HangInCode):
    """Hangs before the first collective."""

    @property
    def is_due(self) -> bool:
        return self.is_culprit and self.step == 0


class StarveOfData(Worker):
    """Waits for a batch that never arrives."""

    def data(self) -> None:
        if self.is_due:
            wait_for_ever()


class InSpan(Worker):
    """Hangs inside a span of this name."""

    name = ""

    def compute(self) -> None:
        from echelon import recorder

        if self.is_due:
            with recorder.span(self.name, "epoch/7"):
                wait_for_ever()
        super().compute()


class StallStorage(InSpan):
    """Hangs in a checkpoint."""

    name = "checkpoint"


class StallCompiler(InSpan):
    """Hangs in a compiler."""

    name = "compile"


class WaitForStore(InSpan):
    """Hangs in a store request."""

    name = "store"


class HoldLock(Worker):
    """Computes in C for hours, with the interpreter's lock held."""

    def compute(self) -> None:
        if self.is_due:
            pow(7, 1 << 33)  # a sleep in C would be ended by the signal that asks for stacks
        super().compute()


class DeviceNeverDone(Worker):
    """Enters an operation that never ends, as on a stuck device's stream."""

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
    """Is stopped by a signal."""

    def compute(self) -> None:
        if self.is_due:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().compute()


class Raise(Worker):
    """Raises an exception."""

    def compute(self) -> None:
        if self.is_due:
            raise ValueError("a corrupt batch")
        super().compute()


class Kill(Worker):
    """Dies of SIGKILL."""

    def compute(self) -> None:
        if self.is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        super().compute()


class Segfault(Worker):
    """Dies of a wild pointer."""

    def compute(self) -> None:
        if self.is_due:
            ctypes.string_at(0)
        super().compute()


class ExitAtOnce(Worker):
    """Exits through os._exit."""

    def compute(self) -> None:
        if self.is_due:
            os._exit(7)
        super().compute()


class ExitQuietly(Worker):
    """Exits through sys.exit with a code."""

    def compute(self) -> None:
        if self.is_due:
            sys.exit(3)
        super().compute()


class UseUpMemory(Worker):
    """Requests more memory than there is."""

    def compute(self) -> None:
        if self.is_due:
            bytearray(1 << 60)
        super().compute()


class LagBehind(Worker):
    """Is slower than the others in every step."""

    def num_steps(self) -> int:
        return 80

    def compute(self) -> None:
        time.sleep(0.03 if self.is_culprit else 0.005)


class Desync(Worker):
    """Enters two groups in another order."""

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
    """Hangs before a subgroup's collective; the other subgroup proceeds to the world's."""

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
    """Passes a tensor from rank to rank."""

    def log(self) -> None:
        rank, last = self.world.rank, self.world.size - 1
        if rank > 0:
            self.before_receiving()
            self.world.recv(np.empty(4, np.float32), self.source())
        if rank < last:
            self.world.send(np.ones(4, np.float32), rank + 1)

    def before_receiving(self) -> None:
        """Do nothing."""

    def source(self) -> int:
        """Return the rank to receive from."""
        return self.world.rank - 1


class HangInPipeline(Pipeline):
    """Hangs before receiving."""

    def before_receiving(self) -> None:
        if self.is_due:
            wait_for_ever()


class WrongPeer(Pipeline):
    """Receives from the rank after it instead of the one before."""

    def source(self) -> int:
        return self.world.rank + 1 if self.is_due else self.world.rank - 1


class Jitter(Worker):
    """Takes a different time in every step."""

    def compute(self) -> None:
        time.sleep(((self.step * 7 + self.world.rank * 13) % 11) / 1000)


class SaveSometimes(Worker):
    """Lets rank 0 write a checkpoint now and then."""

    def compute(self) -> None:
        from echelon import recorder

        if self.world.rank == 0 and self.step % 15 == 14:
            with recorder.span("checkpoint"):
                time.sleep(0.2)
        super().compute()


class Mixed(Worker):
    """Uses all collectives, with changing roots."""

    def log(self) -> None:
        size = self.world.size
        self.world.broadcast(np.ones(8, np.float32), self.step % size)
        out = np.empty(4 * size, np.float32)
        self.world.all_gather(out, np.ones(4, np.float32))
        self.world.reduce_scatter(np.empty(4, np.float32), out)


class Overlapped(Worker):
    """Issues buckets without waiting, and waits at the end of the step."""

    def reduce(self, bucket: int) -> None:
        self.works = [] if bucket == 0 else self.works
        data = np.ones(256 * (bucket + 1), np.float32)
        self.works.append(self.world.all_reduce(data, async_op=True))

    def log(self) -> None:
        for work in self.works:
            work.wait()
        super().log()


class Catch(Worker):
    """Raises and catches exceptions in the loop."""

    def compute(self) -> None:
        try:
            raise ValueError("and nobody minds")
        except ValueError:
            super().compute()


def main() -> None:
    """Run as one rank of a job; the arguments are the class and the rank that errs."""
    import echelon.dist as dist

    name, culprit = sys.argv[1:]
    world = dist.init()
    globals()[name](world, int(culprit)).run()
    dist.shutdown()


if __name__ == "__main__":
    main()
