"""`import torch` knows the backend, imports nothing of ours, and survives a broken package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import run_echelon

pytestmark = pytest.mark.ranks

_PROGRAM = """\
import sys, torch.distributed as dist, torch
dist.init_process_group("{backend}", pg_options={options})
x = torch.ones(3)
dist.all_reduce(x)
assert x.tolist() == [float(dist.get_world_size())] * 3, x
sys.stdout.write("rank %d done\\n" % dist.get_rank())
{end}
"""


def _program(folder: Path, backend: str = "echelon", options: str = "None", end: str = "") -> str:
    path = folder / "program.py"
    path.write_text(_PROGRAM.format(backend=backend, options=options, end=end))
    return str(path)


def _python(*argv: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_importing_torch_loads_nothing_of_ours():
    code = "import sys, torch, torch.distributed as d\n"
    code += "assert 'echelon' in d.Backend.backend_list\n"
    code += "print([m for m in sys.modules if m.split('.')[0] == 'echelon'])"
    done = _python("-c", code)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.parametrize("broken", ["echelon/__init__.py", "echelon/dist/__init__.py"])
def test_a_broken_package_breaks_no_import_of_torch(tmp_path, broken):
    bad = tmp_path / "bad"
    (bad / broken).parent.mkdir(parents=True)
    (bad / "echelon/__init__.py").write_text("")
    (bad / broken).write_text("raise RuntimeError('broken on purpose')")
    code = "import torch, torch.distributed as d\nprint('torch is fine')\n"
    code += "d.init_process_group('echelon', store=d.HashStore(), rank=0, world_size=1)"
    done = _python("-c", code, folder=bad)
    assert done.stdout.strip() == "torch is fine"
    assert done.returncode == 1
    assert done.stderr.strip().endswith("RuntimeError: broken on purpose")


def test_a_torch_without_distributed_is_left_alone():
    code = "import sys, types, echelon_torch_autoload as ours\n"
    code += "ours.register()\nsys.modules['torch.distributed'] = types.ModuleType('none')\n"
    code += "ours.register()\nprint('quiet')"
    done = _python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("quiet", "")


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_unmodified_programs_run_under_torchrun_and_end_cleanly(tmp_path, end):
    done = _python("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
                   _program(tmp_path, end=end))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 1 done" in done.stdout
    assert "Error" not in done.stderr


def test_unmodified_programs_run_under_our_launcher(tmp_path):
    options = "__import__('echelon.dist').dist.Options(reduction='rank_ordered')"
    program = _program(tmp_path, "cpu:echelon,cuda:echelon", options)
    done = run_echelon(
        "run", "--nproc-per-node=2", f"--run-dir={tmp_path / 'run'}", program, timeout_s=150
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 done" in done.stdout


def test_wrong_options_are_one_clear_error(tmp_path):
    done = run_echelon(
        "run",
        "--nproc-per-node=1",
        f"--run-dir={tmp_path / 'run'}",
        _program(tmp_path, options="3"),
        timeout_s=150,
    )
    assert done.returncode == 1
    assert (
        "TypeError: pg_options of backend 'echelon' must be echelon.dist.Options(...)"
        in done.stderr
    )
