"""Locate oneCCL's C library, load it with its dependencies, and call it through ctypes.

The `oneccl` wheel installs its libraries in the environment's `lib` folder; oneAPI uses its own
folders. The dynamic loader searches none of these folders, so this module loads the libraries by
their full paths. The module also selects the CPU plugin, unless the user has chosen another plugin.
A process can use only one plugin.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ID_BYTES = 4096
DTYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
REDUCE_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}
AVERAGE = 4
# The plugin's own way is a spinning worker thread beside each spinning caller: with more ranks than
# cores, 3 of them made 18 operations a second. Our calls have a thread of their own already, which
# does the work and yields while it waits: 370 a second.
_CPU_SETTINGS = {
    "CCL_PLUGIN": "ONECCL_LEGACY_CPU",
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_YIELD": "sched_yield",
}
_NAME = "libccl.so.2"
_CPU_PLUGIN = "libccl_legacy_cpu.so"
_MISSING = re.compile(r"(\S+): cannot open shared object file")
_MAX_DEPENDENCIES = 64
_CHECK_S = 60.0
_serves = ""  # the device for which this process has loaded it
_here = threading.local()  # the device that oneCCL has for this thread

# The calls, as `oneapi/ccl.h` declares them. All return an int, 0 for success. p: a pointer or a
# handle, z: size_t, i: int or an enum, u: uint32_t, id: the unique id, by value.
DECLARATIONS = {
    "GetUniqueId": "p",
    "CommInitRank": "p z id i",
    "CommDestroy": "p",
    "SetDevice": "u",
    "GroupStart": "",
    "GroupEnd": "",
    "AllReduce": "p p z i i p p",
    "ReduceScatter": "p p z i i p p",
    "AllGather": "p p z i p p",
    "Broadcast": "p p z i i p p",
    "AllToAll": "p p z i p p",
    "Reduce": "p p z i i i p p",
    "Send": "p z i i p p",
    "Recv": "p z i i p p",
}


class UniqueId(ctypes.Structure):
    """The ID that rank 0 generates and that all ranks use to join a communicator."""

    _fields_ = (("data", ctypes.c_char * ID_BYTES),)


def folder() -> Path | None:
    """Return the folder that contains the library, or None if oneCCL is not installed.

    A oneAPI installation is located through CCL_ROOT or ONEAPI_ROOT.
    """
    return next((path for path in _folders() if (path / _NAME).exists()), None)


def _folders() -> Iterator[Path]:
    for root in dict.fromkeys((sys.prefix, sys.exec_prefix, sys.base_prefix)):
        yield Path(root, "lib")
    if ccl := os.environ.get("CCL_ROOT"):
        yield Path(ccl, "lib")
    if oneapi := os.environ.get("ONEAPI_ROOT"):
        yield Path(oneapi, "ccl", "latest", "lib")


@functools.cache
def check(device: str) -> str:
    """Return the reason the library cannot be loaded for a kind of device, or "" if it can.

    The library is loaded in a separate process, so that this process remains unchanged.
    """
    if folder() is None:
        return (
            "oneCCL is not in this environment nor in CCL_ROOT or ONEAPI_ROOT: "
            "pip install '.[xccl]' (Linux, x86-64)"
        )
    program = f"from {__name__} import load; load({device!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, timeout=_CHECK_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        return f"oneCCL cannot be loaded: {err}"
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return f"oneCCL cannot be loaded: {said[-1] if said else f'exit code {done.returncode}'}"


@functools.cache
def load(device: str = "cpu") -> Any:
    """Load the library for arrays on the host ("cpu") or on Intel GPUs ("xpu").

    Raises:
        OSError: the installation is incomplete, or the library has already been loaded for the
            other kind of device.
    """
    global _serves
    path = folder()
    if path is None:
        raise OSError(f"{_NAME} is not installed in this environment")
    if _serves not in ("", device):
        raise OSError(
            f"oneCCL is already loaded for arrays on {_serves}, so this process cannot also use it "
            f"for arrays on {device}"
        )
    before = dict(os.environ)
    try:
        for name, value in _settings(path, device).items():
            os.environ.setdefault(name, value)
        library = _load(path / _NAME)
        if device == "cpu":
            _load(path / _CPU_PLUGIN)
    except OSError:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        raise
    _serves = device
    _declare(library)
    return library


def _settings(path: Path, device: str) -> dict[str, str]:
    common = {"CCL_LOG_LEVEL": "error", "FI_PROVIDER_PATH": str(path)}
    return common | _CPU_SETTINGS if device == "cpu" else common


def _load(path: Path) -> Any:
    for _ in range(_MAX_DEPENDENCIES):
        try:
            return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as err:
            missing = _MISSING.match(str(err))
            needed = path.parent / missing[1] if missing else path
            if needed == path or not needed.exists():
                raise
            _load(needed)
    raise OSError(f"{path.name} depends on more than {_MAX_DEPENDENCIES} missing libraries")


def _declare(library: Any) -> None:
    kinds: dict[str, Any] = {
        "p": ctypes.c_void_p, "z": ctypes.c_size_t, "i": ctypes.c_int, "u": ctypes.c_uint32,
        "id": UniqueId,
    }  # fmt: skip
    for name, kind in DECLARATIONS.items():
        function = getattr(library, f"oneccl{name}")
        function.argtypes = [kinds[one] for one in kind.split()]
        function.restype = ctypes.c_int
    library.onecclGetErrorString.argtypes = (ctypes.c_int,)
    library.onecclGetErrorString.restype = ctypes.c_char_p


class Communicator:
    """One oneCCL communicator.

    On host memory, each call blocks and cannot be aborted. On a device, each call is queued on a
    stream.
    """

    def __init__(
        self, size: int, rank: int, unique_id: bytes, device: str = "cpu", index: int = 0
    ) -> None:
        self._library = load(device)
        self._handle = ctypes.c_void_p()
        self._index = None if device == "cpu" else index
        self._set_device()
        joined = UniqueId()
        ctypes.memmove(ctypes.byref(joined), unique_id, ID_BYTES)
        self._check(
            "CommInitRank",
            self._library.onecclCommInitRank(ctypes.byref(self._handle), size, joined, rank),
        )

    def call(self, name: str, *arguments: Any, stream: int | None = None) -> None:
        """Call `oneccl<name>(*arguments, communicator, stream)`.

        Raises:
            RuntimeError: the library reported an error.
        """
        self._set_device()
        function = getattr(self._library, f"oneccl{name}")
        self._check(name, function(*arguments, self._handle, stream))

    def group(self, name: str) -> None:
        """Call `onecclGroupStart` or `onecclGroupEnd`."""
        self._check(name, getattr(self._library, f"oneccl{name}")())

    def close(self) -> None:
        """Destroy the communicator."""
        self._set_device()
        self._check("CommDestroy", self._library.onecclCommDestroy(self._handle))

    def _set_device(self) -> None:
        """Select the communicator's device on this thread, as the library requires."""
        if self._index is not None and getattr(_here, "index", None) != self._index:
            self._check("SetDevice", self._library.onecclSetDevice(self._index))
            _here.index = self._index

    def _check(self, name: str, result: int) -> None:
        if result:
            text = self._library.onecclGetErrorString(result) or b""
            raise RuntimeError(f"oneccl{name}: {text.decode(errors='replace')} ({result})")


def unique_id(device: str = "cpu") -> bytes:
    """Generate an ID for a new communicator."""
    drawn = UniqueId()
    result = load(device).onecclGetUniqueId(ctypes.byref(drawn))
    if result:
        raise RuntimeError(f"onecclGetUniqueId failed ({result})")
    return bytes(drawn)
