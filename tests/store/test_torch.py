"""torch itself on our server: its client, its process groups, torchrun's rendezvous."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest

from echelon.store import TCPStore
from tests.store.peers import Background, server_process, until
from tests.support.ranks import run_ranks

pytest.importorskip("torch")

SECOND = timedelta(seconds=1)
PATIENCE = timedelta(seconds=20)


@pytest.fixture(scope="module")
def port():
    """A server in a process of its own: torch's constructor holds the interpreter lock, so a
    server on a thread of the same process could never answer it."""
    with server_process() as served:
        yield served


def torch_client(port, timeout=PATIENCE):
    from torch.distributed import TCPStore as TorchStore

    return TorchStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)


def test_every_call_of_torchs_client(port):
    store = torch_client(port)
    store.set("t/a", "1")
    assert store.get("t/a") == b"1"
    assert [store.add("t/n", 2), store.add("t/n", -5)] == [2, -3]
    assert store.check(["t/a", "t/n"])
    assert not store.check(["t/a", "t/none"])
    assert store.compare_set("t/c", "", "first") == b"first"
    assert store.compare_set("t/c", "other", "second") == b"first"
    assert store.compare_set("t/c", "first", "second") == b"second"
    store.wait(["t/a", "t/c"])
    store.append("t/a", "2")
    assert store.get("t/a") == b"12"
    store.multi_set(["t/m1", "t/m2"], ["x", "y"])
    assert store.multi_get(["t/m1", "t/m2"]) == [b"x", b"y"]
    assert {"t/a", "t/m1"} <= set(store.list_keys())
    assert store.num_keys() == len(store.list_keys())
    assert store.delete_key("t/a")
    assert not store.delete_key("t/a")
    store.queue_push("t/q", "i1")
    store.queue_push("t/q", "i2")
    assert (store.queue_len("t/q"), store.queue_pop("t/q")) == (2, b"i1")
    assert store.queue_pop("t/q", block=False) == b"i2"
    store.barrier("t/b", 1)
    assert store.clone().get("t/c") == b"second"
    assert store.has_extended_api()


def test_torchs_timeouts_cancel_and_the_connection_goes_on(port):
    from torch.distributed import DistStoreError

    store = torch_client(port)
    store.set_timeout(timedelta(milliseconds=50))
    for call in (
        lambda: store.get("t/never"),
        lambda: store.wait(["t/never"]),
        lambda: store.queue_pop("t/nothing"),
        lambda: store.barrier("t/alone", 2),
    ):
        with pytest.raises(DistStoreError, match="timeout after 50ms"):
            call()
    store.set_timeout(PATIENCE)
    store.set("t/still", "here")
    assert store.get("t/still") == b"here"
    with TCPStore("127.0.0.1", port, timeout=20.0) as ours:
        assert ours.statistics().num_waiters == 0


def test_torch_and_our_client_share_keys(port):
    theirs = torch_client(port)
    with TCPStore("127.0.0.1", port, timeout=20.0) as ours:
        waiting = Background(lambda: ours.get("t/shared"))
        until(lambda: ours.statistics().num_waiters == 1, "ours waits")
        theirs.set("t/shared", b"\x00\x01")
        assert waiting.result() == b"\x00\x01"
        ours.set("t/back", b"ok")
        assert theirs.get("t/back") == b"ok"
        from torch.distributed import PrefixStore as TorchPrefix

        from echelon.store import PrefixStore

        PrefixStore("t/p", ours).set("k", b"v")
        assert TorchPrefix("t/p", theirs).get("k") == b"v"


def train_together(rank: int, world_size: int) -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=PATIENCE)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair_total = torch.tensor([float(rank + 1)])
    dist.all_reduce(pair_total, group=pairs[rank // 2])
    everyone: list[object] = [None] * world_size
    dist.all_gather_object(everyone, rank)
    assert everyone == list(range(world_size))
    dist.barrier()
    dist.destroy_process_group()
    return float(total + 100 * pair_total)


@pytest.mark.ranks
@pytest.mark.parametrize("is_guarded", [False, True])
def test_gloo_process_groups_meet_on_our_server(is_guarded, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret that is long enough")
    arguments = ("--secret-file", str(secret)) if is_guarded else ()
    with server_process(*arguments) as served:
        found = run_ranks(train_together, 4, timeout_s=60.0, store_port=served)
    assert found == [10.0 + 300, 10.0 + 300, 10.0 + 700, 10.0 + 700]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
with open(os.path.join(sys.argv[1], str(dist.get_rank())), "w") as out:
    out.write(f"{dist.get_world_size()} {total.item()}")
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_torchruns_own_rendezvous_runs_on_our_server(tmp_path):
    """Two agents meet by torchrun's c10d rendezvous, which lives on compare_set."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with server_process() as served:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"127.0.0.1:{served}", "--rdzv-conf", "is_host=0",
            "--local-addr", "127.0.0.1", "--rdzv-id", "job", str(script), str(tmp_path),
        ]  # fmt: skip
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        agents = [
            subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for _ in range(2)
        ]
        said = [agent.communicate(timeout=600)[0].decode() for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
        with TCPStore("127.0.0.1", served, timeout=20.0) as store:
            assert any("torch.rendezvous.job" in key for key in store.list_keys())
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 3.0", "2 3.0"]
