"""What the docstrings' Examples find in place: the names that a reader would have of his own.

An Example is read beside a reader's program, so it uses a `model` or a `world` without making one.
Here they are small and real. Each is made only for the Examples that use it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import echelon.dist as dist
from echelon import recorder
from echelon.store import StoreServer
from echelon.tokens import ShardWriter, Source, TokenLoader, TokenShards
from echelon.train.models import Transformer, llama
from tests.analysis.imagined_job import Job
from tools import public_api

_IMPORTED = {
    "Path": Path,
    "contextlib": contextlib,
    "dist": dist,
    "itertools": itertools,
    "math": math,
    "nn": nn,
    "np": np,
    "recorder": recorder,
    "torch": torch,
    "warnings": warnings,
}
_WIDTH, _CONTEXT, _VOCABULARY = 16, 8, 64


class Stage:
    """The names that one Example is run with, and what is to be released after it."""

    def __init__(self, module: str, text: str) -> None:
        self._text = text
        self._leave = contextlib.ExitStack()
        self.names: dict[str, Any] = {}
        for path in (*public_api.MODULES, module):
            found = importlib.import_module(path)
            self.names |= {name: getattr(found, name) for name in public_api.public_names(found)}
        self.names |= _IMPORTED
        if "dist.init(" not in text:
            self.names["world"] = dist.init(timeout_s=60.0)
        self._leave.callback(dist.shutdown)
        torch.manual_seed(0)
        for name, make in _MADE.items():
            if self._uses(name):
                self.names[name] = make(self)

    def close(self) -> None:
        """Leave the world and release what the Example was given."""
        self._leave.close()

    def serve(self) -> StoreServer:
        """Return a store's server that ends with the Example."""
        server = StoreServer("127.0.0.1")
        server.start()
        self._leave.callback(server.close)
        return server

    def load_tokens(self) -> TokenLoader:
        """Return a loader that ends with the Example."""
        source = Source("web", TokenShards(_write_tokens("web")))
        loader = TokenLoader([source], context=16, batch=4)
        self._leave.callback(loader.close)
        return loader

    def _uses(self, name: str) -> bool:
        return re.search(rf"(?<![\w.]){name}\b|\"{name}\"", self._text) is not None


def _model(_: Stage) -> nn.Module:
    return Transformer(
        llama(
            "20m",
            layers=2,
            width=_WIDTH,
            heads=2,
            kv_heads=2,
            head_width=_WIDTH // 2,
            hidden=32,
            context=_CONTEXT,
            vocabulary=_VOCABULARY,
            tied=False,
        )
    )


def _optimizer(stage: Stage) -> torch.optim.Optimizer:
    return torch.optim.AdamW(stage.names.setdefault("model", _model(stage)).parameters())


def _tokens(_: Stage) -> torch.Tensor:
    return torch.randint(_VOCABULARY, (2, _CONTEXT))


def _loss_fn(_: Stage) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda logits, targets: nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten()
    )


def _incident(_: Stage) -> str:
    job = Job(2)
    for rank in (0, 1):
        job[rank].all_reduce()
    job[0].all_reduce(inside=True)
    job[1].stands()
    job.write(Path("incident_0"))
    return "incident_0"


def _write_tokens(name: str) -> Path:
    folder = Path(name)
    if not folder.exists():
        with ShardWriter(folder, vocabulary_size=257, end_of_document=256) as writer:
            for number in range(20):
                writer.add([number] * 30)
                writer.end_document()
    return folder


_MADE: dict[str, Callable[[Stage], Any]] = {
    "model": _model,
    "optimizer": _optimizer,
    "tokens": _tokens,
    "targets": _tokens,
    "loss_fn": _loss_fn,
    "incident": _incident,
    "server": Stage.serve,
    "loader": Stage.load_tokens,
    "web": lambda _: _write_tokens("web"),
    "code": lambda _: _write_tokens("code"),
}
