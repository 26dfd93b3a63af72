"""Train a pipeline to weights that are bitwise identical to those of a single process.

Each stage sums the gradients of its micro-batches over its replicas or shards in the order of the
canonical tree (`dist/canonical/tree.py`), which is the same for every layout. The RNG state is sent
with the activations. The norm is summed over the parameters in the order of their names, and does
not depend on where the model is split.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import echelon.dist as dist
from echelon.dist.canonical import Run, tree_sum
from echelon.dist.group import ProcessGroup
from echelon.dist.pipeline import Pipeline, Stage
from echelon.train.same_bits.checks import (
    check_model,
    check_optimizer,
    check_reproducible,
    copy_whole_parameters,
    no_collectives,
    runs_of,
    unchanged_buffers,
)
from echelon.train.same_bits.fingerprint_log import FingerprintLog
from echelon.train.same_bits.fingerprints import joined
from echelon.train.same_bits.gradients import Gradients, digest, merge
from echelon.train.same_bits.micro_random import (
    continued_random,
    micro_batch_random,
    random_state,
)
from echelon.train.same_bits.norm import norm_of, square_sums
from echelon.train.same_bits.vectors import Taken

Batch = Callable[[int], Any]
Take = Callable[[int, Stage, list[Taken]], None]


class SameBitsPipeline:
    """A wrapper around a pipeline that makes gradients, losses and norms independent of the layout.

    Weights, losses and norms have the same bits as those of `SameBits` on the whole model, for any
    number of stages, replicas and shards. Creating this object is collective.

    Args:
        pipe: the pipeline. Its `replicas` must be set, possibly to a group of one rank. Its number
            of micro-batches must equal the length of this rank's range.
        optimizer: the optimizer of the pipeline's parameters.
        micro_batches: the number of micro-batches per step, over all replicas.
        seed: the seed of the run.
        run: the micro-batches of this rank's pipeline; None means an even split.
        probe: as for `SameBits`.
        fingerprints: as for `SameBits`.

    Attributes:
        run: the micro-batches of this rank's pipeline.

    Raises:
        ValueError: an argument is invalid, or the pipeline has tied parameters or no `replicas`;
            also raised in the cases listed for `SameBits`.
        CollectiveMismatchError: the ranks' ranges are not contiguous, or their `Run.total` differs.

    Example:
        >>> mesh = DeviceMesh((2, 4), ("pp", "dp"))
        >>> run = even_runs(24, 4)[mesh.group("dp").rank]
        >>> pipe = Pipeline([stage], group=mesh.group("pp"), replicas=mesh.group("dp"),
        ...                 num_microbatches=len(run), loss_fn=loss_fn)
        >>> same = SameBitsPipeline(pipe, optimizer, micro_batches=24, seed=1)
        >>> for step in range(1000):
        ...     loss = same.backward(step, lambda number: data.batch(step, number))
        ...     norm = same.clip_grad_norm_(1.0)
        ...     optimizer.step()
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        *,
        micro_batches: int,
        seed: int = 0,
        run: Run | None = None,
        probe: bool = True,
        fingerprints: str | Path | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_model(pipe.module)
        if pipe.replicas is None:
            raise ValueError(
                "the Pipeline has no replicas: pass replicas= to it, for example "
                'replicas=mesh.group("dp")'
            )
        if pipe.num_ties or _num_shared(pipe.stages):
            raise ValueError(
                "SameBitsPipeline does not support tied parameters: autograd adds the gradients of "
                "a shared parameter in every micro-batch, but stages add them once per step"
            )
        self._pipe = pipe
        self._replicas = pipe.replicas
        self._seed = seed
        self._must_probe = probe
        self._step = 0
        self._log: FingerprintLog | None = None
        if fingerprints is not None:
            self._log = FingerprintLog(fingerprints, dist.world().rank)
        runs = runs_of(self._replicas, micro_batches, run)
        self.run = runs[self._replicas.rank]
        if len(self.run) != pipe.num_microbatches:
            raise ValueError(
                f"this rank's pipeline has num_microbatches={pipe.num_microbatches}, but "
                f"{self.run} needs {len(self.run)}: see echelon.dist.canonical.even_runs"
            )
        self._gradients = {
            stage.index: Gradients(stage.module, self._replicas, runs) for stage in pipe.stages
        }
        for stage in pipe.stages:
            copy_whole_parameters(stage.module, self._replicas)

    def backward(self, step: int, batch: Batch) -> float:
        """Compute the micro-batches of a step and put the average gradients into `.grad`.

        Earlier gradients are dropped. The method is collective over all ranks of the pipelines. It
        blocks until all ranks have computed their micro-batches or the groups' timeout expires.

        Args:
            step: the number of the optimizer step, which is part of the random numbers' seed.
            batch: a function that takes the number of a micro-batch within the step and returns its
                inputs and targets, each a tensor or a tuple of tensors. The function is called on
                the ranks of the first and the last stage. Its result must depend only on the
                number, and it must not draw from torch's generators.

        Returns:
            The mean of the micro-batches' losses, bitwise identical on every rank.

        Raises:
            NotReproducibleError: at the first step, a micro-batch gave different bits when it was
                recomputed, or computed on another replica.
            ValueError: a forward pass changed a buffer; also raised in the cases listed for
                `Pipeline.step`.
            CollectiveError: a rank was lost or did not join.
        """
        self._step = step
        for gradients in self._gradients.values():
            gradients.check_trained()
        with contextlib.ExitStack() as stack:
            for gradients in self._gradients.values():
                stack.enter_context(gradients.held())
            if self._must_probe:
                self._probe(step, batch)
                self._must_probe = False
            losses = self._carry_out(step, list(self.run.numbers), batch, self._add)
        if self._log is not None:
            for number, loss in zip(self.run.numbers, losses, strict=False):
                self._log.loss(step, number, loss)
        for gradients in self._gradients.values():
            gradients.reduce()
        return self.mean(losses)

    def mean(self, values: Sequence[float]) -> float:
        """Average one value per micro-batch, such as a metric, adding the values in a fixed order.

        Collective over all ranks of the pipelines. The result has the same bits on every rank.

        Args:
            values: on the last stage's rank, the values of this pipeline's micro-batches, in order
                of their numbers. Ignored on other ranks.

        Raises:
            ValueError: the number of values differs from the number of micro-batches.
        """
        mine = [float(value) for value in values] if self._pipe.has_last else None
        found = self._pipe.group.all_gather_object(mine)
        row = next(one for one in found if one is not None)
        if len(row) != len(self.run):
            raise ValueError(
                f"got {len(row)} values, but this rank has {len(self.run)} micro-batches"
            )
        every = [value for one in self._replicas.all_gather_object(row) for value in one]
        total: float = tree_sum(every, lambda left, right: left + right)
        return total / self.run.total

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients of all stages so that their 2-norm is at most `max_norm`. Collective.

        Args:
            max_norm: the upper bound; if it is infinite, the gradients are not scaled.

        Returns:
            The norm before scaling, with the same bits on every rank.

        Raises:
            ValueError: `max_norm` is negative or not a number, or two stages have parameters of the
                same name.
        """
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be >= 0, got {max_norm!r}")
        mine = [
            {
                stage.prefix + name: one
                for name, one in square_sums(stage.module, self._replicas).items()
            }
            for stage in self._pipe.stages
        ]
        parts = self._pipe.group.all_gather_object(mine)
        sums: dict[str, float] = joined([one for part in parts for one in part])
        norm = norm_of(sums)
        if self._log is not None:
            self._log.norm(self._step, norm)
        scale = max_norm / (norm + 1e-6)
        if not math.isinf(max_norm) and scale < 1.0:
            for gradients in self._gradients.values():
                gradients.scale_(scale)
        return norm

    # ---- one batch ----

    def _carry_out(self, step: int, numbers: list[int], batch: Batch, take: Take) -> list[float]:
        """Execute the plan on the micro-batches in `numbers`; return this rank's losses."""
        pipe = self._pipe
        inputs: list[list[torch.Tensor]] = []
        targets: list[list[torch.Tensor]] = []
        if pipe.has_first or pipe.has_last:
            for number in numbers:
                first, last = batch(number)
                inputs.append(_listed(first))
                targets.append(_listed(last))
        losses = pipe.compute_separately(
            inputs if pipe.has_first else [],
            targets if pipe.has_last else [],
            _Listener(self._seed, step, numbers, self._gradients, self._replicas, take),
        )
        return [float(loss) for loss in losses]

    def _add(self, number: int, stage: Stage, taken: list[Taken]) -> None:
        gradients = self._gradients[stage.index]
        if self._log is not None:
            found = {stage.prefix + name: one for name, one in gradients.named(taken).items()}
            self._log.stage(self._step, number, stage.index, found)
        gradients.add(number, taken)

    # ---- the probe ----

    def _probe(self, step: int, batch: Batch) -> None:
        """Compute micro-batch 0 at least twice in every pipeline, and compare the results.

        The step's last micro-batch is computed in between. The plan has a fixed number of
        micro-batches, so micro-batch 0 also fills any remaining slots.
        """
        per_pass = self._pipe.num_microbatches
        wanted = [0, self.run.total - 1, 0]
        wanted += [0] * (-len(wanted) % per_pass)
        digests: dict[int, list[str]] = {index: [] for index in self._gradients}

        def note(number: int, stage: Stage, taken: list[Taken]) -> None:
            if number == 0:
                digests[stage.index].append(digest(taken))

        losses: list[float] = []
        for start in range(0, len(wanted), per_pass):
            losses += self._carry_out(step, wanted[start : start + per_pass], batch, note)
        rows = [sorted(set(found)) for _, found in sorted(digests.items())]
        zeros = [loss for number, loss in zip(wanted, losses, strict=False) if number == 0]
        rows.append(sorted({loss.hex() for loss in zeros}))
        is_stable = all(len(row) < 2 for row in rows)
        text = hashlib.sha256(repr(rows).encode()).hexdigest()
        mine = [self._pipe.group.ranks[self._pipe.group.rank], text, is_stable]
        # Of all ranks of all pipelines: those with the same stages compare their bits
        every = self._replicas.all_gather_object(self._pipe.group.all_gather_object(mine))
        columns = list(zip(*every, strict=True))
        for column in columns:
            check_reproducible(
                step,
                [[text, text if stable else "other bits"] for _, text, stable in column],
                [rank for rank, _, _ in column],
            )


