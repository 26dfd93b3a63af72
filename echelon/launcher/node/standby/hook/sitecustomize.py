"""Pause a Python process before it runs its script, with the libraries already loaded.

[Note: how a standby waits] A standby is started with the rank's own command line, for example
`python -u train.py`. This folder is at the front of its PYTHONPATH, so the interpreter imports this
file before it opens the script. The file loads the libraries, and returns only when the agent
assigns the process to a rank. Then the interpreter runs the script as usual. `__main__`,
`sys.path[0]`, exit codes, tracebacks and the command line are the same as in any other process.

An error in this file must end the process, because the interpreter would otherwise run the script
without an assigned rank. For the same reason, the agent first starts one interpreter with
`ECHELON_STANDBY=check`, which exits in this file.

The variables that imports read from the environment are recorded. A rank with different values for
these variables cannot use this process. The code of this file imports nothing from the package,
because the program and the launcher might use different interpreters.

    agent -> standby   one byte, with the descriptors of a file and, optionally, of stdin; the file
                       contains {environ, gone, changed, cwd}: the rank's environment, the names of
                       the variables to remove and to change, and the working directory
    standby -> agent   {read, tested, hidden, set} and a newline, once the standby is ready
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # what type checkers take as True
if TYPE_CHECKING:
    import ast
    from types import FrameType, TracebackType

_KNOWN = frozenset(sys.modules)  # what every process has loaded

import atexit  # noqa: E402
import json  # noqa: E402 -- also what this file loads may be hidden by the script's folder
import socket  # noqa: E402
from _thread import get_ident  # noqa: E402

_IS_THERE = 42  # the exit code of the check
_VARIABLES = ("ECHELON_STANDBY", "ECHELON_STANDBY_FD", "PYTHONPATH")
_CAP_SYS_NICE = 23
_NAME = "echelon-standby"  # `fr-analyze --attach` takes a process of this name for no rank
# Variables that libraries read from C when they are loaded, so that no reading of them is noted.
_READ_FROM_C = (
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "GOMP_",
    "PYTORCH_",
    "TORCH_",
    "GLIBC_",
    "MALLOC_",
)
_SET_BY_LAUNCHER = (
    "RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ECHELON_",
    "TORCH_FR_", "TORCH_NCCL_", "TORCHCOMM_",
)  # fmt: skip
_HIGH_FD = 200
_BETWEEN_HOSTS = "echelon.dist.backends.gloo.transport"  # `init` imports it, and with it torch
_MAX_TEXT_BYTES = 16 << 20


class _Noted(os._Environ):  # type: ignore[type-arg]
    """An environment that records which variables are read."""

    read: set[str] = set()  # noqa: RUF012 -- one process, one environment
    tested: set[str] = set()  # noqa: RUF012

    def __getitem__(self, name: str) -> str:
        if isinstance(name, str):  # os.get_exec_path tries bytes, too
            self.read.add(name)
        return str(super().__getitem__(name))

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str):
            self.tested.add(name)
        try:
            super().__getitem__(name)
        except KeyError:
            return False
        return True


def _main() -> None:
    if os.environ.get("ECHELON_STANDBY") == "check":
        os._exit(_IS_THERE)
    given = json.loads(os.environ["ECHELON_STANDBY"])
    control = int(os.environ["ECHELON_STANDBY_FD"])
    os.set_inheritable(control, False)
    _leave_no_trace(given["pythonpath"])
    atexit.register(_end_if_failed)  # before all others, so that it runs after them
    _note_uncaught()
    before = dict(os.environ)
    own_name = _rename(_NAME)
    is_lowered = _lower_priority()
    names, changed = _listed(given["modules"]) or _named_in_script()
    os.environ.__class__ = _Noted
    try:
        _import_the_real_one()
        _load(names)
    finally:
        os.environ.__class__ = os._Environ
    hidden = _hidden(set(sys.modules) - _KNOWN)
    early = [name for name in changed if _is_read_early(name, before)]
    if is_lowered:
        _restore_priority()
    told = {"read": sorted(_Noted.read), "tested": sorted(_Noted.tested)}
    _wait(control, {**told, "hidden": hidden, "set": early[0] if early else ""})
    _rename(own_name)


def _leave_no_trace(pythonpath: str | None) -> None:
    """Remove the hook's traces from this process's environment and `sys.path`."""
    for name in _VARIABLES:
        os.environ.pop(name, None)
    if pythonpath is not None:
        os.environ["PYTHONPATH"] = pythonpath
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    sys.path_importer_cache.pop(here, None)


def _import_the_real_one() -> None:
    """Import the user's own `sitecustomize`, if any, which this file shadows."""
    from importlib import import_module

    own = sys.modules.pop("sitecustomize", None)
    try:
        import_module("sitecustomize")  # another file of this name
    except ImportError:
        pass
    except Exception as err:  # noqa: BLE001 -- as site.py does
        sys.stderr.write(f"Error in sitecustomize: {type(err).__name__}: {err}\n")
    if own is not None:
        sys.modules.setdefault("sitecustomize", own)


