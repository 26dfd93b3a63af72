"""Launched jobs in which a new process takes the place of a rank that is lost."""

from __future__ import annotations

import re

import pytest

from tests.launcher.background import Node
from tests.support.ranks import read_json, run_echelon

pytestmark = pytest.mark.ranks

_BITS = re.compile(r"bits (\w+) of (\d)")

# Ends processes at named moments: "1.0@step 5" is rank 1's first process, in step 5. From step 8
# on, the ranks wait in each step until those that are to join are admitted, the first at step 9.
_TRAINING = """
import os, signal, sys, time
from pathlib import Path
import torch
import echelon.dist as dist
from echelon.dist import resilient, runtime
from echelon.dist.resilient import epochs, joining
from echelon.dist.resilient.training import replicated
from echelon.recorder import span
from echelon.recorder.continuation import epoch_key
from echelon.train.same_bits import SameBits, fingerprint

TOTAL, FULL, MEETS_AT = 20, int(os.environ["WORLD_SIZE"]), 8
folder = Path(os.environ["ECHELON_RANK_DIR"])
life = len(list(folder.parent.glob("lost_*")))
torch.set_num_threads(1)
me = f"{os.environ['RANK']}.{life}"
deaths = {one.partition("@")[2] for one in sys.argv[1:] if one.startswith(me + "@")}
failed = folder.parents[1] / "failed.pid"
go = [one.partition("=")[2] for one in sys.argv if one.startswith("--go=")]
newest = [0]

def die_at(moment):
    if moment in deaths:
        if moment == "raise":
            failed.with_suffix(".part").write_text(str(os.getpid()))
            failed.with_suffix(".part").rename(failed)
            raise ValueError("a defect of the program")
        if moment == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)

def before(owner, name, moment):
    real = getattr(owner, name)
    def call(*args, **options):
        die_at(moment)
        return real(*args, **options)
    setattr(owner, name, call)

def note(joins, epoch, real=joining.Joins.note):
    real(joins, epoch)
    newest[0] = epoch.number

def may_go_on(step, world):
    if "late" in sys.argv:  # the launcher admits a rank in the last step
        return step < TOTAL - 1 or runtime.job_store().check([epoch_key(2)])
    if "1.1@meeting" in sys.argv and not world.epoch > 2:  # its death is known, too
        return newest[0] > 2
    if "1.1@raise" in sys.argv:
        return failed.exists() and not Path("/proc/" + failed.read_text()).exists()
    return newest[0] > world.epoch

def wait_for(is_true):
    limit_s = time.monotonic() + 600.0
    while not is_true() and runtime.first_error() is None:
        assert time.monotonic() < limit_s, "nothing has come"
        with span("waits"):  # else a slow start of another process is a stall of this one
            time.sleep(0.02)

joining.Joins.note = note

def train(is_disturbed):
    group = dist.init(timeout_s=300)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def prepare(world):
        if is_disturbed and world.epoch:
            die_at("prepare")
        same = SameBits(model, optimizer, micro_batches=6, group=world.group, probe=False)

        def train_step(step):
            if is_disturbed:
                if step == 4:
                    wait_for(lambda: all(Path(one).exists() for one in go))
                die_at(f"step {step}")
                if step == 5:
                    die_at("stop")
                if step >= MEETS_AT and world.group.size < FULL:
                    wait_for(lambda: may_go_on(step, world))
            model.eval()  # statistics of a batch depend on how it is divided
            same.backward(step, lambda number: model(torch.randn(2, 6)).square().sum())
            with torch.no_grad():
                model[1].running_mean.add_(torch.rand(5))
            optimizer.step()
            schedule.step()

        return train_step

    resilient.run(prepare, model, optimizer, total=TOTAL, also=[schedule])
    bits = fingerprint(model, optimizer)
    if is_disturbed:
        print("bits", bits, "of", dist.world().size, flush=True)
    dist.shutdown()
    return bits

if deaths:
    before(epochs.Epochs, "meet", "meeting")
    before(replicated, "send_state", "sending")
    before(replicated, "receive_state", "receiving")
    die_at("raise")
found = train(True)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
del os.environ["MASTER_ADDR"]
assert train(False) == found, "other bits than on one rank that nothing disturbs"
"""


def _run(tmp_path, *argv, size=3, deaths):
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(_TRAINING)
    done = run_echelon(
        "run", "--nproc-per-node", str(size), "--on-loss", "replace", *argv,
        "--run-dir", str(run_dir), str(script), *deaths,
    )  # fmt: skip
    return done, read_json(run_dir / "report.json")


def _bits(done):
    return _BITS.findall(done.stdout)


def test_a_killed_rank_is_replaced_and_the_bits_are_those_of_an_undisturbed_run(tmp_path):
    done, report = _run(tmp_path, deaths=["1.0@step 5"])
    assert done.returncode == 0, done.stderr
    assert len(set(_bits(done))) == 1, done.stdout
    assert [size for _, size in _bits(done)] == ["3", "3", "3"]
    for line in (
        "rank 1 is lost; continuing with ranks 0 and 2",
        "continued with 2 of 3 ranks in ",
        "step 5 repeated, 0 steps lost",
        "a new process takes the place of rank 1",
        "joined at step 9; 3 of 3 ranks",
        "all 3 ranks finished successfully",
    ):
        assert line in done.stderr, done.stderr
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, 0, 0]
    loss, join = report["continuations"]
    assert (loss["lost_ranks"], loss["joined_ranks"], loss["num_ranks"]) == ([1], [], 2)
    assert (join["lost_ranks"], join["joined_ranks"], join["num_ranks"]) == ([], [1], 3)
    assert (join["step"], join["repeated"], join["steps_lost"]) == (9, False, 0)
    (incident,) = report["incidents"]
    assert incident["verdict"]["culprit_ranks"] == [1]
    folders = sorted(path.name for path in (tmp_path / "run" / "rank_1").iterdir())
    assert folders == ["attempt_0", "lost_0_of_attempt_0"]
    assert "rank_1/lost_0_of_attempt_0/stderr.log" in incident["verdict"]["next_action"]
    for name in folders:
        assert (tmp_path / "run" / "rank_1" / name / "ring").is_file()


