"""Packed documents: a row of several is computed as each of them alone."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from echelon.tokens import Source, TokenLoader  # noqa: E402
from echelon.train.models import Transformer, gpt2, llama  # noqa: E402
from tests.tokens.texts import random_documents, write  # noqa: E402


@pytest.mark.parametrize("shape", [gpt2, llama])
def test_a_packed_document_is_computed_as_if_it_were_alone(tmp_path, shape):
    source = Source("text", write(tmp_path / "text", random_documents(7, 40)))
    with TokenLoader([source], context=16, batch=4, pack_documents=True) as loader:
        batch = next(loader)
    torch.manual_seed(3)
    sizes = {"layers": 2, "width": 16, "heads": 2, "context": 16, "vocabulary": 1000}
    if shape is llama:
        sizes |= {"kv_heads": 1, "hidden": 32}
    model = Transformer(shape(**sizes)).double()
    tokens, documents = torch.from_numpy(batch.tokens), torch.from_numpy(batch.documents)
    logits = model(tokens, documents)
    assert (documents[:, -1] > 1).any()  # several in a row
    for row in range(len(tokens)):
        for number in documents[row].unique():
            here = documents[row] == number
            torch.testing.assert_close(logits[row][here], model(tokens[row][here][None])[0])
