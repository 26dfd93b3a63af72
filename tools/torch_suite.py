"""Run torch's own distributed tests over a backend, and compare two backends.

    python tools/torch_suite.py run echelon --out echelon.json      # 4 min on two cores
    python tools/torch_suite.py run echelon --out echelon.json --world-size 8    # what asks for it
    python tools/torch_suite.py run gloo --out gloo.json            # and again with 8
    python tools/torch_suite.py compare echelon.json gloo.json

The tests are `torch.testing._internal.distributed.distributed_test` of the installed wheel (they
need `pip install expecttest`). Many of them skip backends with unknown names. The module is
therefore configured for Gloo, which enables all of Gloo's tests, and whenever it creates a group,
the backend under test replaces Gloo. Results are written after each test, and a run continues
where an earlier one with the same file stopped. Torch's harness checks only rank 0's exit code;
here, every rank's counts.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import textwrap
import time
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_NAMES_ITS_BACKEND = ("test_get_backend", "test_Backend_enum_class")
_NEEDS_MORE_RANKS = "Skipped due to small world size."
_CHOSEN = ("TORCH_SUITE_BACKEND", "WORLD_SIZE", "BACKEND")  # the tests read them at import
_ENVIRONMENT = {
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def _load() -> Any:
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("WORLD_SIZE", "4")
    os.environ.setdefault("BACKEND", "gloo")
    module: Any = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    backend = os.environ.setdefault("TORCH_SUITE_BACKEND", "echelon")
    for maker in ("init_process_group", "new_group"):
        setattr(module.dist, maker, _renaming(getattr(module.dist, maker), backend))
    return module


def _renaming(make: Callable[..., Any], backend: str) -> Callable[..., Any]:
    @functools.wraps(make)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        args = tuple(backend if arg == "gloo" else arg for arg in args)
        if kwargs.get("backend") == "gloo":
            kwargs["backend"] = backend
        return make(*args, **kwargs)

    return renamed


_tests = _load()


class DistributedSuite(_tests.TestDistBackend, _tests.DistributedTest._DistTestBase):
    """Torch's test suite, which runs each test in new processes."""

    def setUp(self) -> None:
        """Start the processes of all ranks."""
        super().setUp()
        self._start_processes(_process)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)
        codes = [process.exitcode for process in self.processes]
        assert fn in self.skip_return_code_checks or set(codes) == {0}, f"exit codes {codes}"


def _process(*, target: Callable[..., None], name: str, args: Any, kwargs: Any) -> Any:
    """Create a process that the fork server starts with this process's current environment."""
    return _CONTEXT.Process(target=_enter, name=name, args=(dict(os.environ), target, args, kwargs))


def _enter(environ: dict[str, str], target: Callable[..., None], args: Any, kwargs: Any) -> None:
    os.setsid()
    os.environ.update(environ)
    if args[1] in _NAMES_ITS_BACKEND:
        _tests.BACKEND = os.environ["TORCH_SUITE_BACKEND"]
    target(*args, **kwargs)


def _run_one(name: str) -> dict[str, Any]:
    test = DistributedSuite(name)
    result = unittest.TestResult()
    began = time.monotonic()
    test.run(result)
    _end(test)
    seconds = round(time.monotonic() - began, 1)
    if result.skipped:
        return {"result": "skip", "why": result.skipped[0][1], "seconds": seconds}
    bad = result.errors + result.failures
    if bad:
        return {"result": "fail", "why": _tail(bad[0][1]), "seconds": seconds}
    return {"result": "pass", "why": "", "seconds": seconds}


def _end(test: DistributedSuite) -> None:
    """Kill the ranks that are still running, because the test may have been aborted."""
    for process in getattr(test, "processes", ()):  # none if it was skipped before
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _tail(text: str) -> str:
    said = [
        line for line in text.splitlines() if re.match(r"^(\w+\.)*\w*(Error|Exception)\b", line)
    ]
    said = [line for line in said if not line.startswith("RuntimeError: Process ")]
    return "\n".join([*dict.fromkeys(said), "----", text[-3000:]])


