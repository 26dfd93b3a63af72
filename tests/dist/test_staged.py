"""Arrays of a device over an engine of the host: the contract, order, and when it is chosen."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

from echelon.errors import CollectiveMismatchError, CollectiveTimeoutError
from tests.dist import contract, made_up, oracle
from tests.support.ranks import run_ranks

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks

_DTYPES = ("float32", "int32", "bool")
_SIZES = (0, 1, 1023)
# Those whose arrays torch has, and that do not refuse on purpose what a device array cannot be.
_CHECKS = (
    contract.check_all_reduce, contract.check_reduce_scatter, contract.check_movement,
    contract.check_reduce, contract.check_all_to_all, contract.check_all_to_all_with_splits,
    contract.check_gather_and_scatter, contract.check_messages, contract.check_message_tags,
    contract.check_exchange_both_ways, contract.check_async, contract.check_barrier,
    contract.check_objects, contract.check_coalesce, contract.check_monitored_barrier,
)  # fmt: skip


class _OnDevice:
    """A group whose callers' NumPy arrays claim to lie on a device."""

    def __init__(self, group, index):
        self._group, self._index = group, index

    def __getattr__(self, name):
        found = getattr(self._group, name)
        if not callable(found) or name in ("coalesce", "split"):
            return found

        def call(*arguments, **options):
            arrays = [self._moved(one) for one in arguments]
            work = found(*arrays, **options)
            if work is None or isinstance(work, int | list | dict | str):
                self._settle()
                return work
            return _Work(work, self._settle)

        return call

    def coalesce(self):
        return _Settled(self._group.coalesce(), self._settle)

    def _moved(self, one):
        if not isinstance(one, np.ndarray):
            return one
        array = made_up.DeviceArray.__new__(made_up.DeviceArray)
        array.tensor = torch.from_numpy(one)
        array.device, array._stream = types.SimpleNamespace(id=self._index), None
        return array

    def _settle(self):
        made_up.accelerator.current_stream(self._index).synchronize()


class _Work:
    def __init__(self, work, settle):
        self._work, self._settle = work, settle

    def wait(self, timeout_s=None):
        self._work.wait(timeout_s)
        self._settle()

    @property
    def done(self):
        return self._work.done


class _Settled:
    def __init__(self, block, settle):
        self._block, self._settle = block, settle

    def __enter__(self):
        return self._block.__enter__()

    def __exit__(self, *raised):
        self._block.__exit__(*raised)
        self._settle()


def _keep_contract(rank: int, world_size: int, backend: str) -> list[str]:
    world, _ = made_up.init(backend, timeout_s=60)
    oracle.DTYPES, contract.SIZES = _DTYPES, _SIZES
    contract.dtypes = lambda _: _DTYPES
    group = _OnDevice(world, rank)
    traits = contract.Traits(ordered=backend == "shm")
    for check in _CHECKS:
        try:
            check(group, traits)
        except AttributeError as err:  # the wrapper of a work has `wait` alone
            raise AssertionError(f"{check.__name__}: {err}") from err
    engine = world._engine.engine_for("cuda")
    made_up.shutdown()
    return [type(engine).__name__, world.backend]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_host_backend_keeps_the_contract_on_a_device(backend):
    ends = run_ranks(_keep_contract, 3, backend, timeout_s=240)
    assert ends == [["StagedEngine", backend]] * 3


def _compute_between(rank: int, world_size: int) -> None:
    world, array = made_up.init("shm", timeout_s=30)
    world.all_reduce(array(torch.ones(1)))  # the first makes the engine, on all ranks
    x = array(torch.zeros(3))
    returned, in_time = threading.Event(), []
    x.compute(lambda t: (in_time.append(returned.wait(20)), t.fill_(rank + 1)))
    work = world.all_reduce(x, async_op=True)
    returned.set()
    host = np.ones(2)
    world.all_reduce(host)  # the host's own, beside it
    work.wait()
    x.compute(lambda t: t.mul_(2))
    total = world_size * (world_size + 1) / 2
    assert (x.read().tolist(), host.tolist()) == ([2 * total] * 3, [world_size] * 2)
    assert in_time == [True], "async_op=True waited for the device"
    graph = made_up.Graph()
    with made_up.accelerator.graph(graph), pytest.raises(ValueError, match="cannot be captured"):
        world.all_reduce(x)
    made_up.wait_until(lambda: work.done)
    assert 0 < work.pending.started_mono_ns <= work.pending.ended_mono_ns
    made_up.shutdown()


def test_copies_are_in_order_with_what_the_caller_computes():
    run_ranks(_compute_between, 3, timeout_s=60)


def _share(rank: int, world_size: int, sharing: bool) -> str:
    made_up.accelerator.set_device(1 if sharing else 1 + rank)
    world, array = made_up.init(None, timeout_s=30)
    x = array(torch.full((2,), rank + 1.0))
    world.all_reduce(x)
    assert x.read().tolist() == [6, 6]
    y = array(torch.full((2,), float(rank)))
    world.send(y, (rank + 1) % 3)
    world.recv(y, (rank - 1) % 3)
    assert y.read().tolist() == [(rank - 1) % 3] * 2
    engine = type(world._engine.engine_for("cuda")).__name__
    world.barrier()  # no rank leaves before its message has arrived
    made_up.shutdown()
    return engine


@pytest.mark.parametrize(("sharing", "engine"), [(True, "StagedEngine"), (False, "StreamEngine")])
def test_ranks_that_share_a_device_go_over_the_host(sharing, engine):
    assert run_ranks(_share, 3, sharing, timeout_s=60) == [engine] * 3


def _fail(rank: int, world_size: int) -> None:
    world, array = made_up.init("shm", timeout_s=20)
    world.all_reduce(array(torch.ones(2)))
    x = array(torch.ones(2 + (rank == 1)))
    with pytest.raises(CollectiveMismatchError, match=r"rank 1 called .* on cuda") as caught:
        world.all_reduce(x)
    assert caught.value.ranks == (1,)
    assert x.read().tolist() == [1] * len(x.tensor)
    made_up.shutdown()


def test_a_mismatch_is_named_as_on_the_host():
    run_ranks(_fail, 3, timeout_s=60)


def _stay_away(rank: int, world_size: int) -> None:
    world, array = made_up.init("shm", timeout_s=20)
    x = array(torch.ones(2))
    world.all_reduce(x)
    world.timeout_s = 1.5
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"all_reduce #1"):
            world.all_reduce(x)
        made_up.store().set("gave-up", "1")
    else:
        made_up.store().get("gave-up", timeout=60)
    made_up.shutdown()
    assert not any(one.name.startswith("echelon-staged") for one in threading.enumerate())


def test_a_rank_that_stays_away_ends_it_at_the_timeout():
    run_ranks(_stay_away, 2, timeout_s=60)
