"""Every public name has an Example, and every Example does what it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.ranks import run_ranks
from tools.docs import examples

# Examples that cannot run here, each with the reason.
NOT_RUN = {
    "echelon.train.figures.TensorBoardWriter": "needs tensorboard",
    "echelon.train.figures.WandbWriter": "needs wandb",
}
FOUND = list(examples.examples())


def test_every_public_name_has_an_example():
    assert [example.name for example in FOUND if not example.text] == []
    assert set(NOT_RUN) <= {example.name for example in FOUND}


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", sorted({example.num_ranks for example in FOUND}))
def test_every_example_does_what_it_shows(tmp_path: Path, num_ranks: int):
    told = run_ranks(_run_all, num_ranks, tmp_path, timeout_s=300.0)
    assert "\n".join(sorted({line for one in told for line in one})) == ""


def test_an_example_that_prints_something_else_is_told():
    wrong = examples.Example("echelon.dist.init", ">>> 1 + 1\n3\n")
    assert "Expected:\n    3\nGot:\n    2" in examples.run(wrong, {})
    assert "no line" in examples.run(examples.Example("echelon.dist.init", "dist.init()\n"), {})


def test_the_section_ends_where_the_next_one_begins():
    docstring = "Do it.\n\nExample:\n    >>> 1\n    1\n\n    >>> 2\n    2\n\nRaises:\n    E: x\n"
    assert examples.section(docstring) == ">>> 1\n1\n\n>>> 2\n2\n"
    assert examples.section("Do it.") == ""


def _run_all(_rank: int, num_ranks: int, folder: Path) -> list[str]:
    from tests.docs.stage import Stage

    told = []
    for example in FOUND:
        if example.num_ranks != num_ranks or example.name in NOT_RUN:
            continue
        own = folder / example.name
        own.mkdir(exist_ok=True)
        os.chdir(own)
        stage = Stage(example.module, example.text)
        try:
            told.append(examples.run(example, stage.names))
        finally:
            stage.close()
    return [one for one in told if one]
