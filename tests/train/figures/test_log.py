"""FigureLog: the figures of a step, from a clock that the test sets."""

from __future__ import annotations

import json
import math
import time

import pytest

from echelon.recorder.spent import spent
from echelon.train.figures import FigureLog, read_figures
from echelon.train.figures import file as file_module
from tests.support.ranks import run_ranks


class Clock:
    def __init__(self):
        self.time_s = 100.0

    def __call__(self):
        return self.time_s


class Collected:
    """A writer that keeps what it gets, and fails at one step."""

    def __init__(self, fails_at=None):
        self.got = []
        self.fails_at = fails_at
        self.is_closed = False

    def write(self, step, figures):
        if step == self.fails_at:
            raise RuntimeError("no connection")
        self.got.append((step, dict(figures)))

    def close(self):
        self.is_closed = True


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(spent, "spans_ns", {})
    monkeypatch.setattr(spent, "collectives_s", 0.0)
    return Clock()


def test_a_step_has_all_its_figures(tmp_path, clock):
    path = tmp_path / "figures.jsonl"
    with FigureLog(
        path, tokens_per_step=1000, flops_per_token=6e6, peak_flops=1e11, now=clock
    ) as log:
        clock.time_s += 0.5
        spent.spans_ns["data_wait"] = 50_000_000
        spent.collectives_s = 0.1
        log.step(1, 1 / 3, gradient_norm=0.25, learning_rate=1e-3, loss_scale=1024.0)
        log.note(1, validation_loss=3.5)
    figures, note = read_figures(path)
    assert abs(figures.pop("time") - time.time()) < 60
    assert figures.pop("peak_memory_bytes") > 1 << 20
    assert figures == {
        "step": 1, "loss": 1 / 3, "gradient_norm": 0.25, "learning_rate": 1e-3, "loss_scale": 1024,
        "iteration_s": 0.5, "tokens_per_s": 2000, "mfu": 0.12,
        "data_wait": 0.1, "exposed_communication": 0.2,
    }  # fmt: skip
    assert (note["step"], note["validation_loss"]) == (1, 3.5)


def test_a_pause_is_in_no_figure(tmp_path, clock):
    with FigureLog(tmp_path / "log", tokens_per_step=10, now=clock) as log:
        clock.time_s += 1.0
        with log.pause():
            clock.time_s += 60.0
            spent.collectives_s += 30.0
        clock.time_s += 1.0
        log.step(1, 2.0)
        clock.time_s += 60.0
        log.forget_pause()
        clock.time_s += 4.0
        log.step(2, 2.0)
    one, two = read_figures(tmp_path / "log")
    assert (one["iteration_s"], one["exposed_communication"]) == (2.0, 0)
    assert (two["iteration_s"], two["tokens_per_s"]) == (4.0, 2.5)


def test_a_call_for_several_steps_logs_their_mean(tmp_path, clock):
    with FigureLog(tmp_path / "log", tokens_per_step=10, first_step=30, now=clock) as log:
        clock.time_s += 5.0
        log.step(40, 2.0)
    (figures,) = read_figures(tmp_path / "log")
    assert (figures["iteration_s"], figures["tokens_per_s"]) == (0.5, 20)


def test_a_loss_that_is_not_finite_is_null_in_strict_json(tmp_path, clock):
    collected = Collected()
    with FigureLog(tmp_path / "log", writers=[collected], now=clock) as log:
        log.step(1, math.nan, gradient_norm=math.inf)
    (line,) = (tmp_path / "log").read_text().splitlines()
    figures = json.loads(line, parse_constant=pytest.fail)
    assert figures["loss"] is None
    assert figures["gradient_norm"] is None
    assert figures["not_finite"] == ["loss", "gradient_norm"]
    assert "loss" not in collected.got[0][1]


