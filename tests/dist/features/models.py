"""A small language model whose attention is chosen by name, and its two stages."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH, WINDOW = 31, 16, 32, 2, 2, 5


def document_mask(tokens):
    """Token 0 ends a document; a position sees its own document up to itself."""
    documents = (tokens == 0).cumsum(1)
    return lambda b, _, i, j: (documents[b, i] == documents[b, j]) & (i >= j)


def window_mask(tokens):
    return lambda _b, _h, i, j: (i >= j) & (i - j < WINDOW)


MASKS = {"document": document_mask, "window": window_mask}


def dense(mask, tokens):
    """Return the mask as SDPA takes it: bool [B, 1, T, T]."""
    at = torch.arange(tokens.shape[1])
    rows = torch.arange(len(tokens))[:, None, None]
    return mask(rows, 0, at[None, :, None], at[None, None, :]).expand(len(tokens), -1, -1)[:, None]


class Attention(nn.Module):
    """`kind`: "causal", "causal NAME" (SDPA's backend), "MASK" or "flex MASK" (see MASKS)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x, tokens):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, 2)
        )
        y = self.mix(q, k, v, tokens)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def mix(self, q, k, v, tokens):
        first, _, second = self.kind.partition(" ")
        if first == "causal":
            kernel = (
                sdpa_kernel(getattr(SDPBackend, second)) if second else contextlib.nullcontext()
            )
            with kernel:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if first == "flex":
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention

            size = (len(tokens), None, *2 * [tokens.shape[1]])
            mask = create_block_mask(MASKS[second](tokens), *size, device=tokens.device)
            return flex_attention(q, k, v, block_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, dense(MASKS[first](tokens), tokens))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(kind)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x, tokens):
        x = x + self.attention(self.norm1(x), tokens)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Stages 0 and 1 are the first and the last half; None: the whole."""

    def __init__(self, kind: str = "causal", stage: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        token, position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        blocks = [Block(kind) for _ in range(DEPTH)]
        norm, head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.is_first, self.is_last = stage != 1, stage != 0
        if self.is_first:
            self.token, self.position = token, position
        half = DEPTH // 2
        kept = range(DEPTH) if stage is None else range(stage * half, DEPTH if stage else half)
        self.blocks = nn.ModuleDict({str(number): blocks[number] for number in kept})
        if self.is_last:
            self.norm, self.head = norm, head

    def forward(self, tokens, x=None):
        """Return logits at the last stage, else (tokens, activations)."""
        if self.is_first:
            x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks.values():
            x = block(x, tokens)
        return self.head(self.norm(x)) if self.is_last else (tokens, x)


def batch(index: int, size: int = 2, length: int = CONTEXT):
    """Return inputs and targets of micro-batch `index`."""
    generator = torch.Generator().manual_seed(300 + index)
    ids = torch.randint(0, VOCABULARY, (size, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_fn(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def sgd(model):
    """Rounding stays small; Adam would divide tiny gradients by as tiny a norm."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_alone(model, batches_by_step, size: int, make_optimizer=sgd):
    """Train in one process as `size` ranks would; `batches_by_step[step][rank]` are batches."""
    optimizer = make_optimizer(model)
    for batches in batches_by_step:
        total: dict[str, torch.Tensor] = {}
        for ids, targets in batches:
            optimizer.zero_grad()
            loss_fn(model(ids), targets).backward()
            for name, parameter in model.named_parameters():
                total[name] = total[name] + parameter.grad if name in total else parameter.grad
        for name, parameter in model.named_parameters():
            parameter.grad = total[name] / size
        optimizer.step()
    return state_of(model)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def distance(state, expected) -> float:
    """Return the greatest difference of two states, whose names may have torch.compile's prefix."""
    plain = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    assert plain.keys() == expected.keys()
    return max(float((plain[name] - expected[name]).abs().max()) for name in expected)
