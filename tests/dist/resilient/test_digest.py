"""The hash by which ranks compare what should be equal on all of them."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
import torch

from echelon.dist.resilient.digest import digest


class _Position:
    def __init__(self, at, *, seen=()):
        self.at, self.seen = at, set(seen)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.array([1, 2]), np.array([3, 4])),
        (np.array([1, 2]), np.array([1, 2], dtype=np.int32)),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.int64(3), np.int64(9)),
        (np.array([None, "a"]), np.array([None, "b"])),
        ({1, 2}, {3}),
        (_Position(1), _Position(2)),
        (_Position(torch.ones(2)), _Position(torch.zeros(2))),
        (torch.float32, torch.float64),
    ],
    ids=["array", "dtype", "shape", "scalar", "objects", "set", "object", "tensor", "torch dtype"],
)
def test_values_that_differ_have_different_hashes(one, other):
    assert digest({"state": [one]}) != digest({"state": [other]})
    for value in (one, other):
        assert digest(value) == digest(pickle.loads(pickle.dumps(value)))


def test_neither_the_order_of_a_set_nor_identity_counts():
    word = "".join(["a", "b"])
    assert digest(_Position([word, word])) == digest(_Position([word, "".join(["a", "b"])]))
    names = [f"name {number}" for number in range(50)]
    assert digest(_Position(0, seen=names)) == digest(_Position(0, seen=names[::-1]))


def test_what_cannot_be_compared_is_named():
    with pytest.raises(ValueError, match="a value of type lock cannot be compared between ranks"):
        digest({"lock": threading.Lock()})
    loop = _Position(0)
    loop.at = loop
    with pytest.raises(ValueError, match="_Position cannot be compared"):
        digest(loop)


def test_equal_dicts_have_equal_hashes_in_any_order():
    key = frozenset({"weight"})
    assert digest({"a": 1, key: 2}) == digest({key: 2, "a": 1})
    assert digest({"a": 1, "b": 2}) != digest({"a": 2, "b": 1})
