"""Messages between stages: anything that a stage may return arrives unchanged."""

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.pipeline.execute.messages.header import (  # noqa: E402
    HEADER_BYTES,
    Header,
    describe,
)
from echelon.dist.pipeline.execute.messages.incoming import Incoming  # noqa: E402
from echelon.dist.pipeline.execute.messages.links import Link  # noqa: E402
from echelon.dist.pipeline.execute.messages.outgoing import Outgoing  # noqa: E402
from echelon.dist.pipeline.plan.needs import Product, Thing  # noqa: E402

CPU = torch.device("cpu")


class _Work:
    def __init__(self):
        self.done = False

    def wait(self):
        assert self.done, "waits for a message that is never sent or received"


class Pair:
    """One direction of a channel: sends and receives meet in order, sizes must be equal."""

    def __init__(self):
        self._sends, self._receives = [], []
        self.sizes = []

    def send(self, tensor, async_op):
        self._sends.append((tensor.clone(), _Work()))
        self.sizes.append(tensor.numel() * tensor.element_size())
        return self._meet(self._sends[-1][1])

    def recv(self, tensor, async_op):
        self._receives.append((tensor, _Work()))
        return self._meet(self._receives[-1][1])

    def _meet(self, work):
        while self._sends and self._receives:
            (sent, one), (room, other) = self._sends.pop(0), self._receives.pop(0)
            assert (sent.shape, sent.dtype) == (room.shape, room.dtype), "receives what is sent"
            room.detach().copy_(sent)
            one.done = other.done = True
        return work


class Ends:
    """Both ends of a link in one process, from the rank that sends to the one that receives."""

    def __init__(self, *, is_joined):
        self.headers, self.data, self.spill = Pair(), Pair(), Pair()
        channels = self.headers, self.data, self.spill
        self.sender = Link(1, *channels, is_joined=is_joined)
        self.receiver = Link(0, *channels, is_joined=is_joined)

    def step(self, *order):
        return Outgoing(self.sender), Incoming(self.receiver, order, CPU)


def output(microbatch, stage=0):
    return Thing(Product.OUTPUT, stage, microbatch)


def gradient(microbatch, stage=1):
    return Thing(Product.INPUT_GRAD, stage, microbatch)


@pytest.fixture(params=[False, True], ids=["device", "host"])
def is_joined(request):
    """Whether headers go in front of the data, as on the host."""
    return request.param


TENSORS = [
    [torch.randn(3, 5, requires_grad=True)],
    [torch.randn(7, 3).t(), torch.arange(4), torch.tensor(2.5)],
    [torch.randn(1, 2, 3, 4, 1, 1, 1, 2).bfloat16().requires_grad_()],
    [torch.zeros(0, 3), torch.tensor([True, False, True])],
    [torch.randn(2, dtype=torch.float64) for _ in range(8)],
    [torch.zeros(0, 3)],
]


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("is_posted_first", [True, False])
def test_outputs_arrive_whatever_a_stage_returns(tensors, is_posted_first, is_joined):
    ends = Ends(is_joined=is_joined)
    for number in range(3):
        outgoing, incoming = ends.step(output(5))
        if is_posted_first:
            incoming.want(output(5))
            assert not incoming.is_here(output(5))
        outgoing.outputs(output(5), tensors)
        got = incoming.take(output(5))
        for one, other in zip(got, tensors, strict=True):
            assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
            assert torch.equal(one, other)
            assert one.is_leaf
        outgoing.finish()
        assert len(ends.headers.sizes) == (1 if is_joined else number + 1)
    data = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in tensors)
    front = HEADER_BYTES if is_joined else 0
    wanted = [data, front + data, front + data]
    assert ends.data.sizes == [size for size in wanted if size]
    assert ends.spill.sizes == []


def test_sizes_may_change_from_step_to_step(is_joined):
    ends = Ends(is_joined=is_joined)
    for rows in (4, 4, 9, 0, 2, 2, 9):
        outgoing, incoming = ends.step(output(0))
        incoming.want(output(0))
        sent = torch.randn(rows, 32)
        outgoing.outputs(output(0), [sent])
        assert torch.equal(incoming.take(output(0))[0], sent)
        outgoing.finish()
    # Each receive has the size of the step before; outputs that have grown take the spill as well.
    first, *others = ends.data.sizes
    front = HEADER_BYTES if is_joined else 0
    data = [first, *(size - front for size in others)]
    assert [size // 128 for size in data if size] == [4, 4, 4, 9, 2, 2]
    assert [size // 128 for size in ends.spill.sizes] == [9, 2, 9]


def test_grown_outputs_arrive_in_whatever_order_they_are_taken(is_joined):
    """Receives from the spill are posted in the sender's order, not in that of their use."""
    ends = Ends(is_joined=is_joined)
    for rows in (1, 3):
        order = [output(m) for m in (2, 0, 1)]
        outgoing, incoming = ends.step(*order)
        sent = {thing: torch.randn(rows + thing.microbatch, 16) for thing in order}
        for thing in order:
            incoming.want(thing)
        for thing in order:
            outgoing.outputs(thing, [sent[thing]])
        for thing in sorted(order, key=lambda one: one.microbatch):
            assert torch.equal(incoming.take(thing)[0], sent[thing])
    assert len(ends.spill.sizes) == 3


def test_outputs_and_gradients_of_one_peer_keep_its_order(is_joined):
    """As in a V, where one rank sends both: a gradient is never taken for an output."""
    ends = Ends(is_joined=is_joined)
    for step in range(2):
        order = [gradient(1), output(0, stage=4), gradient(0), output(1, stage=4)]
        outgoing, incoming = ends.step(*order)
        incoming.want(output(1, stage=4))
        shapes = {m: [torch.zeros(2, m + 1, requires_grad=True), torch.zeros(3)] for m in (0, 1)}
        incoming.expect(gradient(0), shapes[0])
        assert not incoming.is_here(gradient(0)), "micro-batch 1's is first"
        incoming.expect(gradient(1), shapes[1])
        outgoing.gradients([torch.full((2, 2), 7.0 + step)])
        outgoing.outputs(output(0, stage=4), [torch.full((5,), 1.0)])
        outgoing.gradients([torch.full((2, 1), 8.0 + step)])
        outgoing.outputs(output(1, stage=4), [torch.full((6,), 2.0)])
        assert torch.equal(incoming.take(output(1, stage=4))[0], torch.full((6,), 2.0))
        assert torch.equal(incoming.take(gradient(0))[0], torch.full((2, 1), 8.0 + step))
        assert torch.equal(incoming.take(gradient(1))[0], torch.full((2, 2), 7.0 + step))
        assert torch.equal(incoming.take(output(0, stage=4))[0], torch.full((5,), 1.0))
        outgoing.finish()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.zeros(1)] * 9, "9 tensors; at most 8 can be sent"),
        ([torch.zeros([1] * 9)], "with 9 dims"),
        ([torch.zeros(2, dtype=torch.complex64)], "torch.complex64"),
    ],
)
def test_what_cannot_be_sent_is_refused(tensors, said):
    with pytest.raises(ValueError, match=said):
        describe(tensors)


def test_a_header_reads_back():
    header = Header(describe([torch.zeros(2, 3, requires_grad=True), torch.ones(4).bool()]))
    assert Header.decode(header.encode().tolist()) == header
