"""Sizes that others have published figures for, so that ours can be laid beside them."""

from __future__ import annotations

from typing import Any

# A model of less than a million parameters, which learns to write code in minutes.
SMALL = {
    "layers": 4, "width": 128, "heads": 4, "context": 128, "vocabulary": 256,
    "steps": 1200, "batch": 16, "lr": 3e-3, "warmup": 50, "eval_every": 400, "eval_windows": 512,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    # 10.65M parameters: nanoGPT's character-level Shakespeare, whose text has 65 characters.
    "shakespeare": SMALL | {
        "layers": 6, "width": 384, "heads": 6, "context": 256, "vocabulary": 65,
        "steps": 5000, "batch": 64, "lr": 1e-3, "warmup": 100, "eval_windows": 128,
    },
    # 124M parameters: the smallest GPT-2, with its vocabulary rounded up to a multiple of 64.
    "gpt2": SMALL | {
        "layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304,
        "steps": 5000, "batch": 8, "lr": 6e-4, "warmup": 200, "eval_windows": 16,
    },
}  # fmt: skip
