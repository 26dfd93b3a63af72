"""Run one case in its own process: start cold, iterate, print the results as a line of JSON."""

# ruff: noqa: D103 -- read top-down from measure()
from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- the name the field uses
from torch import nn

from echelon.train.models import ModelConfig, Transformer, gpt2
from echelon.train.models import block as blocks
from echelon.train.models.transformer import document_mask, embed

_WINDOW = 64  # tokens that a position reads, of a sliding window
_PEAK_S = 0.3  # of trying, each way
_TEXT_BYTES = 4 << 20
_CHARACTERS = 65  # as many as Shakespeare's text has


def configuration(model: str) -> ModelConfig:
    """Return the sizes of nanoGPT's character model (10.65M, no positions) or GPT-2 (124M)."""
    if model == "gpt2":
        return gpt2(vocabulary=50_304)
    return gpt2(
        layers=6, width=384, heads=6, context=256, vocabulary=_CHARACTERS, bias=False,
    ) if model == "char" else gpt2(
        layers=2, width=64, heads=2, context=64, vocabulary=_CHARACTERS, bias=False,
    )  # fmt: skip


def read_tokens(path: str, vocabulary: int) -> torch.Tensor:
    """Encode a text's characters by frequency rank; rare ones become the most frequent one."""
    if path:
        text = Path(path).read_bytes()[:_TEXT_BYTES]
    else:
        library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(one.read_bytes() for one in library)[:_TEXT_BYTES]
    kept = [byte for byte, _ in Counter(text).most_common(min(vocabulary, 256))]
    table = np.zeros(256, np.int64)
    table[kept] = np.arange(len(kept))
    return torch.from_numpy(table[np.frombuffer(text, np.uint8)])


