"""Make the stacks in this folder: each situation hangs in processes of its own and is looked at.

    python tests/data/stacks/make.py OUT

Needs torch, py-spy and the right to trace. The parent loads torch and forks a process for each rank
of each situation; rank 1 of two sleeps in `hang`, rank 0 waits for it. Line numbers in the tests
are those of the run that made the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from echelon.host.children import look_at_children
from echelon.host.native_stacks import native_stacks
from echelon.host.stacks import spy_stacks
from echelon.host.threads import threads

TMP = Path(tempfile.mkdtemp())
STORE_PORT, MEETING_PORT = 29556, 29555
SETTLE_S = 40.0


def hang():
    time.sleep(3600)


def init(name, rank):
    dist.init_process_group("gloo", init_method=f"file://{TMP}/{name}", rank=rank, world_size=2)


def train(rank, step_once):
    for step in range(5):
        if rank == 1 and step == 3:
            hang()
        step_once()


def ddp(rank):
    init("ddp", rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    train(rank, lambda: model(torch.ones(2, 4)).mean().backward())


def compiled_ddp(rank):
    init("cddp", rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model = torch.compile(model, backend="aot_eager")
    train(rank, lambda: model(torch.ones(2, 4)).mean().backward())


def after_the_others(call):
    def situation(rank):
        init(call.__name__, rank)
        if rank == 1:
            hang()
        call()

    return situation


def all_reduce():
    dist.all_reduce(torch.ones(4))


def functional():
    print(functional_collectives.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1)


def p2p():
    dist.recv(torch.ones(4), 1)


def work_wait():
    dist.all_reduce(torch.ones(4), async_op=True).wait()


def barrier():
    dist.barrier()


def gather_object():
    dist.all_gather_object([None, None], {"a": 1})


def dcp_save():
    dcp.save({"w": torch.ones(4)}, checkpoint_id=f"{TMP}/dcp")


def async_dcp():
    dcp.async_save({"w": torch.ones(4)}, checkpoint_id=f"{TMP}/adcp").result()


def layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))


def tensor_parallel(rank):
    init("tp", rank)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    net = parallelize_module(layers(), init_device_mesh("cpu", (2,)), plan)
    train(rank, lambda: net(torch.ones(2, 4)).sum().backward())


def fsdp2(rank):
    init("fs", rank)
    net = layers()
    for module in net:
        fully_shard(module)
    fully_shard(net)
    train(rank, lambda: net(torch.ones(2, 4)).sum().backward())


def pipelining(rank):
    init("pp", rank)
    stage = PipelineStage(torch.nn.Linear(4, 4), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    inputs, targets = ((torch.ones(8, 4),), {}), ((), {"target": torch.ones(8, 4)})
    args, kwargs = targets if rank else inputs
    train(rank, lambda: schedule.step(*args, **kwargs))


def rendezvous(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(MEETING_PORT))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    if rank == 1:
        hang()
    dist.init_process_group("gloo")


def store_wait(rank):
    dist.TCPStore("127.0.0.1", STORE_PORT, is_master=True, wait_for_workers=False).get("never")


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        if number == 9:
            self.fetch()
        return torch.ones(4)

    def fetch(self):
        time.sleep(3600)


def load(**how):
    for _ in torch.utils.data.DataLoader(Slow(), batch_size=2, **how):
        pass


def loader0(rank):
    load()


def loader2(rank):
    load(num_workers=2)


def loader2t(rank):
    load(num_workers=2, timeout=3000)


def torch_save(rank):
    path = TMP / "pipe"
    os.mkfifo(path)
    os.open(path, os.O_RDWR)  # nobody reads: the writer stops once the pipe is full
    torch.save({"w": torch.ones(1 << 20)}, path)


def double(x):
    return x.sin() + 1


def compile(rank):  # noqa: A001 -- the file's name
    def backend(graph, inputs):
        time.sleep(3600)

    torch.compile(double, backend=backend)(torch.ones(4))


def inductor(rank):
    import torch._inductor.config as config

    path = TMP / "slow_compiler"
    path.write_text("#!/bin/sh\nsleep 3600\n")
    path.chmod(0o755)
    config.cpp.cxx = (str(path),)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{TMP}/inductor"
    torch.compile(double)(torch.ones(4))


def lock(rank):
    one = threading.Lock()
    one.acquire()
    one.acquire()


def q(rank):
    queue.Queue().get()


def event(rank):
    threading.Event().wait()


def join(rank):
    thread = threading.Thread(target=hang)
    thread.start()
    thread.join()


def sub(rank):
    subprocess.run(["sleep", "3600"], check=False)


def recv(rank):
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def importing(rank):
    (TMP / "slow_module.py").write_text("import time\ntime.sleep(3600)\n")
    sys.path.insert(0, str(TMP))
    import slow_module  # noqa: F401


def flock(rank):
    with (TMP / "lock").open("w") as first, (TMP / "lock").open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)


PAIRS = {
    "ddp": ddp, "compiled_ddp": compiled_ddp, "tensor_parallel": tensor_parallel, "fsdp2": fsdp2,
    "pipelining": pipelining, "rendezvous": rendezvous,
} | {
    call.__name__: after_the_others(call)
    for call in (
        all_reduce, functional, p2p, work_wait, barrier, gather_object, dcp_save, async_dcp,
    )
}  # fmt: skip
ALONE = [
    store_wait, loader0, loader2, loader2t, torch_save, compile, inductor, lock, q, event, join,
    sub, recv, importing, flock,
]  # fmt: skip


def begin(name, situation, rank):
    """Fork a process that hangs in a situation; return its pid."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            situation(rank)
        os._exit(1)
    print(name, rank, pid)
    return pid


def short(text):
    """Leave the paths of this machine out."""
    text = re.sub(r"/\S+/lib/(python3\.\d+/)", r"/usr/lib/\1", text)
    text = re.sub(r"/usr/lib/(\S+/site-packages/)", r"/venv/lib/\1", text)
    text = text.replace(str(TMP), "/home/user")
    return re.sub(r"/\S+/make\.py", "/home/user/make.py", text)


def look(pid):
    """Return what is seen of a process, as the tests read it."""
    native = native_stacks(pid, []).split("\nThread")[0].splitlines()[:12]
    lines = [short(spy_stacks(pid)).rstrip(), "", "=== in C", *(line[:160] for line in native), ""]
    lines.append(f"=== main thread's call: {threads(pid, [])[0].call}")
    for child in look_at_children(pid)[0]:
        head = f"=== child {child.pid} {child.state} {child.call or '-'} {short(child.command)}"
        lines += ["", head, short(child.stacks)]
    return "\n".join(lines) + "\n"


def main():
    out = Path(sys.argv[1])
    pids = {(name, 0): begin(name, one, 0) for name, one in PAIRS.items()}
    pids |= {(name, 1): begin(name, one, 1) for name, one in PAIRS.items()}
    pids |= {(one.__name__, 0): begin(one.__name__, one, 0) for one in ALONE}
    time.sleep(SETTLE_S)  # nothing shows that a process has reached its wait
    try:
        for (name, rank), pid in pids.items():
            if rank == 0:
                (out / f"{name}.txt").write_text(look(pid))
        (out / "sleep.txt").write_text(look(pids["ddp", 1]))
    finally:
        for pid in pids.values():
            for child in look_at_children(pid)[0]:
                os.kill(child.pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
