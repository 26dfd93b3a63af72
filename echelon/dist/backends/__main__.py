"""List the backends that can run on this machine (`python -m echelon.dist.backends [--json]`)."""

from __future__ import annotations

import argparse
import dataclasses
import json

from echelon.dist.backends.registry import statuses


def main(argv: list[str] | None = None) -> int:
    """Print one line per backend, or the whole list as JSON if `--json` is given."""
    parser = argparse.ArgumentParser(prog="python -m echelon.dist.backends", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    options = parser.parse_args(argv)
    found = statuses()
    if options.json:
        print(json.dumps([dataclasses.asdict(status) for status in found]))
    else:
        for status in found:
            said = "ready" if status.ready else f"not ready: {status.reason}"
            print(f"{status.name:10} {said}{f' ({status.versions})' if status.versions else ''}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
