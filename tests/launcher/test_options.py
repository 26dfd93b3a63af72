"""The command line: torchrun's spelling, the environment's defaults, one line for bad usage."""

from __future__ import annotations

import sys

import pytest

from echelon.launcher.options import parse


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_what_follows_the_script_is_its_own(script):
    options = parse(["--nproc-per-node", "2", script, "--nproc-per-node", "9", "--my_flag"], {})
    assert options.nproc_per_node == 2
    assert options.program == (
        sys.executable, "-u", script, "--nproc-per-node", "9", "--my_flag",
    )  # fmt: skip


def test_underscores_and_equals_are_as_good_as_dashes(script):
    options = parse(["--nproc_per_node=3", "--max_restarts", "1", script], {})
    assert (options.nproc_per_node, options.max_restarts) == (3, 1)


def test_the_environment_gives_defaults_and_the_command_line_wins(script):
    environ = {"PET_NPROC_PER_NODE": "4", "PET_STALL_TIMEOUT": "7"}
    assert parse([script], environ).nproc_per_node == 4
    options = parse(["--nproc-per-node", "2", script], environ)
    assert (options.nproc_per_node, options.stall_timeout_s) == (2, 7.0)


def test_a_module_and_a_program_need_no_file():
    assert parse(["-m", "pkg.train", "x"], {}).program == (
        sys.executable, "-u", "-m", "pkg.train", "x",
    )  # fmt: skip
    assert parse(["--no-python", "/bin/true", "x"], {}).program == ("/bin/true", "x")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nowhere.py"], "no such script: nowhere.py"),
        (["--nproc-per-node", "0", "x.py"], "0 is not between 1 and"),
        (["--nproc-per-node", "two", "x.py"], "'two' is no number"),
        (["--stall-timeout", "0", "x.py"], "0 is not above 0"),
        (["--stall-timeout", "nan", "x.py"], "nan is not above 0"),
        (["--max-restarts", "-1", "x.py"], "-1 is below 0"),
        (["--on-stall", "explode", "x.py"], "invalid choice: 'explode'"),
        (["--nnodes", "3:2", "x.py"], "3:2: must be 1 <= MIN <= MAX"),
        (["--nnodes", "2", "x.py"], "--nnodes above 1 needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:x", "x.py"], "is not HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", "x.py"], "need a secret"),
        (["--nnodes", "2", "--rdzv-conf", "is_host", "x.py"], "'is_host' is not NAME=VALUE"),
        (["--no-such-option", "1", "x.py"], "unrecognized arguments: --no-such-option"),
        (["--nproc-per-node", "2"], "no SCRIPT given"),
        (["-r", "10:4", "x.py"], "'4' is not 0 (none), 1 (stdout)"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(argv, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(argv, {})
    assert exit_info.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1