class _Listener:
    """A listener that seeds each micro-batch's random numbers and collects its gradients.

    Args:
        seed: the seed of the run.
        step: the number of the optimizer step.
        numbers: the numbers of the micro-batches in this batch.
        gradients: the gradients of each stage, keyed by stage index.
        replicas: the ranks that run the same stages.
        take: a function that is called with a micro-batch's number, a stage and the complete
            gradients.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        numbers: list[int],
        gradients: dict[int, Gradients],
        replicas: ProcessGroup,
        take: Take,
    ) -> None:
        self._seed = seed
        self._step = step
        self._numbers = numbers
        self._gradients = gradients
        self._replicas = replicas
        self._take = take
        self._halves: dict[tuple[int, int], list[Taken]] = {}

    @contextlib.contextmanager
    def random(self, stage: Stage, microbatch: int, state: torch.Tensor | None) -> Iterator[None]:
        """Set the RNG state for a forward pass, and restore the previous state afterwards."""
        device = stage.device or torch.device("cpu")
        if state is None:
            drawn = micro_batch_random(self._seed, self._step, self._numbers[microbatch], device)
        else:
            drawn = continued_random(state, device)
        with drawn, unchanged_buffers(stage.module), no_collectives(self._replicas):
            yield

    def random_state(self, stage: Stage) -> torch.Tensor:
        """Return the state of the random generators, for the next stage."""
        return random_state(stage.device or torch.device("cpu"))

    def computed(self, stage: Stage, microbatch: int, *, is_complete: bool) -> None:
        """Collect a stage's gradients after a full backward pass or one of its halves."""
        taken = self._gradients[stage.index].take()
        key = stage.index, microbatch
        if key in self._halves:
            taken = merge(self._halves.pop(key), taken)
        if is_complete:
            self._take(self._numbers[microbatch], stage, taken)
        else:
            self._halves[key] = taken


def _num_shared(stages: Sequence[Stage]) -> int:
    """Return the number of parameters that more than one of this rank's stages holds."""
    places = [id(one) for stage in stages for one in set(stage.module.parameters())]
    return len(places) - len(set(places))


def _listed(batch: Any) -> list[torch.Tensor]:
    return list(batch) if isinstance(batch, tuple | list) else [batch]