def run(options: argparse.Namespace) -> int:
    """Run the tests that do not have a result yet; return the exit code."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(options.timeout)
    _CONTEXT.set_forkserver_preload(["torch", _tests.__name__])
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    names = unittest.TestLoader().getTestCaseNames(DistributedSuite)
    chosen = [name for name in names if re.search(options.match, name)]
    for name in chosen:
        if name in results and not _is_open(results[name], options):
            continue
        results[name] = _run_one(name)
        options.out.write_text(json.dumps(results, indent=1))
        first = results[name]["why"].splitlines()[:1]
        print(
            f"{results[name]['result']:5} {results[name]['seconds']:6} s  {name}  {first}",
            flush=True,
        )
    print(Counter(one["result"] for one in results.values()))
    return 0


def _is_open(known: dict[str, Any], options: argparse.Namespace) -> bool:
    """Return whether a test that already has a result must run again."""
    if known["result"] == "skip":
        return known["why"] == _NEEDS_MORE_RANKS and options.world_size == "8"
    return known["result"] == "fail" and options.again


def compare(options: argparse.Namespace) -> int:
    """Print the passed, failed and inapplicable tests as Markdown; return the exit code.

    A test is inapplicable if the reference backend skips it.
    """
    ours, other = (json.loads(path.read_text()) for path in (options.results, options.reference))
    skipped = {name: one["why"] for name, one in other.items() if one["result"] == "skip"}
    applicable = {name: one for name, one in ours.items() if name not in skipped}
    failed = {n: one["why"] for n, one in applicable.items() if one["result"] != "pass"}
    num_passed = len(applicable) - len(failed)
    print(f"{len(ours)} tests, {len(applicable)} applicable, {num_passed} pass.")
    print(f"\n### Fail: {len(failed)}\n\n{_grouped(failed)}")
    print(f"\n### Not applicable: {len(skipped)}\n\n{_grouped(skipped)}")
    names = ", ".join(_short(name) for name in sorted(applicable) if name not in failed)
    print(f"\n### Pass: {num_passed}\n\n{textwrap.fill(names, 100)}")
    return 0 if num_passed >= 0.9 * len(applicable) else 1


def _grouped(reasons: dict[str, str]) -> str:
    """Return a Markdown table that groups tests by their reasons."""
    groups: dict[str, list[str]] = {}
    for name, why in sorted(reasons.items()):
        groups.setdefault((why.splitlines() or ["?"])[0].replace("|", "/")[:90], []).append(name)
    rows = [f"| {why} | {', '.join(map(_short, names))} |" for why, names in groups.items()]
    return "\n".join(["| reason | tests |", "|---|---|", *sorted(rows)])


def _short(name: str) -> str:
    return f"`{name.removeprefix('test_')}`"


def main() -> int:
    """Run the action given on the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("backend")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--world-size", default="4")
    one.add_argument("--as-itself", action="store_true", help="tell the tests the true backend")
    one.add_argument("--match", default="", help="only tests whose name has this pattern")
    one.add_argument("--again", action="store_true", help="run failed tests again")
    one.add_argument("--timeout", type=int, default=60, help="seconds that one test may take")
    one.set_defaults(act=run)
    two = commands.add_parser("compare")
    two.add_argument("results", type=Path)
    two.add_argument("reference", type=Path)
    two.set_defaults(act=compare)
    options = parser.parse_args()
    if options.act is run:
        told = options.backend if options.as_itself else "gloo"
        wanted = dict(zip(_CHOSEN, (options.backend, options.world_size, told), strict=True))
        if {name: os.environ[name] for name in _CHOSEN} != wanted:
            os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)  # noqa: S606
    return int(options.act(options))


if __name__ == "__main__":
    sys.exit(main())
