"""The progress line, on a clock of our own."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
import torch
from gpt import settings
from gpt.output import writers
from gpt.output.peak import Peak, find_peak
from gpt.output.progress import ERASE_LINE, Progress, Scale, live_columns, with_unit
from gpt.output.report import Report

from tests.examples.runs import read_log

SCALE = Scale(num_steps=200, tokens_per_step=1000, flops_per_token=2_000_000)
ESCAPE = re.compile(r"\x1b\[[0-9;]*[mK]")


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def run_steps(progress: Progress, clock: Clock, *, num_steps: int, step_s: float) -> None:
    for step in range(progress.step + 1, progress.step + num_steps + 1):
        clock.seconds += step_s
        progress.update(step, 2.5)


def make_progress(**options) -> tuple[Progress, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return Progress(SCALE, stream=stream, now=clock, **options), clock, stream


def test_a_log_gets_a_line_every_twentieth_of_the_run():
    progress, clock, stream = make_progress()
    run_steps(progress, clock, num_steps=200, step_s=0.5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[0] == (
        "step  10/200  loss 2.50000  500 ms  2.00 ktokens/s  4.00 GFLOP/s  ETA 1:35"
    )
    assert lines[-1].startswith("step 200/200")
    assert "\x1b" not in stream.getvalue()


def test_a_resumed_run_counts_from_where_it_was():
    progress, clock, stream = make_progress(first_step=190)
    run_steps(progress, clock, num_steps=10, step_s=0.5)
    assert len(stream.getvalue().splitlines()) == 1
    assert progress.summary().startswith(
        "10 steps in 5.0 s: 500 ms per iteration, 2.00 ktokens/s, 4.00 GFLOP/s ("
    )


def test_a_terminal_gets_at_most_five_live_lines_a_second():
    progress, clock, stream = make_progress(columns=100)
    run_steps(progress, clock, num_steps=190, step_s=0.01)
    live = stream.getvalue().count("\r")
    assert 5 <= live <= 10
    assert stream.getvalue().count("\n") == 4


@pytest.mark.parametrize("columns", [1, 2, 10, 40, 80, 200])
def test_a_live_line_is_one_row_that_fits(columns):
    progress, clock, stream = make_progress(columns=columns)
    run_steps(progress, clock, num_steps=1, step_s=1.0)
    text = stream.getvalue()
    assert text.endswith("\r")
    row = ESCAPE.sub("", text).removesuffix("\r")
    assert "\n" not in row
    assert len(row) < columns


@pytest.mark.parametrize("columns", [80, 120])
def test_a_live_line_shows_all_figures(columns):
    progress, clock, stream = make_progress(columns=columns)
    run_steps(progress, clock, num_steps=1, step_s=1.0)
    row = ESCAPE.sub("", stream.getvalue())
    for figure in ("step   1/200", "━", "loss 2.5", "ktokens/s", "GFLOP/s", "ETA 3:19"):
        assert figure in row


def test_pauses_do_not_count_as_training():
    progress, clock, _ = make_progress()
    run_steps(progress, clock, num_steps=5, step_s=0.5)
    clock.seconds += 100
    progress.forget_pause()
    run_steps(progress, clock, num_steps=5, step_s=0.5)
    assert progress.training_s == pytest.approx(5.0)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_of_our_own_is_erased_before_each_line():
    clock, stream = Clock(), Terminal()
    progress = Progress(SCALE, stream=stream, now=clock, columns=100)
    run_steps(progress, clock, num_steps=40, step_s=1.0)
    pieces = re.split(r"[\r\n]", stream.getvalue().removesuffix("\n"))
    assert len(pieces) == 40
    assert all(piece.startswith(ERASE_LINE) for piece in pieces)


def test_no_live_line_is_left_after_the_last_step():
    progress, clock, stream = make_progress(columns=100)
    run_steps(progress, clock, num_steps=200, step_s=1.0)
    assert stream.getvalue().endswith(f"\n{ERASE_LINE}\r")


def test_the_launcher_says_how_wide_its_terminal_is(monkeypatch):
    """The rank that it writes before each line takes some of that width."""
    monkeypatch.setenv("ECHELON_TERMINAL_COLUMNS", "97")
    assert live_columns(io.StringIO()) == 93
    for nothing in ("", "0", "4", "wide", "-3"):
        monkeypatch.setenv("ECHELON_TERMINAL_COLUMNS", nothing)
        assert live_columns(io.StringIO()) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.50 x"), (12, "12.0 x"), (999.6, "1000 x"), (1234, "1.23 kx"), (7e10, "70.0 Gx")],
)
def test_numbers_keep_three_digits(value, text):
    assert with_unit(value, "x") == text


def test_the_log_has_one_line_per_step_and_which_samples_it_took(tmp_path, make_trainer):
    log, losses = tmp_path / "log", []
    trainer = make_trainer()
    for first_step in (0, 2):  # as if it was stopped after two steps
        report = Report(SCALE, first_step=first_step, log=log)
        for _ in range(2):
            losses.append(trainer.train_step())
            report.step(trainer, losses[-1])
        report.note(trainer.step, validation_loss=1.0)
        report.close()
    lines = read_log(log)
    steps = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in steps] == losses
    assert [line["first_sample"] for line in steps] == [0, 4, 8, 12]
    assert {line["num_samples"] for line in steps} == {4}
    assert all(line["gradient_norm"] > 0 < line["learning_rate"] for line in steps)
    assert len(lines) == 6


def test_utilization_is_a_share_of_a_peak_that_says_where_it_is_from():
    clock, stream = Clock(), io.StringIO()
    scale = dataclasses.replace(SCALE, peak=Peak(16e9, "stated"))
    progress = Progress(scale, stream=stream, now=clock)
    run_steps(progress, clock, num_steps=10, step_s=0.5)  # 4 GFLOP/s
    assert "  MFU 25.0%  " in stream.getvalue()
    assert progress.summary().endswith(
        "MFU 25.0% of 16.0 GFLOP/s, all ranks' peak together (stated)"
    )


class Together:
    """Two ranks; the other one's processor is as fast."""

    size = 2

    def barrier(self) -> None: ...

    def all_reduce(self, x, op) -> None:
        assert op == "sum"
        x.mul_(2)


def test_the_peak_is_stated_for_each_rank_or_measured_on_all():
    device = torch.device("cpu")
    assert find_peak(3.5, Together(), device, torch.float32) == Peak(7e12, "stated")
    measured = find_peak(None, Together(), device, torch.float32)
    assert measured.origin == "measured"
    assert 1e8 < measured.flops_per_s < 1e14


class Kept:
    """A receiver of figures that keeps them."""

    def __init__(self):
        self.found, self.is_closed = {}, False

    def write(self, step, figures):
        self.found[step] = figures

    def close(self):
        self.is_closed = True


def test_other_receivers_get_the_figures_with_and_without_a_log(tmp_path, make_trainer):
    for log in (None, tmp_path / "log"):
        kept, trainer = Kept(), make_trainer()
        report = Report(SCALE, log=log, writers=[kept])
        losses = []
        for _ in range(2):
            losses.append(trainer.train_step())
            report.step(trainer, losses[-1])
        report.close()
        assert [kept.found[step]["loss"] for step in (1, 2)] == losses
        assert kept.is_closed


@pytest.mark.parametrize("library", ["tensorboard", "wandb"])
def test_a_receiver_that_is_not_installed_is_said_before_training(library, monkeypatch):
    monkeypatch.setattr(writers, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=rf"--{library} needs {library}: pip install 'echelon"):
        writers.require_installed(settings.Report(**{library: "x"}))
    writers.require_installed(settings.Report())
