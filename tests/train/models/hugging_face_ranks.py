"""What a rank does in the tests of folders of `transformers`; it does not load that package."""

import dataclasses

import torch

import echelon.dist as dist
from echelon.dist.fsdp import fully_shard
from echelon.dist.mesh import DeviceMesh
from echelon.dist.parallel import parallelize
from echelon.train.models import Transformer, make_stage
from echelon.train.models.hugging_face import load_weights, read_config, save_pretrained


def from_folder_to_shards(rank, size, folder, target, tokens):
    """Fill shards from a folder, train some steps, write them to another; return loss and logits.

    Args:
        tokens: as many rows as ranks.
    """
    dist.init(backend="shm")
    with torch.device("meta"):
        model = Transformer(read_config(folder))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    load_weights(folder, model)
    tokens = torch.tensor(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        own = tokens[rank : rank + 1]
        logits = model(own[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    save_pretrained(model, target, max_piece_bytes=60_000)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).tolist()
    dist.shutdown()
    return losses, logits


def from_stages_to_folder(rank, size, folder, target):
    """Fill stages from a folder, write them to another; return how another model is refused."""
    dist.init(backend="shm")
    config = read_config(folder)
    stage = make_stage(Transformer(config), rank, size)
    load_weights(folder, stage)
    save_pretrained(stage, target)
    other = Transformer(dataclasses.replace(config, heads=8, kv_heads=8, head_width=4))
    try:
        load_weights(folder, make_stage(other, rank, size))
    except ValueError as error:
        reason = str(error)
    dist.shutdown()
    return reason


def from_folder_through_layout(rank, size, folder, target, sizes, axes, tokens):
    """Divide a model as a mesh says, fill it from a folder, evaluate it, write it to another.

    Returns:
        This rank's term of the mean loss.
    """
    dist.init(backend="shm")
    mesh = DeviceMesh(sizes, axes)
    torch.manual_seed(99)  # not what is loaded
    model = Transformer(read_config(folder))
    parallel = parallelize(model, mesh, loss_fn=_loss)
    load_weights(folder, parallel.model)
    tokens = torch.tensor(tokens)
    loss = float(parallel.evaluate(tokens[:, :-1], tokens[:, 1:]))
    save_pretrained(parallel.model, target, max_piece_bytes=30_000)
    dist.shutdown()
    return loss


def _loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