class Masked(nn.Module):
    """A model whose attention has a document or a sliding-window mask."""

    def __init__(self, model: Transformer, attention: str) -> None:
        super().__init__()
        self.model = model
        self.uses_flex = attention.startswith("flex")
        self.mask = attention.rpartition(" ")[2]

    def forward(self, tokens: torch.Tensor) -> Any:
        """Return the logits."""
        model = self.model
        x = embed(model.config, model.token, model.position, tokens, None)
        mask = self._flex_mask(tokens) if self.uses_flex else self._dense_mask(tokens)
        for block in model.blocks:
            x = block(x, None, mask)
        return model.head(model.final_norm(x))

    def _documents(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens == 0).cumsum(1) // 32  # the commonest character ends a document at times

    def _dense_mask(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mask == "document":
            return document_mask(self._documents(tokens))
        at = torch.arange(tokens.shape[1], device=tokens.device)
        back = at[:, None] - at
        return ((back >= 0) & (back < _WINDOW))[None, None]

    def _flex_mask(self, tokens: torch.Tensor) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        documents, length = self._documents(tokens), tokens.shape[1]

        def document(b: Any, _: Any, i: Any, j: Any) -> Any:
            return (documents[b, i] == documents[b, j]) & (i >= j)

        def window(_b: Any, _h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (i - j < _WINDOW)

        batch = len(tokens) if self.mask == "document" else None
        rule = document if self.mask == "document" else window
        return create_block_mask(rule, batch, None, length, length, device=str(tokens.device))


def use_flex() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query: Any, key: Any, value: Any, mask: Any, *, is_causal: bool) -> Any:  # noqa: ARG001
        return flex_attention(query, key, value, block_mask=mask)

    blocks.attend = attend


class Run:
    """A model that runs as a case specifies."""

    def __init__(self, case: dict[str, Any], options: dict[str, Any]) -> None:
        self.case, self.options = case, options
        self.device = torch.device(options["device"])
        self.config = configuration(options["model"])
        self.length = min(options["length"] or self.config.context, self.config.context)
        self.tokens = read_tokens(options["text"], self.config.vocabulary)
        torch.manual_seed(1337)
        model = Transformer(self.config).to(self.device)
        if case["sharded"]:
            self._shard(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.half = case["dtype"] != "float32"
        scales = case["dtype"] == "float16" and case["trains"]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scales)
        self.call = self._compile(model)

    def _shard(self, model: Transformer) -> None:
        import echelon.dist as dist
        from echelon.dist.fsdp import fully_shard

        dist.init()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    def _compile(self, model: Transformer) -> Any:
        case = self.case
        attention = case["attention"]
        if attention.startswith("flex"):
            use_flex()
        how: dict[str, Any] = {"backend": case["backend"], "dynamic": case["dynamic"]}
        if case["mode"]:
            how["mode"] = case["mode"]
        if case["compiled"] == "blocks":
            for block in model.blocks:
                block.compile(**how)
        masked = attention.rpartition(" ")[2] in ("document", "window")
        call: Any = Masked(model, attention) if masked else model
        return torch.compile(call, **how) if case["compiled"] == "whole" else call

    def iterate(self, number: int) -> float:
        """Run one iteration; return the loss."""
        length = self.length
        if self.case["lengths"] == "varied":
            length -= (number * 7) % (length // 2)
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(
            len(self.tokens) - length - 1, (self.options["batch"],), generator=generator
        )
        rows = torch.stack([self.tokens[start : start + length + 1] for start in starts.tolist()])
        rows = rows.to(self.device)
        with self._modes():
            return self._train(rows) if self.case["trains"] else self._evaluate(rows)

    @contextlib.contextmanager
    def _modes(self) -> Any:
        attention = self.case["attention"]
        with contextlib.ExitStack() as stack:
            if attention.isupper():
                from torch.nn.attention import SDPBackend, sdpa_kernel

                stack.enter_context(sdpa_kernel(getattr(SDPBackend, attention)))
            if self.case["autograd"]:
                import torch._dynamo.compiled_autograd as compiled_autograd

                compiler: Any = torch.compile(backend=self.case["backend"])
                stack.enter_context(compiled_autograd._enable(compiler))
            yield

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        dtype = getattr(torch, self.case["dtype"]) if self.half else torch.bfloat16
        with torch.autocast(self.device.type, dtype, enabled=self.half):
            logits = self.call(rows[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def _train(self, rows: torch.Tensor) -> float:
        loss = self._loss(rows)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(loss.detach())

    @torch.no_grad()
    def _evaluate(self, rows: torch.Tensor) -> float:
        return float(self._loss(rows))

    def flops(self) -> float:
        """Return an iteration's floating-point operations; a forward alone counts as a third."""
        tokens = self.options["batch"] * self.length
        return self.config.flops_per_token() * tokens / (1 if self.case["trains"] else 3)


def timed(function: Any) -> tuple[float, float, Any]:
    """Call a function; return the wall seconds, CPU seconds (with children) and the result."""
    wall, cpu = time.perf_counter(), _cpu_s()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, _cpu_s() - cpu, result


def _cpu_s() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best FLOP rate of matrix products: by CPU time on a CPU, by wall time on a GPU.

    The second matrix is used as it is and transposed, as in a linear layer. For a dtype without
    kernels of its own, one of the two may be much slower.
    """
    size = 8192 if device.type == "cuda" else 768
    left, right = torch.ones(2, size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for other in (right, right.T):
        torch.mm(left, other)
        spent_s = 0.0
        while spent_s < _PEAK_S:
            wall, cpu, _ = timed(lambda other=other: torch.mm(left, other))
            best_s = min(best_s, wall if device.type == "cuda" else max(cpu, 1e-9))
            spent_s += wall
    return 2 * size**3 / best_s


def measure(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(options["threads"])
    run = Run(case, options)
    first_wall, first_cpu, _ = timed(lambda: run.iterate(0))
    steps = [timed(lambda at=at: run.iterate(at)) for at in range(1, options["iterations"] + 2)]
    from torch._dynamo.utils import counters

    return {
        "first_s": first_wall,
        "first_cpu_s": first_cpu,
        "wall_s": [step[0] for step in steps[1:]],  # the second iteration may compile again
        "cpu_s": [step[1] for step in steps[1:]],
        "loss": steps[-1][2],
        "graphs": counters["stats"]["unique_graphs"],
        "flops": run.flops(),
        "peak": peak_flops(run.device, getattr(torch, case["dtype"])),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    order = json.loads(sys.argv[1])
    try:
        result = measure(order["case"], order["options"])
    except (RuntimeError, ValueError, NotImplementedError) as err:
        result = {"error": f"{type(err).__name__}: {str(err).strip().splitlines()[0]}"[:300]}
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)  # compile workers and communicators are of no use to anybody now


if __name__ == "__main__":
    main()
