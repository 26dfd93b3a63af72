"""The main job, run as a command."""

from __future__ import annotations

import re
import sys
from collections import Counter
from functools import partial

import pytest
import train_gpt
from gpt.job import unfit
from gpt.training.settings import TrainingSettings

from echelon.recorder.read import read_ring
from echelon.tokens.prepare import prepare
from echelon.tokens.tokenizer import make_tokenizer
from tests.examples import runs
from tests.examples.runs import EXAMPLES, SMALL_MODEL, Ended, read_log, run, run_loaded

SCRIPT = EXAMPLES / "train_gpt.py"
launch = partial(runs.launch, stall_timeout_s=60)  # no stall is looked for here
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A short text, so that no run spends its time reading a long one."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(b"".join(b"def f_%d(x):\n    return x + %d\n" % (n, n) for n in range(4000)))
    return path


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """A run of twenty steps in one process, with what it wrote."""
    folder = tmp_path_factory.mktemp("alone")
    options = (*SMALL_MODEL, *every_twelve(folder), "--data", text)
    ended = run(SCRIPT, *options, environ={"ECHELON_RANK_DIR": str(folder / "rank")})
    assert ended.code == 0, ended.explain()
    return ended, folder


@pytest.fixture(scope="module")
def sharded(text, tmp_path_factory):
    """The same on two ranks that share one model."""
    folder = tmp_path_factory.mktemp("sharded")
    options = (*SMALL_MODEL, *every_twelve(folder), "--data", text, "--shard")
    ended = launch(2, folder / "run", "train_gpt.py", *options)
    assert ended.code == 0, ended.explain()
    assert "world: 2 ranks, shards, " in ended.out
    return ended, folder


def every_twelve(folder):
    files = ("--log", folder / "log", "--checkpoint", folder / "gpt", "--keep=9")
    return ("--steps=20", "--checkpoint-every=12", *files)


def train(num_ranks, folder, *options):
    """Run the job in processes that have torch loaded; all its ranks end with one code."""
    ends = run_loaded(num_ranks, folder, "train_gpt.py", *options)
    told = "\n".join(end.explain() for end in ends)
    assert len({end.code for end in ends}) == 1, told
    out, err = ("".join(getattr(end, kind) for end in ends) for kind in ("out", "err"))
    return Ended(ends[0].code, out, err)


def losses_of(log):
    lines = [line for line in read_log(log) if "loss" in line]
    return [line["step"] for line in lines], [line["loss"] for line in lines]


def test_two_ranks_and_one_process_train_alike(alone, text, tmp_path):
    _, alone_folder = alone
    log = tmp_path / "log"
    ended = train(2, tmp_path, *SMALL_MODEL, "--steps=20", "--data", text, "--log", log)
    assert ended.code == 0, ended.explain()
    one, two = losses_of(alone_folder / "log"), losses_of(log)
    assert one[0] == two[0] == list(range(1, 21))
    assert two[1] == pytest.approx(one[1], abs=1e-4)
    assert one[1][-1] < one[1][0] - 0.5  # they are alike because they train, not because they don't
    assert re.search(r"validation loss +\d\.\d+", ended.out), ended.explain()


def test_shards_and_one_process_train_alike(alone, sharded):
    """And what rank 0 says at the end, validation and sample, is of the whole model."""
    one, two = losses_of(alone[1] / "log"), losses_of(sharded[1] / "log")
    assert two[1] == pytest.approx(one[1], abs=1e-4)
    texts = [ended.out.replace("0| ", "") for ended, _ in (alone, sharded)]
    for line in (r"validation loss (\d\.\d{3})", r"(?s)sample:\n(def .{20})"):
        found = [re.search(line, text) for text in texts]
        assert found[0][1] == found[1][1]


def test_a_run_ends_with_its_figures_and_a_sample(alone):
    ended, _ = alone
    for line in (
        r"^model: 2 layers, width 32, 2 heads, context 32: 33,\d{3} parameters, fp32$",
        r"^world: 1 ranks, replicas, shm, cpu$",
        r"^step 20/20  loss \d\.\d{5}  \d.* ms  .*tokens/s  MFU \d.*%  ETA 0:00$",
        r"^20 steps in .* ms per iteration, .*tokens/s, .*FLOP per token = 6 N \+ 12 L C T\)$",
        r"^MFU \d.*% of .*FLOP/s, all ranks' peak together \(measured\)$",
        r"^validation loss \d\.\d{4} ",
        r"^bigram loss     \d\.\d{4} ",
        r"^sample:\ndef ",
    ):
        assert re.search(line, ended.out, re.M), ended.explain()


def spans_of(rank_dir):
    ring = read_ring(rank_dir / "ring")
    assert len(ring.open_spans) == 0
    return Counter(ring.strings[name] for name in ring.spans["name"])


