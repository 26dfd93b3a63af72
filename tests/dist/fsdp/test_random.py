"""Random small models and settings train sharded as they do in one process."""

from __future__ import annotations

import traceback

import pytest

torch = pytest.importorskip("torch")

import echelon.dist as dist  # noqa: E402
from tests.dist.fsdp import models  # noqa: E402
from tests.dist.fsdp.random_programs import Program  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks


def _compare(rank, size, seeds, num_steps):
    models.join()
    failures = []
    for seed in seeds:
        program = Program(seed, size, num_steps)
        try:
            state, expected = program.train(rank), program.train_alone()
        except Exception:  # noqa: BLE001 -- said with the program that raised it
            failures.append(f"{program}\n{traceback.format_exc()}")
            break  # ranks may be out of step now
        off = {
            name: float((state[name] - value).abs().max())
            for name, value in expected.items()
            if not torch.allclose(state[name], value, rtol=0, atol=program.tolerance)
        }
        if off:
            failures.append(f"{program}\n{off}")
    dist.shutdown()
    return failures


def test_eight_random_programs_equal_one_process():
    for failures in run_ranks(_compare, 2, range(8), 10, timeout_s=600):
        assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "size"), [(0, 2), (50, 2), (100, 4), (150, 3)])
def test_two_hundred_random_programs_equal_one_process(first, size):
    for failures in run_ranks(_compare, size, range(first, first + 50), 30, timeout_s=6000):
        assert not failures, "\n".join(failures)
