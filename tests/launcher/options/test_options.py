"""The command line: torchrun's spelling, defaults from the environment, one line for bad usage."""

from __future__ import annotations

import sys

import pytest

from echelon.launcher.options.options import parse


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
        (["--nproc-per-node", "0", "x.py"], "must be from 1 to"),
        (
            ["--nproc-per-node", "two", "x.py"],
            "expected a number, 'auto', 'cpu', 'gpu' or 'xpu', got 'two'",
        ),
        (["--stall-timeout", "0", "x.py"], "must be finite and above 0, got 0"),
        (["--stall-timeout", "nan", "x.py"], "must be finite and above 0, got nan"),
        (["--max-restarts", "-1", "x.py"], "must be at least 0, got -1"),
        (["--on-stall", "explode", "x.py"], "invalid choice: 'explode'"),
        (["--on-loss", "grow", "x.py"], "invalid choice: 'grow'"),
        (["--min-ranks", "0", "x.py"], "--min-ranks: must be at least 1, got 0"),
        (
            ["--on-loss", "shrink", "--nproc-per-node", "3", "--min-ranks", "5", "x.py"],
            "--min-ranks 5: the job has only 3 ranks",
        ),
        (["--nnodes", "3:2", "x.py"], "expected 1 <= MIN <= MAX, got 3:2"),
        (["--nnodes", "2", "x.py"], "--nnodes above 1 needs --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:x", "x.py"], "must be HOST:PORT, got"),
        (["--nnodes", "2", "--rdzv-endpoint", "127.0.0.1", "x.py"], "need a shared secret"),
        (["--nnodes", "2", "--rdzv-conf", "is_host", "x.py"], "expected NAME=VALUE, got 'is_host'"),
        (["--no-such-option", "1", "x.py"], "unrecognized arguments: --no-such-option"),
        (["--nproc-per-node", "2"], "no SCRIPT given"),
        (["-r", "10:4", "x.py"], "expected 0 (none), 1 (stdout)"),
        (["--rdzv-conf", "join_timout=3", "x.py"], "unknown setting 'join_timout'"),
        (["--rdzv-conf", "is_host=perhaps", "x.py"], "is_host=perhaps: must be true or false"),
        (["--rdzv-conf", "lost_after=0.1", "x.py"], "must be at least 1 s"),
        (["--signals-to-handle", "SIGTERM,SIGFOO", "x.py"], "unknown signal 'SIGFOO'"),
        (["--signals-to-handle", "SIGKILL", "x.py"], "signal SIGKILL cannot be caught"),
        (["--numa-binding", "core", "x.py"], "invalid choice: 'core'"),
        (["--start-method", "threads", "x.py"], "invalid choice: 'threads'"),
        (["--rdzv-cert", "/no/such", "x.py"], "--rdzv-cert /no/such: No such file"),
        (["--rdzv-cert", __file__, "x.py"], "not a PEM file"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(argv, said, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse(argv, {})
    assert exit_info.value.code == 2
    text = capsys.readouterr().err
    assert said in text
    assert text.count("\n") == 1


def test_a_flag_can_be_set_in_the_environment(script):
    assert parse(["x.train"], {"PET_MODULE": "1", "PET_STANDALONE": "1"}).program[-2:] == (
        "-m", "x.train",
    )  # fmt: skip
    assert parse([script], {"PET_VIRTUAL_LOCAL_RANK": "1"}).virtual_local_rank
    assert not parse([script], {"PET_VIRTUAL_LOCAL_RANK": "0"}).virtual_local_rank


_TORCHRUNS = """
--nnodes=1:1 --nproc_per_node=1 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id=7
--rdzv_conf=timeout=5,read_timeout=60,is_host=1 --max_restarts=0 --monitor_interval=5
--start_method=spawn --event_log_handler=console --role=trainer --log_dir=logs -r 0:1,1:2 -t 3
--local_ranks_filter=0 --duplicate_stdout_filters=a,,b --duplicate_stderr_filters=c --node_rank=0
--master_addr=127.0.0.1 --master_port=29500 --local_addr=10.0.0.1 --logs_specs=mine
--numa_binding=node --signals_to_handle=SIGTERM,SIGUSR1 --shutdown_timeout=3 --virtual_local_rank
--run_path --standalone
"""


@pytest.mark.parametrize("dashed", [False, True], ids=["underscores", "dashes"])
def test_every_option_of_torchruns_is_taken_and_what_changes_nothing_is_said(script, dashed):
    argv = _TORCHRUNS.split()
    if dashed:
        argv = [_dashed(text) for text in argv]
    options = parse([*argv, script], {})
    assert (options.role, options.rdzv_id, options.shutdown_timeout_s) == ("trainer", "7", 3.0)
    assert (options.numa_binding, options.virtual_local_rank) == ("node", True)
    assert [number.name for number in options.signals] == ["SIGTERM", "SIGUSR1"]
    assert options.conf.join_timeout_s == 5.0
    said = [note.partition(" has no effect")[0] for note in options.notes]
    assert said == [
        "--monitor-interval", "--start-method", "--event-log-handler", "--logs-specs",
        "--local-addr", "--run-path", "--rdzv-conf read_timeout",
        "--master-port",
    ]  # fmt: skip


def _dashed(text: str) -> str:
    name, equals, value = text.partition("=")
    return name.replace("_", "-") + equals + value


def test_every_option_of_torchruns_is_a_variable_too(script):
    environ = {}
    for text in _TORCHRUNS.replace("-r 0:1,1:2 -t 3", "--redirects=0:1,1:2 --tee=3").split():
        name, _, value = text.removeprefix("--").partition("=")
        environ[f"PET_{name.upper()}"] = value or "1"
    assert parse([script], environ).notes == parse([*_TORCHRUNS.split(), script], {}).notes
    assert parse([script], environ).logs == parse([*_TORCHRUNS.split(), script], {}).logs


def test_on_several_nodes_the_number_of_ranks_is_not_known_yet(script):
    environ = {"ECHELON_SECRET": "a-secret-of-the-tests"}
    options = parse(
        ["--on-loss", "shrink", "--min-ranks", "2", "--nnodes", "2", "--rdzv-endpoint",
         "127.0.0.1:1", script],
        environ,
    )  # fmt: skip
    assert (options.on_loss, options.min_ranks, options.notes) == ("shrink", 2, ())


def test_a_least_number_of_ranks_without_losses_to_survive_has_no_effect(script):
    options = parse(["--min-ranks", "2", script], {})
    assert options.notes == ("--min-ranks has no effect without --on-loss shrink or replace",)


def test_lost_ranks_can_be_replaced(script):
    options = parse(["--nproc-per-node", "2", "--on-loss", "replace", script], {})
    assert (options.on_loss, options.max_replacements, options.notes) == ("replace", 10, ())
    ignored = parse(["--max-replacements", "3", script], {})
    assert ignored.notes == ("--max-replacements has no effect without --on-loss replace",)


@pytest.mark.parametrize(
    ("name", "value"),
    [("ON_LOSS", "Shrink"), ("RESTART_POLICY", "sometimes"), ("LOG_FORMAT", "xml")],
)
def test_a_value_from_the_environment_is_checked_as_one_on_the_command_line(
    script, capsys, name, value
):
    with pytest.raises(SystemExit) as exit_info:
        parse([script], {f"PET_{name}": value})
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"PET_{name}: invalid choice: '{value}' (choose from '" in line


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--nproc-per-node", "1"], "no rank is left after a loss"),
        (["--nproc-per-node", "2", "--min-ranks", "2"], "--min-ranks allows no loss"),
        (["--nproc-per-node", "2"], ""),
    ],
)
def test_losses_that_no_job_survives_are_noted_at_the_start(script, argv, why):
    said = (f"--on-loss shrink has no effect: {why}",) if why else ()
    assert parse(["--on-loss", "shrink", *argv, script], {}).notes == said
