"""fr-analyze: exit codes, one clear line on bad input, JSON and nothing else, and a quick start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from imagined_job import Job

from echelon import __version__
from echelon.analysis.cli import main

KEYS = [
    "format",
    "healthy",
    "undecided",
    "world_size",
    "ranks_present",
    "ranks_missing",
    "verdict",
    "findings",
]
FINDING_KEYS = [
    "cause",
    "culprit_ranks",
    "confidence",
    "group",
    "operation",
    "sequence",
    "summary",
    "evidence",
    "fallout_ranks",
    "would_settle",
    "next_action",
    "alternatives",
]


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    job = Job(4).train(2)
    for rank in job.others(2):
        rank.all_reduce(inside=True)
    job[2].stands("tokenize.py", 88, "wait_for_tokenizer")
    return job.write(tmp_path / "incident_0")


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return Job(2).train(2).write(tmp_path / "incident_1", kind="signal")


def test_a_finding_is_exit_code_1_and_json_alone(
    hung: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(hung), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert list(told) == KEYS
    assert (told["format"], told["healthy"], told["world_size"]) == (1, False, 4)
    assert list(told["verdict"]) == FINDING_KEYS
    assert told["findings"][0] == told["verdict"]
    assert told["verdict"]["cause"] == "host_hang"
    assert told["verdict"]["culprit_ranks"] == [2]
    assert told["verdict"]["fallout_ranks"] == [0, 1, 3]
    assert told["verdict"]["sequence"] == 6
    assert "tokenize.py:88 in wait_for_tokenizer" in told["verdict"]["summary"]


def test_healthy_is_exit_code_0(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(healthy), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] is None
    assert told["findings"] == []


def test_the_text_says_what_was_read(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(hung)]) == 1
    out = capsys.readouterr().out
    assert out.lstrip().startswith("VERDICT")
    assert "host_hang" in out
    assert "incident_0" in out.replace("\n", "")
    assert len(out.splitlines()) <= 24


@pytest.mark.parametrize("content", [None, b"", b"hello", b"\x80\x02cos\nsystem\n."])
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    if content is not None:
        (folder / "rank_0").write_bytes(content)
    assert main([str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("fr-analyze: ")
    assert len(captured.err.splitlines()) == 1


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "\x1b[31mnothing")]) == 2
    err = capsys.readouterr().err
    assert "no such folder" in err
    assert "\x1b" not in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


LOOK = """
import sys
sys.argv = ["fr-analyze", "--help"]
from echelon.analysis.cli import main
try:
    main()
except SystemExit as ended:
    assert ended.code == 0
heavy = {"torch", "grpc", "uvloop", "rich", "asyncio"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: fr-analyze" in done.stdout


BLOCKED = """
import sys
rooms = ["echelon.dist", "echelon.store", "echelon.launcher"]
for name in ["torch", "grpc", "uvloop", "fcntl", *rooms]:
    sys.modules[name] = None
from echelon.analysis.cli import main
sys.exit(main([sys.argv[1], "--json"]))
"""


def test_it_works_without_the_other_rooms(hung: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(hung)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdict"]["culprit_ranks"] == [2]


def test_as_a_module(hung: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "echelon.analysis", str(hung), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert json.loads(done.stdout)["verdict"]["cause"] == "host_hang"
