"""Gradients live in flat buffers and behave as if they did not."""

from __future__ import annotations

import pytest
import torch
from gpt.training.gradients import GradientBuckets, fill_buckets
from torch.nn import Parameter


def make_parameters(*shapes: tuple[int, ...]) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_gradients_are_views_in_order():
    parameters = make_parameters((2, 3), (4,), (1,))
    buckets = GradientBuckets(parameters, bucket_bytes=1000)
    (flat,) = buckets.flats
    flat.copy_(torch.arange(11.0))
    assert torch.equal(parameters[0].grad, torch.arange(6.0).view(2, 3))
    assert torch.equal(parameters[1].grad, torch.arange(6.0, 10.0))
    assert torch.equal(parameters[2].grad, torch.tensor([10.0]))


def test_backward_writes_into_the_buffers_as_into_plain_gradients():
    parameters = make_parameters((3, 4), (4,), (5, 3))
    plain = make_parameters((3, 4), (4,), (5, 3))
    buckets = GradientBuckets(parameters, bucket_bytes=48)
    for weights in (parameters, plain):
        (torch.tanh(weights[2] @ weights[0]) + weights[1]).square().sum().backward()
    together = torch.cat(buckets.flats)
    assert torch.equal(together, torch.cat([weight.grad.flatten() for weight in plain]))


def test_zeroing_keeps_the_views():
    parameters = make_parameters((3,))
    buckets = GradientBuckets(parameters)
    parameters[0].sum().backward()
    buckets.zero()
    assert torch.equal(parameters[0].grad, torch.zeros(3))
    parameters[0].sum().backward()
    assert torch.equal(buckets.flats[0], torch.ones(3))


def test_buckets_close_before_they_outgrow_their_size():
    parameters = make_parameters((4,), (4,), (100,), (4,), (5,))
    numels = [[p.numel() for p in bucket] for bucket in fill_buckets(parameters, 32)]
    assert numels == [[4, 4], [100], [4], [5]]


def test_the_norm_is_torchs():
    parameters = make_parameters((3, 4), (7,))
    buckets = GradientBuckets(parameters, bucket_bytes=4)
    assert len(buckets.flats) == 2
    sum(weight.pow(3).sum() for weight in parameters).backward()
    assert buckets.norm() == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()
    )
