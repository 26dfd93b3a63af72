"""Small models in uneven stages, and what one process computes with them in the same order."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, LENGTH = 11, 16, 5


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return self.mix(self.token(tokens) + self.place(torch.arange(tokens.shape[1])))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def make_stage(index, num_stages):
    """Stage i has i % 3 blocks besides what its place asks for: no two neighbors are alike."""
    torch.manual_seed(100 + index)
    layers = [Embed()] if index == 0 else []
    layers += [Block() for _ in range(index % 3)] or [nn.Identity()]
    if index == num_stages - 1:
        layers.append(Head())
    stage = nn.Sequential(*layers)
    if index == num_stages - 1:
        head_name(stage)
    return stage


def token_name(stage):
    return next(name for name, _ in stage.named_parameters() if name.endswith("token.weight"))


def head_name(stage):
    return next(name for name, _ in stage.named_parameters() if name.endswith("out.weight"))


def tie_of(num_stages):
    last = make_stage(num_stages - 1, num_stages)
    first = make_stage(0, num_stages)
    return [f"0:{token_name(first)}", f"{num_stages - 1}:{head_name(last)}"]


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def make_batch(seed, size):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Reference:
    """One process with the whole model, tied copies kept apart until their gradients are added."""

    def __init__(self, num_stages, *, tied):
        self.stages = [make_stage(index, num_stages) for index in range(num_stages)]
        self.tied = tied
        if tied:
            token = dict(self.stages[0].named_parameters())[token_name(self.stages[0])]
            self.last = self.stages[-1]
            self.copies = [token, dict(self.last.named_parameters())[head_name(self.last)]]
            self.copies[1].data.copy_(token.data)

    def parameters(self):
        return [p for stage in self.stages for p in stage.parameters()]

    def train(self, batches, num_microbatches):
        """Accumulate micro-batches of each replica, then the replicas, then the tied copies."""
        sums = None
        losses = []
        for inputs, targets in batches:
            for p in self.parameters():
                p.grad = None
            losses.append(self._accumulate(inputs, targets, num_microbatches))
            grads = [p.grad for p in self.parameters()]
            sums = grads if sums is None else [a + b for a, b in zip(sums, grads, strict=True)]
        for p, total in zip(self.parameters(), sums, strict=True):
            p.grad = total / len(batches)
        if self.tied:
            total = self.copies[0].grad + self.copies[1].grad
            for copy in self.copies:
                copy.grad = total.clone()
        return losses

    def _accumulate(self, inputs, targets, num_microbatches):
        losses = []
        parts = zip(
            inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches),
            strict=True,
        )  # fmt: skip
        for x, y in parts:
            for stage in self.stages:
                x = stage(x)
            loss = loss_fn(x, y)
            (loss / num_microbatches).backward()
            losses.append(loss.detach())
        return losses


def plain_gradients(num_stages, batches, *, tied):
    """Accumulate over whole batches with really shared parameters: what a user would write."""
    whole = Reference(num_stages, tied=tied)
    if tied:
        whole.last[-1].out.weight = whole.copies[0]
    for inputs, targets in batches:
        x = inputs
        for stage in whole.stages:
            x = stage(x)
        (loss_fn(x, targets) / len(batches)).backward()
    return [
        {name: p.grad for name, p in stage.named_parameters(remove_duplicate=False)}
        for stage in whole.stages
    ]
