"""Model sizes with published results, for comparison.

The defaults of `settings.py` give a model of less than a million parameters, which learns to write
code in minutes.
"""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "small": {},
    # 10.65M parameters: nanoGPT's character-level Shakespeare, whose text has 65 characters.
    "shakespeare": {
        "model": {"layers": 6, "width": 384, "heads": 6, "context": 256, "vocabulary": 65},
        "training": {"steps": 5000, "batch": 64, "lr": 1e-3, "warmup": 100},
        "report": {"eval_windows": 128},
    },
    # 124M parameters: the smallest GPT-2, with its vocabulary rounded up to a multiple of 64.
    "gpt2": {
        "model": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50304},
        "training": {"steps": 5000, "batch": 8, "lr": 6e-4, "warmup": 200},
        "report": {"eval_windows": 16},
    },
}