# ---- loading ----


def _load(names: list[str]) -> None:
    """Import modules, ignoring failures."""
    from importlib import import_module

    for name in names:
        try:
            import_module(name)
        except BaseException:  # noqa: BLE001, S112 -- the program imports it again, or never
            continue


def _is_read_early(name: str, before: dict[str, str]) -> bool:
    """Return whether an import read variable `name` before the program set it."""
    if name == "PYTHONPATH":  # what a standby was started with differs from what its rank has
        return False
    is_read = name in _Noted.read or name in _Noted.tested or name.startswith(_READ_FROM_C)
    is_the_programs = os.environ.get(name) == before.get(
        name
    )  # else an import has set it here, too
    return is_read and is_the_programs and not name.startswith(_SET_BY_LAUNCHER)


def _listed(path: str) -> tuple[list[str], list[str]] | None:
    """Return the modules that earlier ranks loaded, and the environment variables that they set.

    Return None if the file cannot be read.
    """
    try:
        with open(path) as file:
            told = json.load(file)
        names, changed = told["modules"], told["changed"]
        return [str(name) for name in names], [str(name) for name in changed]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _named_in_script() -> tuple[list[str], list[str]]:
    """Return installed modules that the script imports, and environment variables that it sets."""
    import ast
    from importlib.util import find_spec

    script = _script()
    if script is None:
        return [], []
    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, ValueError, SyntaxError):
        return [], []
    found: list[str] = []
    changed: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed += _texts([node.slice])
        elif isinstance(node, ast.Call):
            changed += _texts(node.args[:1])  # os.environ.setdefault, os.putenv
    if _changes_path(tree):  # it may import other files than those that are installed
        return [], changed
    roots = _installed_roots()
    names = []
    for name in dict.fromkeys(found):
        top = name.partition(".")[0]
        try:
            spec = find_spec(top)
        except (ImportError, ValueError):
            continue
        origin = (spec and spec.origin) or ""
        if top == "echelon" or origin.startswith(roots):
            names.append(name)
    if _spans_hosts() and any(f"{name}.".startswith("echelon.dist.") for name in names):
        names.append(_BETWEEN_HOSTS)
    return names, changed


def _spans_hosts() -> bool:
    """Return whether the job of the standby's rank runs on several nodes."""
    return os.environ.get("GROUP_WORLD_SIZE", "1") != "1"


def _changes_path(tree: ast.AST) -> bool:
    """Return whether a script might change `sys.path` other than by appending to it."""
    import ast

    found = [one for one in ast.walk(tree) if isinstance(one, (ast.Attribute, ast.ImportFrom))]
    paths = [one for one in found if _is_path(one)]
    harmless = [
        one
        for one in found
        if isinstance(one, ast.Attribute) and one.attr in ("append", "extend")
        if _is_path(one.value)
    ]
    return len(paths) > len(harmless)


def _is_path(node: ast.AST) -> bool:
    import ast

    if isinstance(node, ast.ImportFrom):
        return node.module == "sys" and any(alias.name in ("path", "*") for alias in node.names)
    if not isinstance(node, ast.Attribute) or node.attr != "path":
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "sys"


def _texts(nodes: list[ast.expr]) -> list[str]:
    values = [getattr(node, "value", None) for node in nodes]
    return [value for value in values if isinstance(value, str)]


def _installed_roots() -> tuple[str, ...]:
    import site
    import sysconfig

    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple({path.rstrip(os.sep) + os.sep for path in paths if path})


def _script() -> str | None:
    """Return the script's path as given on the command line; None for `-m` and `-c`."""
    given = sys.orig_argv[1:]
    while given and given[0].startswith("-"):
        if given[0] in ("-m", "-c"):
            return None
        given = given[1:]
    return given[0] if given else None


def _hidden(loaded: set[str]) -> str:
    """Return a file in the script's folder that would shadow a loaded module; "" if none would."""
    from importlib.machinery import PathFinder

    if getattr(sys.flags, "safe_path", False):
        return ""
    script = _script()
    folder = os.getcwd() if script is None else _folder_of(script)
    try:
        for name in sorted({one.partition(".")[0] for one in loaded}):
            spec = PathFinder.find_spec(name, [folder])
            file = getattr(sys.modules.get(name), "__file__", None)
            if spec is None or spec.loader is None or spec.origin is None:
                continue
            if file is None or os.path.realpath(spec.origin) != os.path.realpath(file):
                return spec.origin
        return ""
    finally:
        sys.path_importer_cache.pop(folder, None)


