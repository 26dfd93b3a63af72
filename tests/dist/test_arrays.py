"""Zero-copy views: what is viewed shares memory, and what cannot be viewed says why."""

from __future__ import annotations

import array
import types

import ml_dtypes
import numpy as np
import pytest

from echelon.dist.operation.arrays import view

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint64", "bool"])
def test_a_numpy_array_is_viewed_in_place(dtype):
    x = np.zeros((2, 3), dtype)
    seen = view(x, "x", writable=True)
    seen.data[4] = 1
    assert x[1, 1] == 1
    assert (seen.dtype, seen.shape, str(seen)) == (dtype, (2, 3), f"{dtype}[2, 3]")


def test_ml_dtypes_bfloat16_travels_as_its_bits():
    x = np.ones(3, ml_dtypes.bfloat16)
    seen = view(x, "x", writable=True)
    assert seen.dtype == "bfloat16"
    assert seen.data.dtype == np.uint16
    seen.data[0] = 0x4000
    assert float(x[0]) == 2.0


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int64", "uint8", "bool"]
)
def test_a_torch_tensor_is_viewed_in_place(dtype):
    x = torch.zeros(4, 2, dtype=getattr(torch, dtype))
    seen = view(x, "x", writable=True)
    seen.data.view(np.uint8)[:] = 1
    assert (seen.dtype, seen.shape) == (dtype, (4, 2))
    assert x.view(torch.uint8).eq(1).all()


def test_a_tensor_that_requires_grad_is_viewed():
    x = torch.zeros(2, requires_grad=True)
    view(x, "x", writable=True).data[0] = 5
    assert x[0] == 5


def test_scalars_and_empty_arrays_have_views():
    assert len(view(np.array(3.0), "x", writable=True).data) == 1
    assert len(view(np.empty((0, 7)), "x", writable=True).data) == 0
    assert len(view(torch.empty(0), "x", writable=True).data) == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: np.zeros((4, 4))[:, ::2], "not contiguous"),
        (lambda: np.zeros((4, 4)).T, "not contiguous"),
        (lambda: torch.zeros(4, 4).t(), "not contiguous"),
        (lambda: torch.zeros(4, 4).to_sparse(), "not contiguous"),
        (lambda: np.zeros(3, ">f4"), "byte order"),
        (lambda: np.zeros(3, object), "dtype object"),
        (lambda: torch.zeros(3, device="meta"), "meta"),
        (lambda: [1.0, 2.0], "got list"),
        (lambda: array.array("d", [1.0]), "got array"),
        (lambda: 3.0, "got float"),
        (lambda: None, "got NoneType"),
        (lambda: np.ma.masked_array([1.0, 2.0], [False, True]), "masked"),
        (lambda: np.array(["text"], np.dtypes.StringDType()), "StringDType.* objects"),
    ],
)
def test_what_cannot_be_viewed_is_a_value_error_that_names_the_argument(make, said):
    with pytest.raises(ValueError, match=f"out: .*{said}"):
        view(make(), "out", writable=True)


def test_a_read_only_array_is_an_input_only():
    x = np.zeros(3)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        view(x, "x", writable=True)
    assert len(view(x, "x", writable=False).data) == 3


class _OnlyDlpack:
    """An array of some other library: it has nothing but DLPack."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **kwargs):
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_any_dlpack_array_is_viewed_in_place():
    x = np.zeros(3, np.float32)
    view(_OnlyDlpack(x), "x", writable=True).data[1] = 2
    assert x[1] == 2


def test_a_tensors_storage_can_still_be_resized_after_it_was_sent():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(4)
    assert view(tensor, "x", writable=True).data.tolist() == [1.0] * 4
    tensor.untyped_storage().resize_(0)  # FSDP1 and PowerSGD do


def test_a_lazily_conjugated_tensor_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="conjugated"):
        view(torch.ones(2, dtype=torch.complex64).conj(), "x", writable=False)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_subclass_is_viewed_flat_over_the_same_memory():
    x = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    seen = view(x, "x", writable=True)
    assert (type(seen.data), seen.data.shape, seen.shape) == (np.ndarray, (4,), (2, 2))
    seen.data[3] = 9
    assert x[1, 1] == 9


def test_a_memory_mapped_file_is_viewed(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(5,))
    view(x, "x", writable=True).data[2] = 3
    assert x[2] == 3


class _OnDevice:
    """An array with the interface of CuPy's, and no memory."""

    def __init__(self, shape, strides=None, typestr="<f4", read_only=False):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "typestr": typestr, "data": (4096, read_only),
            "strides": strides,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), None), ((2, 3), (12, 4)), ((1, 3), (999, 4)), ((0, 3), (5, 5)), ((), ())],
)
def test_a_device_array_with_contiguous_strides_is_viewed(shape, strides):
    seen = view(_OnDevice(shape, strides), "x", writable=True)
    assert (seen.device, seen.dtype, seen.shape) == ("cuda", "float32", shape)
    assert len(seen.data) == np.prod(shape, dtype=int)


@pytest.mark.parametrize(
    ("device", "index"),
    [
        (None, 0),
        (types.SimpleNamespace(id=3), 3),  # CuPy's
        (types.SimpleNamespace(id=11, local_hardware_id=3), 3),  # JAX's: id 11 among all processes
    ],
)
def test_a_device_array_is_on_the_device_that_this_host_counts(device, index):
    array = _OnDevice((2, 3))
    array.device = device
    assert view(array, "x", writable=True).data.index == index


@pytest.mark.parametrize("strides", [(4, 8), (24, 4), (0, 4)])
def test_a_device_array_with_gaps_is_refused(strides):
    with pytest.raises(ValueError, match=r"x: .*not contiguous"):
        view(_OnDevice((2, 3), strides), "x", writable=False)


def test_a_read_only_device_array_is_an_input_only():
    assert len(view(_OnDevice((2,), read_only=True), "x", writable=False).data) == 2
    with pytest.raises(ValueError, match="read-only"):
        view(_OnDevice((2,), read_only=True), "x", writable=True)


class _Elsewhere(_OnlyDlpack):
    def __dlpack_device__(self):
        return (10, 0)


def test_a_dlpack_array_of_an_unknown_device_says_so():
    with pytest.raises(ValueError, match=r"out: .*on a device"):
        view(_Elsewhere(np.zeros(3)), "out", writable=True)


class _OnlyConverts:
    """An array whose dtype NumPy's DLPack does not know, as JAX's bfloat16 on the host."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **kwargs):
        raise BufferError("dtype is not supported")

    def __array__(self, dtype=None, copy=None):
        return np.ones(3, ml_dtypes.bfloat16)


def test_an_array_that_dlpack_cannot_carry_is_an_input_only():
    assert view(_OnlyConverts(), "x", writable=False).dtype == "bfloat16"
    with pytest.raises(ValueError, match="_OnlyConverts cannot be viewed"):
        view(_OnlyConverts(), "x", writable=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_jax_array_is_an_input_and_never_an_output(dtype):
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install '.[jax]'")
    x = jax.numpy.ones((2, 3), dtype)
    seen = view(x, "x", writable=False)
    assert (seen.dtype, seen.shape) == (dtype, (2, 3))
    assert seen.data.tobytes() == np.asarray(x).tobytes()
    with pytest.raises(ValueError, match=r"out: jax\w*\.ArrayImpl .*(read-only|cannot be viewed)"):
        view(x, "out", writable=True)


def test_a_cupy_array_is_viewed_on_its_device():
    cupy = pytest.importorskip("cupy", reason="cupy is not installed")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device is usable here")
    assert view(cupy.zeros(3), "x", writable=True).device == "cuda"