def test_the_rank_that_hands_the_state_over_may_die(tmp_path):
    """The rank that joins then has the state of another one, and a third process joins later."""
    done, report = _run(tmp_path, deaths=["1.0@step 5", "0.0@sending"])
    assert done.returncode == 0, done.stderr
    assert len(set(_bits(done))) == 1, done.stdout
    assert [size for _, size in _bits(done)] == ["3", "3", "3"]
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, 0, 0]
    assert [one["joined_ranks"] for one in report["continuations"] if one["joined_ranks"]] == [
        [1], [0],
    ]  # fmt: skip


@pytest.mark.slow
def test_the_death_of_a_rank_that_the_others_have_not_met_repeats_no_step(tmp_path):
    """They are in a step when it is admitted, and still when it dies."""
    done, report = _run(tmp_path, deaths=["1.0@step 5", "1.1@meeting"])
    assert done.returncode == 0, done.stderr
    assert len(set(_bits(done))) == 1, done.stdout
    assert [size for _, size in _bits(done)] == ["3", "3", "3"]
    continued = [(one["epoch"], one["repeated"]) for one in report["continuations"]]
    assert continued == [(1, True), (3, False), (4, False)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths",
    [
        ["1.0@step 5", "1.1@receiving", "1.2@prepare"],
        ["1.0@step 5", "2.0@meeting", "0.0@step 13"],
        ["1.0@step 5", "2.0@step 5", "1.1@receiving", "0.0@step 13"],
    ],
)
def test_ranks_may_die_while_others_join(tmp_path, deaths):
    """Each of these is a loss as any other, and each is replaced."""
    done, report = _run(tmp_path, deaths=deaths)
    assert done.returncode == 0, done.stderr
    assert len(set(_bits(done))) == 1, done.stdout
    assert [size for _, size in _bits(done)] == ["3", "3", "3"]
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, 0, 0]


def test_a_rank_that_would_join_after_the_last_step_is_dismissed(tmp_path):
    done, report = _run(tmp_path, deaths=["late", "1.0@step 5"])
    assert done.returncode == 0, done.stderr
    assert [size for _, size in _bits(done)] == ["2", "2"]
    assert "rank 1 is not replaced any more: the other ranks have finished" in done.stderr
    assert "2 of 3 ranks finished successfully" in done.stderr
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, -9, 0]


def test_a_process_that_fails_before_it_joins_is_not_tried_again(tmp_path):
    """The others continue to their end, and its place stays empty."""
    done, report = _run(tmp_path, size=2, deaths=["1.0@step 5", "1.1@raise"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("takes the place of rank 1") == 1
    assert "the replacement of rank 1 exited with code 1 before it joined" in done.stderr
    assert [size for _, size in _bits(done)] == ["1"]
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, -9]


@pytest.mark.slow
def test_a_rank_of_another_node_is_replaced_there(cluster):
    job = cluster(_TRAINING, "3.0@step 5")
    first = job.start("--nnodes", "2", "--on-loss", "replace", rank=0)
    second = job.start("--nnodes", "2", rank=1)
    assert (first.end(), second.end()) == (0, 0), (first.lines, second.lines)
    assert second.has("a new process takes the place of rank 3"), second.lines
    assert first.has("joined at step 9; 4 of 4 ranks"), first.lines
    found = _BITS.findall("\n".join(first.lines + second.lines))
    assert len(found) == 4
    assert len(set(found)) == 1


@pytest.mark.slow  # waits until a standby is ready
def test_a_standby_takes_a_lost_ranks_place(tmp_path):
    script, go = tmp_path / "train.py", tmp_path / "go"
    script.write_text(_TRAINING)
    job = Node(
        tmp_path / "run",
        [
            "--nproc-per-node", "3", "--on-loss", "replace", "--standby", "1", str(script),
            f"--go={go}", "1.0@step 5",
        ],
    )  # fmt: skip
    try:
        job.wait_for("1 standby is ready")
        go.touch()
        assert job.end() == 0, job.lines
    finally:
        job.close()
    assert job.has("a standby takes the place of rank 1"), job.lines
    assert job.has("joined at step 9; 3 of 3 ranks"), job.lines


@pytest.mark.slow  # waits for a stall timeout
def test_a_rank_that_hangs_is_ended_and_replaced(tmp_path):
    done, report = _run(
        tmp_path, "--on-stall", "replace", "--stall-timeout", "20", deaths=["1.0@stop"]
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 hangs (frozen_process); ending it" in done.stderr
    assert "3 of 3 ranks" in done.stderr
    assert [size for _, size in _bits(done)] == ["3", "3", "3"]
    assert len(set(_bits(done))) == 1, done.stdout
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, 0, 0]
