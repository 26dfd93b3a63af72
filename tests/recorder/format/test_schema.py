"""The two declarations of a slot, for the writer and for the readers, agree."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from echelon.recorder.format import schema
from echelon.recorder.write.operations.calls import TAIL_STRUCT
from echelon.recorder.write.operations.operations import HEAD_STRUCT, STATE_STRUCT
from echelon.recorder.write.ring.ring import SPAN_FIXED_STRUCT

# The writer packs an operation's last fields apart, and puts their bytes behind the first ones.
FIXED_STRUCT = struct.Struct(
    HEAD_STRUCT.format.replace(f"{TAIL_STRUCT.size}s", TAIL_STRUCT.format.removeprefix("<"))
)


@pytest.mark.parametrize(
    ("packed", "dtype"),
    [
        (FIXED_STRUCT, schema.OPERATION_FIXED),
        (STATE_STRUCT, schema.OPERATION_STATE),
        (SPAN_FIXED_STRUCT, schema.SPAN_FIXED),
    ],
    ids=["operation", "state", "span"],
)
def test_what_is_packed_is_what_is_read(packed: struct.Struct, dtype: np.dtype) -> None:
    names = dtype.names or ()
    row = np.frombuffer(packed.pack(*range(1, len(names) + 1)), dtype)[0]
    assert [int(row[name]) for name in names] == list(range(1, len(names) + 1))
    assert packed.size == dtype.itemsize
