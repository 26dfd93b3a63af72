"""Letters between stages: anything a stage may return comes out the same."""

import pytest

torch = pytest.importorskip("torch")

from echelon.dist.pipeline.execute.mail import (  # noqa: E402
    _FIRST_TAG,
    _HEADER_BYTES,
    GradientInbox,
    Outbox,
    OutputInbox,
    decode,
    encode,
)

CPU = torch.device("cpu")


class _Done:
    done = True

    def wait(self):
        pass


class Post:
    """A group whose messages lie in a queue for each tag; receives fill at once or never."""

    def __init__(self):
        self.queues = {}
        self.sizes = []

    def send(self, tensor, to, tag, async_op):
        self.queues.setdefault(tag, []).append(tensor.clone())
        self.sizes.append((tag - _FIRST_TAG, tensor.numel() * tensor.element_size()))
        return _Done()

    def recv(self, tensor, source, tag, async_op):
        sent = self.queues[tag].pop(0)
        assert (sent.shape, sent.dtype) == (tensor.shape, tensor.dtype), "received what was sent"
        tensor.detach().copy_(sent)
        return _Done()


TENSORS = [
    [torch.randn(3, 5, requires_grad=True)],
    [torch.randn(7, 3).t(), torch.arange(4), torch.tensor(2.5)],
    [torch.randn(1, 2, 3, 4, 1, 1, 1, 2).bfloat16().requires_grad_()],
    [torch.zeros(0, 3), torch.tensor([True, False, True])],
    [torch.randn(2, dtype=torch.float64) for _ in range(8)],
]


@pytest.mark.parametrize("tensors", TENSORS)
def test_a_letter_holds_whatever_a_stage_returns(tensors):
    post, theirs, ours = Post(), {}, {}
    for number in range(3):
        outbox = Outbox(post)
        inbox = OutputInbox(post, 0, [5], 0, CPU, ours)
        post.sizes.clear()
        outbox.outputs(0, 1, 5, tensors, theirs)
        inbox.want(5)
        inbox.advance()
        assert inbox.has(5)
        got = inbox.take(5)
        for one, other in zip(got, tensors, strict=True):
            assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
            assert torch.equal(one, other)
            assert one.is_leaf
        data = sum(-(-t.numel() * t.element_size() // 64) * 64 for t in tensors)
        # A parcel at first; from then on one letter that has room.
        first = [(0, _HEADER_BYTES), (1, data)]
        assert post.sizes == (first if number == 0 else [(0, _HEADER_BYTES + data)])
        assert theirs == ours == {5: data}


def test_room_follows_the_size_from_step_to_step():
    post, theirs, ours = Post(), {}, {}
    for rows in (4, 4, 9, 9, 2, 2):
        outbox, inbox = Outbox(post), OutputInbox(post, 0, [0], 0, CPU, ours)
        sent = torch.randn(rows, 32)
        outbox.outputs(0, 1, 0, [sent], theirs)
        inbox.want(0)
        inbox.advance()
        assert torch.equal(inbox.take(0)[0], sent)
    # A letter that was larger than needed carries its data all the same.
    kinds = [kind for kind, _ in post.sizes]
    assert kinds == [0, 1, 0, 0, 1, 0, 0, 0]
    assert theirs == ours == {0: 2 * 128}


def test_gradients_are_received_in_the_senders_order():
    post = Post()
    inbox = GradientInbox(post, 1, [1, 0], 0)
    outputs = {m: [torch.zeros(2, m + 1, requires_grad=True), torch.zeros(3)] for m in (0, 1)}
    inbox.expect(0, outputs[0])
    inbox.want(0)
    inbox.advance()
    assert not inbox.has(0), "micro-batch 1's comes first"
    outbox = Outbox(post)
    outbox.gradients(0, 0, [torch.full((2, 2), 7.0)])
    outbox.gradients(0, 0, [torch.full((2, 1), 8.0)])
    inbox.expect(1, outputs[1])
    inbox.advance()
    assert torch.equal(inbox.take(0)[0], torch.full((2, 1), 8.0))
    assert torch.equal(inbox.take(1)[0], torch.full((2, 2), 7.0))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.zeros(1)] * 9, "9 tensors; at most 8 go on"),
        ([torch.zeros([1] * 9)], "with 9 dims"),
        ([torch.zeros(2, dtype=torch.complex64)], "torch.complex64"),
    ],
)
def test_what_does_not_travel_is_refused(tensors, said):
    with pytest.raises(ValueError, match=said):
        encode(tensors, is_inside=True)


def test_a_header_reads_back():
    header = encode([torch.zeros(2, 3, requires_grad=True)], is_inside=False).tolist()
    assert header[1] == 0
    (tensor,) = decode(header, torch.zeros(64, dtype=torch.uint8))
    assert tensor.shape == (2, 3)
    assert tensor.requires_grad
