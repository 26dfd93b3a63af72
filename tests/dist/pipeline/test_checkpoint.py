"""Checkpoints of pipelines: by the whole model's names, so any other division can load them."""

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import echelon.dist as dist  # noqa: E402
from echelon.dist.checkpoint import __main__ as command  # noqa: E402
from echelon.dist.checkpoint import load, save  # noqa: E402
from echelon.dist.pipeline import Pipeline, Stage, schedule, split  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks
WIDTH = 6


def make_model():
    """Layers of one shape, some of them with a buffer: only their names tell them apart."""
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    layers[2].append(nn.BatchNorm1d(WIDTH))
    return nn.Sequential(*layers)


def loss_fn(output, targets):
    return nn.functional.mse_loss(output, targets)


def make_pipe(name, model=None):
    plan = schedule(name, 2, 4)
    parts = split(model or make_model(), plan.num_stages)
    stages = [
        Stage(parts[index], index=index, num_stages=plan.num_stages)
        for index in plan.stages_of(dist.world().rank)
    ]
    pipe = Pipeline(stages, schedule=plan, loss_fn=loss_fn)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.05)


def train(pipe, optimizer):
    torch.manual_seed(5)
    for _ in range(2):
        pipe.step(torch.randn(8, WIDTH), torch.randn(8, WIDTH))
        optimizer.step()
        optimizer.zero_grad()


def content(module, optimizer):
    """Return all parameters, buffers and optimizer state by the whole model's names."""
    found = {name: value.clone().numpy() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = value.clone().numpy()
    return found


def is_equal(one, other):
    return one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


def _save_and_divide_again(rank, world_size, folder):
    torch.set_num_threads(1)
    dist.init()
    pipe, optimizer = make_pipe("interleaved_1f1b")
    train(pipe, optimizer)
    save(folder, {"model": pipe, "optimizer": optimizer})
    saved = content(pipe.module, optimizer)
    other = nn.Sequential(*[copy.deepcopy(layer) for layer in make_model()])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    pipe, optimizer = make_pipe("1f1b", other)
    load(folder, {"model": pipe, "optimizer": optimizer})
    loaded = content(pipe.module, optimizer)
    train(pipe, optimizer)  # and training goes on
    dist.shutdown()
    return saved, loaded


def test_four_stages_load_into_two_and_into_one_process(tmp_path, capsys):
    ranks = run_ranks(_save_and_divide_again, 2, str(tmp_path))
    saved = {**ranks[0][0], **ranks[1][0]}
    assert is_equal(saved, {**ranks[0][1], **ranks[1][1]})
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(model.parameters())
    load(tmp_path, {"model": model, "optimizer": optimizer})
    assert is_equal(saved, content(model, optimizer))
    assert command.main(["show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\n    3.0.weight: float32[6, 6]\n" in shown
    assert [name for name, _ in model.named_parameters() if f" {name}: float32" not in shown] == []


class Tied(nn.Module):
    """A whole model whose first and last layer share a weight, in the names of `parts`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
        self.layers[2].weight = self.layers[0].weight


def _load_tied(rank, world_size, folder):
    """What one process saved with a shared weight goes to both copies, and back."""
    dist.init()
    torch.manual_seed(7)
    layers = {f"layers.{n}": nn.Linear(WIDTH, WIDTH, bias=False) for n in range(3)}
    module = split(layers, 2, costs=[1, 1, 3])[rank]
    stage = Stage(module, index=rank, num_stages=2)
    pipe = Pipeline(
        [stage], num_microbatches=2, loss_fn=loss_fn,
        ties=[["0:layers.0.weight", "1:layers.2.weight"]],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.parameters())
    load(Path(folder, "whole"), {"model": pipe, "optimizer": optimizer})
    loaded = content(pipe.module, optimizer)
    train(pipe, optimizer)
    save(Path(folder, "stages"), {"model": pipe, "optimizer": optimizer})
    trained = content(pipe.module, optimizer)
    dist.shutdown()
    return loaded, trained


def test_a_tied_weight_loads_into_its_copies_and_back(tmp_path):
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.layers(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    save(tmp_path / "whole", {"model": model, "optimizer": optimizer})
    wanted = content(model, optimizer)
    wanted |= {key.replace("layers.0", "layers.2"): wanted[key] for key in wanted if ".0." in key}
    ranks = run_ranks(_load_tied, 2, str(tmp_path))
    assert is_equal(wanted, {**ranks[0][0], **ranks[1][0]})
    load(tmp_path / "stages", {"model": model, "optimizer": optimizer})
    trained = {**ranks[0][1], **ranks[1][1]}
    for name, value in content(model, optimizer).items():
        assert (trained[name] == value).all()


def _save_twins(rank, world_size, folder):
    """Stages that both call their layer `0`, as a list without the model's names would give."""
    dist.init()
    torch.manual_seed(rank)
    stage = Stage(nn.Sequential(nn.Linear(2, 2)), index=rank, num_stages=2)
    pipe = Pipeline([stage], num_microbatches=1, loss_fn=loss_fn)
    with pytest.raises(ValueError, match=r"model/0.weight .* ranks 0 and 1"):
        save(folder, {"model": pipe})
    renamed = Stage(stage.module, index=rank, num_stages=2, prefix=f"part{rank}.")
    pipe = Pipeline([renamed], num_microbatches=1, loss_fn=loss_fn)
    save(folder, {"model": pipe})
    plan = schedule("interleaved_1f1b", 2, 2)
    both = [Stage(nn.Linear(2, 2), index=n, num_stages=4) for n in plan.stages_of(rank)]
    with pytest.raises(
        ValueError, match=r"both have a parameter or buffer named 'weight': make stages with split"
    ):
        save(folder, {"model": Pipeline(both, schedule=plan, loss_fn=loss_fn)})
    dist.shutdown()


def test_stages_of_one_name_are_refused(tmp_path):
    run_ranks(_save_twins, 2, str(tmp_path))
    model = nn.ModuleDict({f"part{n}": nn.Sequential(nn.Linear(2, 2)) for n in range(2)})
    load(tmp_path, {"model": model})
    for number in range(2):
        torch.manual_seed(number)
        assert torch.equal(model[f"part{number}"][0].weight, nn.Linear(2, 2).weight)


def test_split_keeps_the_models_names():
    model = make_model()
    stages = split(model, 3)
    assert [n for stage in stages for n, _ in stage.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    named = {"wte": nn.Embedding(3, 4), "h.0": nn.Linear(4, 4), "h.1.mlp": nn.Linear(4, 4)}
    first, last = split(named, 2, costs=[1, 1, 2])
    assert [name for name, _ in first.named_parameters()] == [
        "wte.weight",
        "h.0.weight",
        "h.0.bias",
    ]
    assert [name for name, _ in last.named_parameters()] == ["h.1.mlp.weight", "h.1.mlp.bias"]
    assert len(first) == 2
    ids = torch.tensor([0, 2])
    whole = named["h.1.mlp"](named["h.0"](named["wte"](ids)))
    assert torch.equal(last(first(ids)), whole)
    twice = nn.Linear(2, 2)
    assert [len(part) for part in split(nn.Sequential(twice, twice), 2)] == [1, 1]
