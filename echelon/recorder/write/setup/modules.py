"""List the installed modules that this process has imported, for the launcher's standbys.

A standby is a waiting process that has already imported these modules, so that a rank restarts
quickly (`echelon run --standby`). The launcher reads the list when it starts a standby.

The list contains installed modules, echelon's own modules, and the environment variables that the
program has changed. It is written when the recorder starts, after two steps and after ten seconds,
because libraries import many modules when the process group is created and in the first steps.
Standbys are started after two steps, so the list is written before the end of the second step is
recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import site
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from echelon.recorder.write.recorder import Recorder

STEADY_STEPS = 2  # steps after which a program has loaded most of what it needs
_AGAIN_S = 10.0


def list_modules(path: Path, recorder: Recorder) -> None:
    """Write the module list immediately, after two steps, and again after ten seconds.

    The last of these writes runs on another thread. The function never raises.
    """
    pid = os.getpid()
    _write(path, pid)
    recorder.call_after_steps(STEADY_STEPS, lambda: _write(path, pid))
    later = threading.Timer(_AGAIN_S, _write, (path, pid))
    later.daemon = True
    later.name = "echelon-modules"
    with contextlib.suppress(RuntimeError):  # no further thread can be started
        later.start()


def installed_modules() -> list[str]:
    """Return the names of all loaded modules that do not belong to the user's own program.

    These are modules of Python itself, of installed packages and of echelon, in import order.
    """
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    roots = tuple({path.rstrip(os.sep) + os.sep for path in paths if path})
    found = []
    for name, module in sys.modules.copy().items():  # a copy is one step; other threads import
        file = vars(module).get("__file__") if hasattr(module, "__dict__") else None
        is_echelons = name.partition(".")[0] == "echelon"
        if isinstance(file, str) and (is_echelons or file.startswith(roots)):
            found.append(name)
    return [name for name in found if name not in ("__main__", "sitecustomize")]


def changed_variables() -> list[str]:
    """Return the environment variables set, changed or deleted since this process started."""
    try:
        text = Path("/proc/self/environ").read_text(errors="surrogateescape")
    except OSError:
        return []
    pairs = (entry.partition("=") for entry in text.split("\0"))
    before = {name: value for name, equals, value in pairs if equals}
    names = before.keys() | os.environ.keys()
    return sorted(name for name in names if before.get(name) != os.environ.get(name))


def _write(path: Path, pid: int) -> None:
    if os.getpid() != pid:
        return
    with contextlib.suppress(OSError):  # on a full disk, a standby loads what the script names
        part = path.with_suffix(".part")
        told = {"modules": installed_modules(), "changed": changed_variables()}
        part.write_text(json.dumps(told))
        part.replace(path)
