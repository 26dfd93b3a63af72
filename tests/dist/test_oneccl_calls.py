"""oneCCL's calls for Intel GPUs: all that can be held without such a GPU.

`_HEADER` is what `oneapi/ccl.h` of oneCCL 2022 declares, copied by hand as C types; nothing of the
code under test goes into it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import types

import pytest

from echelon.dist.backends.xccl import library

_HEADER = {
    "GetUniqueId": "onecclUniqueId*",
    "CommInitRank": "onecclComm_t*, size_t, onecclUniqueId, int",
    "CommDestroy": "onecclComm_t",
    "SetDevice": "uint32_t",
    "GroupStart": "",
    "GroupEnd": "",
    "AllReduce": "void*, void*, size_t, DataType, RedOp, onecclComm_t, void*",
    "ReduceScatter": "void*, void*, size_t, DataType, RedOp, onecclComm_t, void*",
    "AllGather": "void*, void*, size_t, DataType, onecclComm_t, void*",
    "Broadcast": "void*, void*, size_t, DataType, int, onecclComm_t, void*",
    "AllToAll": "void*, void*, size_t, DataType, onecclComm_t, void*",
    "Reduce": "void*, void*, size_t, DataType, RedOp, int, onecclComm_t, void*",
    "Send": "void*, size_t, DataType, int, onecclComm_t, void*",
    "Recv": "void*, size_t, DataType, int, onecclComm_t, void*",
}
_KINDS = {
    "void*": ctypes.c_void_p, "onecclComm_t": ctypes.c_void_p, "onecclComm_t*": ctypes.c_void_p,
    "onecclUniqueId*": ctypes.c_void_p, "onecclUniqueId": library.UniqueId,
    "size_t": ctypes.c_size_t, "int": ctypes.c_int, "uint32_t": ctypes.c_uint32,
    "DataType": ctypes.c_int, "RedOp": ctypes.c_int,
}  # fmt: skip
_STREAM = 7


class _Library:
    """Takes every call, and keeps it."""

    def __init__(self, fails=()):
        self.calls = []
        self._functions = {}
        self._fails = fails

    def __getattr__(self, name):
        if not name.startswith("oneccl"):
            raise AttributeError(name)
        return self._functions.setdefault(name, self._function(name))

    def _function(self, name):
        def call(*arguments):
            self.calls.append((name.removeprefix("oneccl"), arguments))
            return 3 if name.removeprefix("oneccl") in self._fails else 0

        return call


@pytest.mark.parametrize("name", _HEADER)
def test_a_call_is_declared_as_in_the_header(name):
    fake = _Library()
    library._declare(fake)
    function = getattr(fake, f"oneccl{name}")
    assert list(function.argtypes) == [_KINDS[one] for one in _HEADER[name].split(", ") if one]
    assert function.restype is ctypes.c_int


def test_an_id_is_as_large_as_in_the_header():
    assert ctypes.sizeof(library.UniqueId) == 4096


def _communicator(monkeypatch, fake, index=2):
    monkeypatch.setattr(library, "load", lambda *_: fake)
    monkeypatch.setattr(library, "_here", types.SimpleNamespace())
    return library.Communicator(4, 1, b"x" * 4096, "xpu", index)


def test_arguments_come_in_the_order_of_the_header(monkeypatch):
    torch = pytest.importorskip("torch")
    device = importlib.import_module("echelon.dist.backends.xccl.device")
    fake = _Library()
    made = device.XpuCommunicator(_communicator(monkeypatch, fake))
    assert [call for call, _ in fake.calls] == ["SetDevice", "CommInitRank"]
    fake.calls.clear()
    stream = types.SimpleNamespace(sycl_queue=_STREAM)
    x, y = torch.zeros(8), torch.zeros(2)
    for kind, source, target, op in (
        ("all_reduce", x, x, "avg"), ("reduce", x, None, "sum"), ("all_gather", y, x, ""),
        ("reduce_scatter", x, y, "max"), ("broadcast", x, x, ""), ("send", x, None, ""),
        ("recv", None, x, ""),
    ):  # fmt: skip
        made.launch(kind, source, target, op, 3, stream)
    assert len(fake.calls) == 7
    named = {
        "size_t": {"AllGather": 2, "ReduceScatter": 2},  # of one rank's part
        "DataType": 7, "int": 3, "RedOp": {"AllReduce": 4, "Reduce": 0, "ReduceScatter": 2},
    }  # fmt: skip
    for name, arguments in fake.calls:
        kinds = _HEADER[name].split(", ")
        assert len(arguments) == len(kinds), name
        assert arguments[-1] == _STREAM
        for kind, value in zip(kinds, arguments, strict=True):
            expected = named.get(kind)
            if isinstance(expected, dict):
                expected = expected.get(name, 8)
            assert expected in (None, value), (name, kind, value)


def test_each_thread_chooses_the_device_before_its_first_call(monkeypatch):
    import threading

    monkeypatch.setattr(library, "_here", threading.local())
    here, fake = library._here, _Library()
    made = _communicator(monkeypatch, fake)
    monkeypatch.setattr(library, "_here", here)
    made._set_device()
    fake.calls.clear()
    thread = threading.Thread(target=lambda: made.call("Send", stream=1))
    thread.start()
    thread.join()
    assert [name for name, _ in fake.calls] == ["SetDevice", "Send"]
    assert fake.calls[0][1] == (2,)


def test_an_error_inside_a_group_is_not_hidden_by_its_end():
    device = importlib.import_module("echelon.dist.backends.xccl.device")
    with pytest.raises(KeyError, match="ours"), device._group(_Library(fails=("GroupEnd",))):
        raise KeyError("ours")
    with (
        pytest.raises(RuntimeError, match="GroupEnd"),
        device._group(_Library(fails=("GroupEnd",))),
    ):
        pass


def test_a_failed_load_binds_the_process_to_nothing(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libccl.so.2").write_bytes(b"no library")
    monkeypatch.setattr(library, "_folders", lambda: iter([tmp_path / "lib"]))
    library.load.cache_clear()
    before = dict(os.environ)
    for device in ("cpu", "xpu"):
        with pytest.raises(OSError, match="libccl"):
            library.load(device)
    assert library._serves == ""
    assert dict(os.environ) == before
    library.load.cache_clear()


def test_the_library_of_a_oneapi_installation_is_found(monkeypatch, tmp_path):
    for name in ("prefix", "exec_prefix", "base_prefix"):
        monkeypatch.setattr(sys, name, str(tmp_path / "none"))
    monkeypatch.delenv("CCL_ROOT", raising=False)
    monkeypatch.setenv("ONEAPI_ROOT", str(tmp_path))
    assert library.folder() is None
    lib = tmp_path / "ccl" / "latest" / "lib"
    lib.mkdir(parents=True)
    (lib / "libccl.so.2").touch()
    assert library.folder() == lib
    monkeypatch.setenv("CCL_ROOT", str(tmp_path / "ccl" / "latest"))
    assert library.folder() == lib


def test_asking_whether_it_is_ready_leaves_the_process_as_it_is():
    program = (
        "import os; from echelon.dist.backends.xccl import backend, library; "
        "before = dict(os.environ); backend.not_ready(); "
        "assert dict(os.environ) == before; assert library._serves == ''; "
        "assert 'libccl.so' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
