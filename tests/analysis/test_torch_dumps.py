"""torch's dumps: the recorded sets with known truth, and imagined ones for each trap."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from imagined_torch import TorchJob

from echelon.analysis import analyze
from echelon.analysis.diagnose import examine
from echelon.analysis.finding import Finding
from echelon.analysis.report.page.render import render_html
from echelon.analysis.sources.torch.file import rank_in_name, ranks_in
from echelon.errors import DumpFormatError

DATA = Path(__file__).parents[1] / "data" / "torch_dumps"
SETS = sorted(path.parent.relative_to(DATA).as_posix() for path in DATA.glob("*/*/truth.json"))
# What torch's entries cannot tell from a rank that hangs in code of its own.
READS_AS = {"data_starvation": "host_hang"}


def verdict_of(job: TorchJob, folder: Path, **how: object) -> Finding | None:
    return analyze(job.write(folder / "dumps", **how)).verdict


def told(verdict: Finding | None) -> tuple[str, list[int]] | None:
    return None if verdict is None else (verdict.cause.value, list(verdict.culprit_ranks))


def test_all_sets_are_here() -> None:
    assert len(SETS) == 22


@pytest.mark.parametrize("name", SETS)
def test_recorded_set(name: str) -> None:
    truth = json.loads((DATA / name / "truth.json").read_text())
    verdict = analyze(DATA / name).verdict
    if truth["cause"] == "healthy":
        assert verdict is None
        return
    cause = READS_AS.get(truth["cause"], truth["cause"])
    assert told(verdict) == (cause, truth["culprit_ranks"])


def test_a_silent_network_is_possible_and_says_what_would_settle_it() -> None:
    verdict = analyze(DATA / "real" / "net_blackhole").verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.culprit_ranks) == ("network", ())
    assert verdict.confidence.value == "possible"
    settles = " ".join(verdict.would_settle)
    assert "bytes moved per peer" in settles
    assert "socket queues" in settles


def test_what_entries_cannot_tell_is_listed() -> None:
    verdict = analyze(DATA / "real" / "straggler_data").verdict
    assert verdict is not None
    settles = " ".join(verdict.would_settle)
    for cause in ("data_starvation", "storage_stall", "store_wait", "frozen_process", "gil_hang"):
        assert cause in settles


# ---- files and names ----


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_3", 3),
        ("_dump_12", 12),
        ("host12_trace_7.pkl", 7),
        ("node-3_rank_11.json", 11),
        ("rank4_of_host9", 4),
        ("dump_5.pickle", 5),
        ("trace", None),
        ("truth.json", None),
    ],
)
def test_rank_in_name(name: str, rank: int | None) -> None:
    assert rank_in_name(Path(name)) == rank


def test_folders_per_host_and_host_names_in_prefixes(tmp_path: Path) -> None:
    for rank in range(4):
        host = tmp_path / f"host{rank // 2}"
        host.mkdir(exist_ok=True)
        source = DATA / "real" / "host_hang" / f"gloo_trace_rank_{rank}"
        shutil.copy(source, host / f"host{rank // 2}_dump_{rank}.pkl")
    assert told(analyze(tmp_path).verdict) == ("host_hang", [2])


def test_one_unreadable_file_is_a_warning_and_a_suspect(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(3)
    for rank in job.others(2):
        rank.call(state="started")
    folder = job.write(tmp_path / "dumps")
    (folder / "nccl_trace_rank_2").write_bytes(b"\x80\x02garbage")
    report = analyze(folder)
    assert report.ranks_missing == (2,)
    assert told(report.verdict) == ("dead_process", [2])
    assert any("rank_2" in warning for warning in report.warnings)


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"\x80\x02garbage")
    with pytest.raises(DumpFormatError, match="nccl_trace_rank_0"):
        analyze(tmp_path)


def test_foreign_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="no dumps in a known format"):
        analyze(tmp_path)


def test_json_without_frames_and_with_numbers_as_strings(tmp_path: Path) -> None:
    job = TorchJob(3).all_call(3)
    for rank in job.ranks:
        rank.call(dtype="Half" if rank.rank == 1 else "Float", state="started")
    assert told(verdict_of(job, tmp_path, as_json=True)) == ("dtype_mismatch", [1])


def test_a_newer_major_version_is_refused(tmp_path: Path) -> None:
    job = TorchJob(2).all_call(2)
    for rank in job.ranks:
        rank.version = "3.1"
    with pytest.raises(DumpFormatError, match=r"format 3\.1"):
        analyze(job.write(tmp_path / "dumps"))


def test_versions_compare_as_numbers_and_may_be_mixed(tmp_path: Path) -> None:
    job = TorchJob(2).all_call(2)
    job[0].version = "2.9"
    job[1].version = "2.12"
    assert verdict_of(job, tmp_path) is None


def test_entries_may_be_absent_or_empty(tmp_path: Path) -> None:
    job = TorchJob(3)
    job[0].call()
    folder = job.write(tmp_path / "dumps")
    (folder / "nccl_trace_rank_2").write_bytes(
        b"\x80\x02}X\x07\x00\x00\x00versionX\x04\x00\x00\x002.10s."
    )
    assert analyze(folder).ranks_present == (0, 1, 2)


def test_ranks_are_parsed_and_never_evaluated() -> None:
    assert ranks_in("[0, 1, 5]") == (0, 1, 5)
    assert ranks_in("__import__('os').getpid()") == ()
    assert ranks_in(["x", 2, True]) == (2,)
    assert ranks_in("[99999999999]") == ()


# ---- traps ----


@pytest.mark.parametrize("culprit", range(4))
def test_any_rank_may_be_the_odd_one(tmp_path: Path, culprit: int) -> None:
    job = TorchJob(4).all_call(3)
    for rank in job.ranks:
        rank.call(sizes=[[4, 5 if rank.rank == culprit else 4]], state="started")
    assert told(verdict_of(job, tmp_path)) == ("shape_mismatch", [culprit])


def test_views_of_equally_many_elements_match(tmp_path: Path) -> None:
    job = TorchJob(3).all_call(3)
    job[0].call(sizes=[[16]])
    job[1].call(sizes=[[4, 4]])
    job[2].call(sizes=[[2, 8]])
    assert verdict_of(job.all_call(1), tmp_path) is None


def test_rooted_collectives_differ_in_shape_and_match(tmp_path: Path) -> None:
    job = TorchJob(3)
    for rank in job.ranks:
        rank.call("gather", outputs=[[4, 4]] * 3 if rank.rank == 0 else [])
        rank.call("scatter", sizes=[[4, 4]] * 3 if rank.rank == 0 else [], outputs=[[4, 4]])
    assert verdict_of(job, tmp_path) is None


def test_unknown_operations_are_read_as_far_as_they_carry(tmp_path: Path) -> None:
    job = TorchJob(3)
    for rank in job.ranks:
        rank.call("quantum_sum", sizes=[[rank.rank + 1]])
    assert verdict_of(job.all_call(2), tmp_path) is None


def test_missing_dump_while_others_wait(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(3)
    for rank in job.others(3):
        rank.call(state="started")
    assert told(verdict_of(job, tmp_path, lost=(3,))) == ("dead_process", [3])


def test_dumps_taken_a_little_apart(tmp_path: Path) -> None:
    """Rank 0 was dumped later and is already some calls on; that completed means all had come."""
    job = TorchJob(4).all_call(3)
    job[0].call().call().call(state="started")
    for rank in job.others(0):
        rank.call(state="started")
    assert verdict_of(job, tmp_path) is None


def test_pending_here_and_completed_by_its_peers(tmp_path: Path) -> None:
    job = TorchJob(4).all_call(3)
    job[1].call(state="started")
    for rank in job.others(1):
        rank.call().call(state="started")
    assert told(verdict_of(job, tmp_path)) == ("device_stuck", [1])


def test_batch_p2p_takes_its_state_from_the_end_of_its_block(tmp_path: Path) -> None:
    job = TorchJob(2).all_call(1)
    for rank in job.ranks:
        peer = 1 - rank.rank
        rank.send(peer, "scheduled", retired=False).recv(peer, "scheduled", same_block=True)
        rank.call("coalesced", p2p=True, same_block=True, sizes=[])
    assert verdict_of(job, tmp_path) is None


def test_a_block_without_its_end_is_no_alarm(tmp_path: Path) -> None:
    job = TorchJob(2).all_call(1)
    for rank in job.ranks:
        peer = 1 - rank.rank
        rank.send(peer, "scheduled").recv(peer, "scheduled", same_block=True)
    assert verdict_of(job, tmp_path) is None


def test_coalesced_collectives_are_compared_as_a_set(tmp_path: Path) -> None:
    job = TorchJob(3)
    for rank in job.ranks:
        rank.call("all_gather", state="scheduled")
        rank.call("reduce_scatter", state="scheduled", same_block=True)
        rank.call("coalesced", same_block=True, sizes=[])
    assert verdict_of(job, tmp_path / "a") is None
    for rank in job.ranks:
        odd = rank.rank == 2
        rank.call("all_gather", state="scheduled")
        rank.call("all_gather" if odd else "reduce_scatter", state="scheduled", same_block=True)
        rank.call("coalesced", same_block=True, sizes=[], state="started")
    assert told(verdict_of(job, tmp_path / "b")) == ("op_mismatch", [2])


def test_a_coalesced_block_that_one_rank_has_not_closed_yet(tmp_path: Path) -> None:
    job = TorchJob(3).all_call(2)
    for rank in job.ranks:
        rank.call("all_gather", state="scheduled")
        rank.call("reduce_scatter", state="scheduled", same_block=True)
        if rank.rank != 1:
            rank.call("coalesced", same_block=True, sizes=[])
    assert verdict_of(job, tmp_path) is None


def test_outputs_may_differ_where_inputs_do_not(tmp_path: Path) -> None:
    job = TorchJob(3).all_call(2)
    for rank in job.ranks:
        size = 5 if rank.rank == 0 else 4
        rank.call("_all_gather_base", outputs=[[3 * size, 4]], state="started")
    assert told(verdict_of(job, tmp_path)) == ("shape_mismatch", [0])


def test_a_p2p_and_a_collective_of_one_number_are_two_things(tmp_path: Path) -> None:
    job = TorchJob(2)
    job[0].send(1)
    job[1].recv(0)
    assert verdict_of(job.all_call(2), tmp_path) is None


def test_members_that_gloo_does_not_write_are_inferred(tmp_path: Path) -> None:
    job = TorchJob(4, "gloo")
    for rank in job.ranks:
        rank.config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        half = ("1", "tp0") if rank.rank < 2 else ("2", "tp1")
        rank.call(group=half).call().call(group=half, state="completed" if rank.rank < 2 else "x")
    job[0].call(state="x")
    job[1].call(state="x")
    job[3].entries.pop()
    assert told(verdict_of(job, tmp_path)) == ("host_hang", [3])


def test_two_idle_ranks_under_gloo_may_wait_for_each_other(tmp_path: Path) -> None:
    """One of them may be inside a receive: Gloo records none, and its counters lag behind."""
    job = TorchJob(4, "gloo").all_call(3)
    for rank in job.others(0, 1):
        rank.call(state="x")
    verdict = verdict_of(job, tmp_path)
    assert told(verdict) == ("host_hang", [0, 1])
    assert verdict is not None
    assert "send or receive" in " ".join(verdict.would_settle)


def test_a_tie_of_survivors_is_broken_by_habit(tmp_path: Path) -> None:
    """After a size mismatch victims' dumps are lost: of two left, one did what it always did."""
    job = TorchJob(4, "gloo").all_call(3)
    for rank in job.ranks:
        rank.call(sizes=[[9 if rank.rank == 1 else 4, 4]])
    assert told(verdict_of(job, tmp_path, lost=(0, 2))) == ("shape_mismatch", [1])


