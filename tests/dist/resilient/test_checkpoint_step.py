"""The step that `from_checkpoint` returns, which must be one of this run."""

from __future__ import annotations

import pytest

from echelon.dist.resilient.training.copied import checkpoint_step


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_a_step_up_to_the_end_of_the_newest_one_is_taken(step):
    assert checkpoint_step([step, step], newest=3) == step


@pytest.mark.parametrize("step", [-1, 5, 100])
def test_a_checkpoint_of_another_run_is_refused(step):
    text = f"not belong to this run: the checkpoint is at step {step}, but the run is at step 3"
    with pytest.raises(ValueError, match=text):
        checkpoint_step([step, step], newest=3)


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (2.0, "float"), (True, "bool")])
def test_what_is_not_a_step_is_refused(value, kind):
    with pytest.raises(ValueError, match=f"must return a step number, not {kind}"):
        checkpoint_step([value, value], newest=3)


def test_different_steps_are_refused():
    with pytest.raises(ValueError, match=r"a different step on some ranks: \[2, 3\]"):
        checkpoint_step([2, 3], newest=3)
