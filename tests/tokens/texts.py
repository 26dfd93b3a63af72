"""Small folders of token shards whose every token is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from echelon.tokens import ShardWriter, TokenShards


def write(folder: Path, documents: list[list[int]], **settings) -> TokenShards:
    with ShardWriter(folder, **{"vocabulary_size": 60_000, **settings}) as writer:
        for document in documents:
            writer.add(document)
            writer.end_document()
    return TokenShards(folder)


def counting(folder: Path, num_tokens: int, **settings) -> TokenShards:
    """One document of 0, 1, 2, ...: a window's first token says which window it is."""
    return write(folder, [list(range(num_tokens))], **settings)


def random_documents(seed: int, num: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 40, num)
    return [generator.integers(0, 1000, size).tolist() for size in sizes]