def test_groups_of_one_name_on_different_ranks_are_two_groups(tmp_path: Path) -> None:
    job = TorchJob(4)
    for rank in job.ranks:
        members = [0, 1] if rank.rank < 2 else [2, 3]
        rank.config["1"] = {"name": "1", "desc": "tp", "ranks": str(members)}
        for _ in range(2 if rank.rank < 2 else 5):
            rank.call(group=("1", "tp"))
    assert verdict_of(job, tmp_path) is None


def test_damaged_dumps_never_make_it_fall_over(tmp_path: Path) -> None:
    """Bytes are changed at random; each file is read, or refused with its name, and drawn."""
    random = np.random.default_rng(11)
    num_read = 0
    for round_ in range(60):
        source = DATA / SETS[round_ % len(SETS)]
        folder = tmp_path / str(round_)
        folder.mkdir()
        for file in sorted(source.glob("*_rank_*")):
            data = bytearray(file.read_bytes())
            for _ in range(int(random.integers(0, 4))):
                data[int(random.integers(len(data)))] = int(random.integers(256))
            (folder / file.name).write_bytes(data)
        with contextlib.suppress(DumpFormatError):  # all of a set may be refused
            picture, report = examine(folder)
            assert render_html(picture, report)
            num_read += len(report.ranks_present)
    assert num_read > 60


