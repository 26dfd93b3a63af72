"""Generate text with the trained model."""

from __future__ import annotations

import torch

from gpt.model.transformer import GPT
from gpt.text.vocabulary import TokenizerVocabulary, Vocabulary

TEMPERATURE = 0.7  # below 1: more probable, more common words


@torch.no_grad()
def generate(
    model: GPT,
    vocabulary: Vocabulary | TokenizerVocabulary,
    prompt: bytes,
    *,
    num_tokens: int,
    seed: int,
) -> str:
    """Continue `prompt` by `num_tokens` sampled tokens; return printable text."""
    device = model.token.weight.device
    random = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([vocabulary.encode(prompt).tolist()], device=device)
    for _ in range(num_tokens):
        logits = model(text[:, -model.config.context :])[0, -1, : vocabulary.size]
        probabilities = torch.softmax(logits.float() / TEMPERATURE, dim=0)
        drawn = torch.multinomial(probabilities, 1, generator=random)
        text = torch.cat((text, drawn[None]), dim=1)
    return printable(vocabulary.decode(text[0].tolist()))


def printable(text: bytes) -> str:
    """Decode text for a terminal; unprintable characters, except newlines, become U+FFFD."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(char if char.isprintable() or char == "\n" else "\ufffd" for char in decoded)
