"""Which checkpoint a run goes on from, when the next one is due, and how settings are read."""

from __future__ import annotations

import pytest
from gpt.flags import build_parser, read_settings
from gpt.job import prepare
from gpt.settings import Settings

import echelon.dist as dist
from echelon.dist.checkpoint import peek, save
from echelon.train.settings import to_dict, to_toml


@pytest.fixture
def _world():
    dist.init()
    yield
    dist.shutdown()


def settings_of(*arguments: str) -> Settings:
    return read_settings(build_parser("x"), arguments)


def test_flags_beat_the_file_and_the_file_beats_the_preset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[training]\nlr = 1e-5\nsteps = 7\n[model]\nlayers = 3\n")
    common = ("--preset", "shakespeare", "--config", str(file))
    settings = settings_of(*common, "--lr", "0.5", "--set", "model.width=64")
    assert (settings.training.lr, settings.training.steps) == (0.5, 7)
    assert (settings.model.layers, settings.model.width, settings.model.heads) == (3, 64, 6)
    assert settings.training.batch == 64
    assert settings_of() == Settings()


def test_the_configuration_that_results_can_be_given_again(tmp_path):
    settings = settings_of("--data", "a:0.7", "b", "--shard", "--checkpoint", "x")
    (tmp_path / "run.toml").write_text(to_toml(settings))
    assert settings_of("--config", str(tmp_path / "run.toml")) == settings


class TwoRanks:
    """A world whose second rank has read something."""

    def __init__(self, other: list[int]) -> None:
        self.other = other

    def all_gather_object(self, mine: list[int]) -> list[list[int]]:
        return [mine, self.other]


def test_hosts_with_different_texts_are_refused(corpus, tmp_path):
    job = prepare(settings_of("--data", str(corpus.name), "--context", "8"))
    job.require_same_data(TwoRanks(job.corpus.fingerprint))
    with pytest.raises(ValueError, match="ranks 1 read different tokens from rank 0"):
        job.require_same_data(TwoRanks([1, 2]))


@pytest.mark.usefixtures("_world")
def test_a_resumed_run_says_which_settings_differ(corpus, tmp_path):
    common = ("--data", str(corpus.name), "--context", "8")
    before = prepare(settings_of(*common, "--lr", "0.5"))
    save(tmp_path / "c", {"settings": to_dict(before.settings)})
    now = prepare(settings_of(*common, "--shard", "--resume", "auto", "--checkpoint", "x"))
    assert now.changes_since(peek(tmp_path / "c")) == [
        "training.lr 0.5 before, 0.003 now",
        "machine.shard false before, true now",
    ]