def test_what_takes_long_beside_training_is_in_its_span(alone):
    found = spans_of(alone[1] / "rank")
    assert found["data_wait"] >= 20
    assert found["evaluate"] == 1
    assert found["checkpoint"] >= 2


@pytest.mark.slow
def test_a_compilation_is_in_its_span(text, tmp_path):
    environ = {"ECHELON_RANK_DIR": str(tmp_path / "rank"), "TORCHDYNAMO_DISABLE": "1"}
    options = (*SMALL_MODEL, "--steps=1", "--data", text, "--compile")
    ended = run(SCRIPT, *options, environ=environ)
    assert ended.code == 0, ended.explain()
    assert spans_of(tmp_path / "rank")["compile"] == 1


def test_a_resumed_run_goes_on_exactly(alone, text, tmp_path):
    """From its checkpoint after 12 of 20 steps it takes the steps that the first run took."""
    _, alone_folder = alone
    files = ("--log", tmp_path / "log", "--resume", alone_folder / "gpt/step_00000012")
    resumed = train(1, tmp_path, *SMALL_MODEL, "--steps=20", "--data", text, *files)
    assert resumed.code == 0, resumed.explain()
    assert "gpt/step_00000012 after step 12" in resumed.out
    steps, losses = losses_of(alone_folder / "log")
    assert losses_of(tmp_path / "log") == (steps[12:], losses[12:])


def test_one_process_goes_on_where_two_ranks_of_shards_stopped(sharded, text, tmp_path):
    _, folder = sharded
    files = ("--log", tmp_path / "log", "--resume", folder / "gpt/step_00000012")
    resumed = train(1, tmp_path, *SMALL_MODEL, "--steps=20", "--data", text, *files)
    assert resumed.code == 0, resumed.explain()
    steps, losses = losses_of(folder / "log")
    assert losses_of(tmp_path / "log")[0] == steps[12:]
    assert losses_of(tmp_path / "log")[1] == pytest.approx(losses[12:], abs=1e-4)


def test_three_ranks_of_shards_go_on_where_one_process_stopped(alone, text, tmp_path):
    """Three ranks, so that neither the batch of eight nor the weights divide evenly."""
    _, folder = alone
    files = ("--log", tmp_path / "log", "--resume", folder / "gpt/step_00000012")
    options = (*SMALL_MODEL, "--steps=20", "--data", text, "--shard", *files)
    resumed = train(3, tmp_path, *options)
    assert resumed.code == 0, resumed.explain()
    _, losses = losses_of(folder / "log")
    assert losses_of(tmp_path / "log")[1] == pytest.approx(losses[12:], abs=1e-4)


def test_a_grid_of_stages_and_shards_goes_on_and_is_gone_on_from(alone, text, tmp_path):
    """One process, then four ranks in two stages of shards, then one process again."""
    _, folder = alone
    common = (*SMALL_MODEL, "--steps=20", "--data", text)
    grid = (
        "--pipeline=2",
        "--shard",
        "--checkpoint",
        tmp_path / "grid_gpt",
        "--keep=9",
        "--checkpoint-every=4",
    )
    files = ("--resume", folder / "gpt/step_00000012", "--log", tmp_path / "grid")
    ended = train(4, tmp_path / "run", *common, *grid, *files)
    assert ended.code == 0, ended.explain()
    assert "world: 4 ranks, 2 stages of shards, " in ended.out
    files = ("--resume", tmp_path / "grid_gpt/step_00000016", "--log", tmp_path / "after")
    ended = train(1, tmp_path / "run_after", *common, *files)
    assert ended.code == 0, ended.explain()
    _, losses = losses_of(folder / "log")
    assert losses_of(tmp_path / "grid")[1] == pytest.approx(losses[12:], abs=1e-4)
    assert losses_of(tmp_path / "after")[1] == pytest.approx(losses[16:], abs=1e-4)


