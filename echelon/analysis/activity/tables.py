"""Tables of regular expressions that map a stack frame to an activity.

Each row is a pair `(path, function)` of patterns. An empty function pattern matches any function.
Paths are written with `/`. The rows are based on recorded stacks of real programs (see
`tests/data/stacks`) and on the folder layouts of known libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from echelon.analysis.activity.doing import Doing


class Row(NamedTuple):
    """A pattern that matches one kind of frame."""

    path: re.Pattern[str]
    function: re.Pattern[str]


def _table(*rows: tuple[str, str]) -> tuple[Row, ...]:
    return tuple(Row(re.compile(path), re.compile(function)) for path, function in rows)


_C10D = r"torch/distributed/distributed_c10d\.py$"
_MEETING = r"^(?:init_process_group|_new_process_group_helper|_store_based_barrier|new_group\w*)$"

# Frames between the innermost one and the user's code: what the user's line called.
CALLED: tuple[tuple[Doing, tuple[Row, ...]], ...] = (
    (
        Doing.MEETING,
        _table(
            (_C10D, _MEETING),
            (r"torch/distributed/rendezvous\.py$", ""),
            (r"torch/distributed/elastic/", ""),
        ),
    ),
    (Doing.STORE, _table((r"/echelon/store/", ""))),
    (
        Doing.COLLECTIVE,
        _table(
            (_C10D, r"^(?!destroy_process_group|get_|is_)"),
            (r"torch/distributed/_functional_collectives\.py$", ""),
            (r"torch/distributed/nn/functional\.py$", ""),
            (r"torch/distributed/tensor/_collective_utils\.py$", ""),
            (r"torch/distributed/pipelining/schedules\.py$", r"^_wait_batch_p2p$"),
            (r"torch/distributed/(?:fsdp|_composable)/", r"wait_for|^_wait|all_gather_copy"),
            (r"torch/distributed/utils\.py$", r"^_(?:sync|verify)_"),
            (r"torch/nn/parallel/distributed\.py$", r"^_(?:sync|verify|pass_sync)|buffers$"),
            (r"/deepspeed/comm/|/horovod/|/mpi4py/|/megatron/core/.*communic", ""),
            (r"/echelon/dist/(?!checkpoint/|pipeline/|fsdp/)", ""),
        ),
    ),
    (
        Doing.DEVICE,
        _table(
            (r"torch/(?:cuda|xpu|accelerator)/(?:__init__|streams)\.py$", r"^(?:synchronize|wait)"),
        ),
    ),
    (Doing.BACKWARD, _table((r"torch/autograd/graph\.py$", r"^_engine_run_backward$"))),
)

# Frames anywhere in the stack: a phase that may run the user's code below it. The table is searched
# in order, so that reading a file for a batch is loading.
PHASES: tuple[tuple[Doing, tuple[Row, ...]], ...] = (
    (
        Doing.LOADING,
        _table(
            (r"torch/utils/data/(?:dataloader|_utils/(?:fetch|worker|pin_memory))\.py$", ""),
            (r"torch/utils/data/datapipes/|/torchdata/", ""),
            (r"-packages/(?:datasets|webdataset|wids|litdata|ffcv|petastorm|grain|tfrecord)/", ""),
            (r"-packages/nvidia/dali/|-packages/streaming/base/|-packages/ray/data/", ""),
            (r"/tensorflow/python/data/|/tensorflow_datasets/|/torch_geometric/loader/", ""),
            (r"/accelerate/data_loader\.py$", r"^(?:__iter__|_fetch|__next__)"),
            (r"/(?:lightning|pytorch_lightning)/.*(?:fetchers|combined_loader)\.py$", "__next__"),
        ),
    ),
    (
        Doing.CHECKPOINT,
        _table(
            (r"torch/serialization\.py$", ""),
            (r"torch/distributed/checkpoint/", ""),
            (r"-packages/(?:safetensors|orbax|tensorstore|torchsnapshot)/", ""),
            (r"/echelon/dist/checkpoint/", ""),
            (r"/(?:lightning|pytorch_lightning)/.*checkpoint", r"save|load|^_write"),
            (r"/deepspeed/.*checkpoint", r"save|load"),
            (r"-packages/(?:fsspec|s3fs|gcsfs|adlfs|botocore|boto3|s3transfer)/", ""),
            (r"-packages/(?:google/cloud/storage|azure/storage|smart_open)/", ""),
        ),
    ),
    (
        Doing.COMPILING,
        _table(
            (r"torch/_dynamo/(?:symbolic_convert|convert_frame|bytecode_transformation)\.py$", ""),
            (r"torch/_inductor/(?:async_compile|cpp_builder|scheduler|graph|lowering)\.py$", ""),
            (r"torch/_inductor/(?:codegen/|compile_fx\w*\.py$|compile_worker/)", "(?<!__call__)$"),
            (r"torch/_functorch/_?aot_autograd", r"^create_aot|^aot_dispatch|_compile$"),
            (r"/triton/(?:compiler|backends)/", ""),
            (r"torch/utils/cpp_extension\.py$", r"^(?:_jit_compile|load|_run_ninja)"),
            (r"torch/utils/file_baton\.py$", r"^wait$"),
        ),
    ),
)

# What the standard library waits for on behalf of the line that called it.
WAITS: tuple[tuple[Doing, tuple[Row, ...]], ...] = (
    (Doing.CHILD, _table((r"/subprocess\.py$", ""), (r"/multiprocessing/popen_\w+\.py$", ""))),
    (
        Doing.NETWORK,
        _table(
            (r"/(?:socket|ssl)\.py$|/http/client\.py$|/urllib/request\.py$", ""),
            (r"-packages/(?:urllib3|requests|httpx|httpcore|aiohttp|grpc)/", ""),
        ),
    ),
    (
        Doing.LOCK,
        _table(
            (r"/(?:threading|queue)\.py$", r"^(?:wait|acquire|get|put|join|_wait|__enter__)"),
            (r"/multiprocessing/(?:synchronize|queues|connection|managers|pool)\.py$", ""),
            (r"/concurrent/futures/", ""),
            (r"-packages/filelock/", ""),
        ),
    ),
)

IMPORTS = _table((r"^<frozen importlib\._bootstrap", r"^_(?:find_and_load|load_unlocked)"))

# C functions in or through which a thread waits, innermost first.
C_WAITS: tuple[tuple[Doing, re.Pattern[str]], ...] = (
    (Doing.LOCK, re.compile(r"^PyThread_acquire_lock|^_PyMutex_Lock|^sem_(?:timed)?wait")),
    (Doing.CHILD, re.compile(r"^(?:wait4|waitid|__wait4|__waitpid|waitpid)\b")),
    (Doing.NETWORK, re.compile(r"^(?:__)?(?:recv|recvfrom|recvmsg|connect|accept4?)\b")),
    (Doing.LOCK, re.compile(r"^(?:__)?(?:flock|lockf|fcntl64)\b")),
)
C_CONDITION = re.compile(r"^(?:__)?pthread_cond_(?:timed|clock)?wait")
C_WORK = re.compile(r"c10d4Work|ProcessGroup\w*4wait|gloo9transport|UnboundBuffer4?wait")
C_NCCL = re.compile(r"libnccl|\bnccl[A-Z]\w+|cudaStreamSynchronize|cudaEventSynchronize")
C_TAKES_LOCK = re.compile(r"^ *(?:\? )?(?:take_gil|PyEval_AcquireThread|PyGILState_Ensure)\b")
C_SLEEP = re.compile(r"^(?:__)?(?:clock_)?nanosleep\b|^pause\b")
C_POLL = re.compile(r"^(?:__)?p?poll\b")
C_TORCH = re.compile(r"libtorch_(?:cpu|cuda|python)|libc10")


def match(rows: Iterable[Row], path: str, function: str) -> bool:
    """Return whether a frame matches one of the given rows."""
    return any(row.path.search(path) and row.function.search(function) for row in rows)