def _folder_of(script: str) -> str:
    """Return the folder that the interpreter adds to the front of `sys.path` for a script."""
    if os.path.isdir(script):
        return script
    import zipfile

    return script if zipfile.is_zipfile(script) else os.path.dirname(os.path.realpath(script))


# ---- priority, and the process's name ----


def _lower_priority() -> bool:
    """Lower this process's priority if the change can be undone; return whether it was lowered."""
    try:
        with open("/proc/self/status") as file:
            (mask,) = (line.split()[1] for line in file if line.startswith("CapEff:"))
        is_usual = os.sched_getscheduler(0) == os.SCHED_OTHER  # else its rank keeps what it has
        if not is_usual or not int(mask, 16) >> _CAP_SYS_NICE & 1:
            return False
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _restore_priority() -> None:
    """Restore the usual priority of all threads, including those that the libraries started."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
        except OSError:
            continue


def _rename(name: str) -> str:
    """Set the name that `ps` shows for this process; return the previous name."""
    try:
        with open("/proc/self/comm", "r+") as file:
            former = file.read().strip()
            file.seek(0)
            file.write(name)
        return former
    except OSError:
        return name


# ---- waiting ----


def _wait(control: int, told: dict[str, object]) -> None:
    """Wait until the agent assigns a rank, and adopt the rank's environment and working directory.

    The process exits if the agent has ended.
    """
    with socket.socket(fileno=control) as agent:
        agent.sendall(json.dumps(told).encode() + b"\n")
        data, descriptors, _, _ = socket.recv_fds(agent, 1, 2)
    if not data or not descriptors:
        os._exit(0)
    size = os.fstat(descriptors[0]).st_size
    given = json.loads(os.pread(descriptors[0], min(size, _MAX_TEXT_BYTES), 0))
    _keep(descriptors[0])
    if len(descriptors) > 1:
        os.dup2(descriptors[1], 0)
        os.close(descriptors[1])
    for name in given["gone"]:
        os.environ.pop(name, None)
    for name in given["changed"]:  # what an import has set stays, as in any process
        os.environ[name] = given["environ"][name]
    os.chdir(given["cwd"])


def _keep(file: int) -> None:
    """Keep a descriptor of the rank's environment file open, for `fr-analyze --attach`.

    The file gets a high descriptor number, so that the low numbers remain free for the program.
    """
    import fcntl

    try:
        fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
    except OSError:
        pass  # a low limit; attach shows the rank with whose environment the standby was started
    finally:
        os.close(file)


# ---- ending ----


_ended_with: list[type[BaseException]] = []  # the exception that the script did not catch
_main_thread = get_ident()


def _note_uncaught() -> None:
    """Install a hook that records the exception that ends the script."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if get_ident() == _main_thread and _is_outermost(sys._getframe().f_back):
            _ended_with.append(kind)
        before(kind, error, trace)

    sys.excepthook = hook


def _is_outermost(frame: FrameType | None) -> bool:
    """Return whether the interpreter called the hook, directly or through other echelon hooks."""
    while frame is not None and _is_echelons(frame.f_globals):
        frame = frame.f_back
    return frame is None


def _is_echelons(namespace: dict[str, object]) -> bool:
    """Return whether a namespace belongs to this file or to a module of echelon.

    A module name does not identify this file, because the user's own `sitecustomize` has the same
    name.
    """
    return namespace is globals() or str(namespace.get("__name__")).startswith("echelon.")


def _end_if_failed() -> None:
    """If the script failed, end its process without the interpreter's cleanup.

    This function is the last exit handler. With libraries such as torch, the cleanup takes about
    half a second, and a restart waits for every rank to end. A program ends as usual if it was
    interrupted, or if it has set its own `sys.excepthook`, which can choose another exit code.
    """
    is_own = _is_echelons(getattr(sys.excepthook, "__globals__", {}))
    if not _ended_with or not is_own or issubclass(_ended_with[0], KeyboardInterrupt):
        return
    _flush_files()
    ctypes = sys.modules.get("ctypes")
    if ctypes is not None:
        ctypes.CDLL(None).fflush(None)  # the output of C and C++
    os._exit(1)


def _flush_files() -> None:
    """Flush the buffers of all open files."""
    import gc
    import io

    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    buffers = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    for stream in sorted(buffers, key=lambda one: not isinstance(one, io.TextIOWrapper)):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _run() -> None:
    try:
        _main()
    except BaseException as err:  # noqa: BLE001 -- see the note: the script must not run
        sys.stderr.write(f"echelon: the standby failed: {type(err).__name__}: {err}\n")
        os._exit(1)


if __name__ == "sitecustomize" and "ECHELON_STANDBY" in os.environ:
    _run()