def test_a_finished_run_can_be_looked_at_again(alone, text, tmp_path):
    _, folder = alone
    resume = ("--resume", folder / "gpt/step_00000020")
    ended = train(1, tmp_path, *SMALL_MODEL, "--steps=20", "--data", text, *resume)
    assert ended.code == 0, ended.explain()
    assert "after step 20" in ended.out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--steps 0", "argument --steps: '0' is not a whole number from 1 up"),
        ("--lr -1", "argument --lr: '-1' is not a number above 0"),
        ("--mixed-precision fp8", "argument --mixed-precision: invalid choice: 'fp8'"),
        ("--preset gpt5", "argument --preset: invalid choice: 'gpt5'"),
        ("--preset gpt2 --heads 7", "width 768 does not split into 7 heads"),
        ("--vocabulary 1", "a vocabulary has 2 to 65536 tokens, not 1"),
        ("--microbatches 4", "--microbatches needs --pipeline"),
        ("--pipeline 5", "--pipeline 5: there are only 4 layers"),
        ("--peak-tflops 0", "argument --peak-tflops: '0' is not a number above 0"),
        ("--heads 3", "width 128 does not split into 3 heads"),
        ("--data /no/such/file", "/no/such/file: No such file or directory"),
        ("--data {empty}", "the text has 0 bytes"),
        ("--context 100000 --data {text}", "the text is too short"),
        ("--checkpoint /no/such/folder/gpt", "cannot write /no/such/folder/gpt"),
        ("--checkpoint-every 5", "--checkpoint-every needs --checkpoint FOLDER"),
        ("--backend ring --data {text}", "unknown backend 'ring'"),
        ("--resume {empty}", "empty: the folder does not contain a complete checkpoint"),
        ("--resume auto", "--resume auto needs --checkpoint FOLDER"),
        ("--save-every-s 5", "--save-every-s needs --checkpoint FOLDER"),
        ("--set training.lrr=3", "unknown setting training.lrr; did you mean training.lr?"),
        ("--set training.steps=many", "training.steps must be an integer, got 'many'"),
        ("--config /no/such.toml", "error: /no/such.toml: No such file or directory"),
        ("--checkpoint-activations some", "is 'some', not full, every=N, selective or none"),
        ("--mask-documents", "--mask-documents needs --model gpt2 or llama"),
        ("--pack-documents", "--pack-documents needs --model gpt2 or llama"),
        ("--tp 2", "--tp needs --model gpt2 or llama"),
        ("--sequence", "--sequence needs --tp"),
        (
            "--model llama --tp 2 --context 31 --sequence --data {text}",
            "--tp 2 does not divide 31 tokens",
        ),
        ("--export-hf x", "--export-hf needs --model gpt2 or llama"),
        ("--model llama --tp 3 --data {text}", "--tp 3 does not divide 4 heads"),
        ("--ema 1", "--ema 1: a decay is below 1"),
        ("--init-from {empty}", "empty/config.json: Not a directory"),
        ("--chunked-loss --pipeline 2", "--chunked-loss does not go together with --pipeline"),
        ("--vocabulary 100 --data {tokens}", "--vocabulary 100: the data has 257 tokens"),
        ("--resume /no/such/checkpoint", "/no/such/checkpoint: no such checkpoint"),
    ],
)
def test_bad_options_get_one_line_and_exit_code_2(
    options, complaint, text, tmp_path, monkeypatch, capsys
):
    empty = tmp_path / "empty"
    empty.touch()
    tokens = tmp_path / "tokens"
    if "{tokens}" in options:
        documents = (iter(["text " * 100]) for _ in range(20))
        prepare(tokens, documents, make_tokenizer("bytes"), validation=0.3)
    argv = options.format(empty=empty, text=text, tokens=tokens).split()
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *argv])
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert complaint in err
    assert err.startswith("train_gpt.py: error: ")
    assert err.count("\n") == 1
    assert out == ""


def test_a_checkpoint_of_other_settings_is_refused(alone, text, tmp_path):
    _, folder = alone
    other = (*SMALL_MODEL, "--seed=1", "--data", text, "--resume", folder / "gpt/step_00000020")
    ended = train(1, tmp_path, *other)
    assert ended.code == 2
    assert "belongs to another run: seed 0 there, 1 here" in ended.err


@pytest.mark.parametrize(
    ("changes", "world_size", "reason"),
    [
        ({}, 4, None),
        ({"pipeline": 2, "microbatches": 4}, 4, None),
        ({}, 9, "--batch 8 leaves some of 9 ranks without data"),
        ({"pipeline": 2}, 3, "--pipeline 2 does not divide 3 ranks"),
        (
            {"pipeline": 2, "microbatches": 4},
            6,
            "--batch 8 in 3 shares cannot be split into 4 micro-batches",
        ),
    ],
)
def test_a_world_that_the_settings_do_not_fit_is_refused(changes, world_size, reason):
    fixed = {"steps": 1, "batch": 8, "lr": 1.0, "warmup": 0, "clip": 1.0, "seed": 0}
    assert unfit(TrainingSettings(**fixed, **changes), world_size) == reason


def test_more_ranks_than_sequences_are_refused(text, tmp_path):
    options = (*SMALL_MODEL, "--batch=1", "--data", text)
    ended = train(2, tmp_path, *options)
    assert ended.code == 2, ended.explain()
    assert "--batch 1 leaves some of 2 ranks without data" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_compiled_blocks_train_as_plain_ones(alone, text, tmp_path):
    log = tmp_path / "log"
    options = (*SMALL_MODEL, "--steps=20", "--data", text, "--log", log, "--shard", "--compile")
    ended = launch(2, tmp_path / "run", "train_gpt.py", *options, stall_timeout_s=600)
    assert ended.code == 0, ended.explain()
    assert "compiled blocks" in ended.out
    assert re.search(r"compiled in \d+\.\d s", ended.out)
    assert losses_of(log)[1] == pytest.approx(losses_of(alone[1] / "log")[1], abs=1e-4)