def test_a_run_that_goes_back_replaces_what_it_logged(tmp_path, clock):
    with FigureLog(tmp_path / "log", now=clock) as log:
        for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0), (3, 5.0)):
            log.step(step, loss)
    assert [f["loss"] for f in read_figures(tmp_path / "log")] == [9.0, 6.0, 5.0]


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, clock, monkeypatch, capfd):
    collected = Collected()
    with FigureLog(tmp_path / "log", writers=[collected], now=clock) as log:
        log.step(1, 2.0)
        with monkeypatch.context() as context:
            context.setattr(file_module.os, "write", _full)
            log.step(2, 2.0)
            log.step(3, 2.0)
        log.step(4, 2.0)
    assert [f["step"] for f in read_figures(tmp_path / "log")] == [1, 4]
    assert [step for step, _ in collected.got] == [1, 2, 3, 4]
    assert collected.is_closed
    (line,) = capfd.readouterr().err.splitlines()
    assert "No space left" in line
    assert "training continues" in line


def _full(*_):
    raise OSError(28, "No space left on device")


def test_a_path_that_cannot_be_opened_is_said_once_and_ends_nothing(tmp_path, clock, capfd):
    with FigureLog(tmp_path, now=clock) as log:  # a folder
        log.step(1, 2.0)
    (line,) = capfd.readouterr().err.splitlines()
    assert str(tmp_path) in line


def test_a_writer_that_fails_is_dropped_and_the_others_go_on(tmp_path, clock, capfd):
    weak, strong = Collected(fails_at=2), Collected()
    with FigureLog(tmp_path / "log", writers=[weak, strong], now=clock) as log:
        for step in (1, 2, 3):
            log.step(step, 2.0)
    assert [step for step, _ in weak.got] == [1]
    assert [step for step, _ in strong.got] == [1, 2, 3]
    assert capfd.readouterr().err.count("no connection") == 1


def test_no_path_writes_no_file(tmp_path, clock, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with FigureLog(None, now=clock) as log:
        log.step(1, 2.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tokens_per_step", "flops_per_token", "peak_flops", "first_step"])
@pytest.mark.parametrize("number", [-1, math.nan])
def test_negative_numbers_are_refused(name, number):
    with pytest.raises(ValueError, match="must be finite and >= 0"):
        FigureLog(None, **{name: number})


def _steps_of_ranks(rank, world_size, folder):
    from echelon import dist

    world = dist.init()
    clock = Clock()
    with FigureLog(f"{folder}/log_{rank}", group=world, now=clock) as log:
        clock.time_s += 2.0
        spent.spans_ns["data_wait"] = int(1e9) if rank == 1 else 0  # the others wait for rank 1
        spent.collectives_s += 0.0 if rank == 1 else 1.0
        log.step(1, 2.0)
    dist.shutdown()


@pytest.mark.ranks
def test_ranks_compare_their_waits_and_rank_0_writes(tmp_path):
    run_ranks(_steps_of_ranks, 3, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["log_0"]
    (figures,) = read_figures(tmp_path / "log_0")
    assert figures["iteration_s"] == 2.0
    assert figures["data_wait"] == pytest.approx(1 / 6, abs=1e-5)
    assert (figures["data_wait_max"], figures["data_wait_max_rank"]) == (0.5, 1)
    assert figures["exposed_communication"] == pytest.approx(1 / 3, abs=0.1)
    assert figures["exposed_communication_min_rank"] == 1


def _waits_for_a_late_rank(rank, world_size):
    import numpy as np

    from echelon import dist

    world = dist.init()
    x = np.ones(4)
    longest_s = {True: 0.0, False: 0.0}
    for is_async in (True, False) * 4:
        world.barrier()
        if rank == 1:
            time.sleep(0.05)
        began_s, before_s = time.monotonic(), spent.collectives_s
        if is_async:
            world.all_reduce(x, async_op=True).wait()
        else:
            world.all_reduce(x)
        waited_s = spent.collectives_s - before_s
        assert 0 <= waited_s <= time.monotonic() - began_s + 1e-6
        longest_s[is_async] = max(longest_s[is_async], waited_s)
    dist.shutdown()
    return longest_s


@pytest.mark.ranks
def test_a_wait_for_a_late_rank_is_exposed_communication():
    # Of four tries: a busy machine may make the other rank late as well.
    on_time, _ = run_ranks(_waits_for_a_late_rank, 2)
    assert min(on_time.values()) > 0.02
