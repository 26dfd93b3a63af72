"""Writers of other libraries: with the library where it is installed, and without."""

from __future__ import annotations

import sys

import pytest

from echelon.train.figures import FigureLog, TensorBoardWriter, WandbWriter


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'echelon\[figures\]'"):
        TensorBoardWriter("board")
    with pytest.raises(ImportError, match=r"pip install 'echelon\[wandb\]'"):
        WandbWriter("gpt")


def test_tensorboard_reads_what_was_written(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard: not there"
    )
    for first_step in (0, 2):  # the second run resumes from step 2
        writer = TensorBoardWriter(tmp_path, first_step=first_step)
        with FigureLog(None, tokens_per_step=10, writers=[writer], first_step=first_step) as log:
            for step in range(first_step + 1, 5):
                log.step(step, step + first_step, gradient_norm=1.0)
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    tags = read.Tags()["scalars"]
    assert {"training/loss", "training/gradient_norm", "speed/tokens_per_s"} <= set(tags)
    assert {"waits/data_wait", "memory/peak_memory_bytes"} <= set(tags)
    losses = [(event.step, event.value) for event in read.Scalars("training/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]


@pytest.mark.slow
def test_wandb_keeps_a_run_without_a_network(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb: not there")
    monkeypatch.setenv("WANDB_SILENT", "true")
    writer = WandbWriter("gpt", folder=tmp_path, config={"width": 64})
    with FigureLog(None, writers=[writer]) as log:
        for step in (1, 2):
            log.step(step, 3.0)
    (run,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"exposed_communication" in run.read_bytes()