def gloo_grid(*, state: str) -> TorchJob:
    """Pairs (tp) and the ranks across them (dp), without a word of their members."""
    job = TorchJob(8, "gloo")
    for rank in job.ranks:
        rank.config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        for _ in range(3):
            rank.call(group=(f"1{rank.rank // 2}", "tp")).call(group=(f"2{rank.rank % 2}", "dp"))
    for rank in job.others(7):
        is_even = rank.rank % 2 == 0
        rank.call(group=(f"2{rank.rank % 2}", "dp"), state="completed" if is_even else state)
        if is_even:
            rank.call(group=(f"1{rank.rank // 2}", "tp"), state=state)
    return job


def test_the_last_rank_is_missed_where_the_groups_of_gloo_are_one_short(tmp_path: Path) -> None:
    report = analyze(gloo_grid(state="scheduled").write(tmp_path / "dumps", lost=(7,)))
    verdict = report.verdict
    assert verdict is not None
    assert report.world_size == 8
    assert (verdict.cause.value, verdict.culprit_ranks) == ("dead_process", (7,))
    assert verdict.confidence.value == "possible"


def test_uneven_groups_of_gloo_that_move_miss_no_rank(tmp_path: Path) -> None:
    report = analyze(gloo_grid(state="completed").write(tmp_path / "dumps", lost=(7,)))
    assert (report.world_size, report.healthy) == (7, True)


def test_where_no_dump_names_members_the_report_says_that_a_rank_may_be_missing(
    tmp_path: Path,
) -> None:
    job = TorchJob(3, "gloo").all_call(2)
    for rank in job.ranks:
        rank.config = {"": {"name": "", "desc": "", "ranks": "[]"}}
        rank.call(state="scheduled")
    verdict = analyze(job.write(tmp_path / "dumps")).verdict
    assert verdict is not None
    assert (verdict.cause.value, verdict.confidence.value) == ("network", "possible")
    assert "rank 3 may be missing" in verdict.would_settle[0]
