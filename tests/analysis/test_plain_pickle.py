"""Pickles that want more than plain data are refused before anything is built."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from imagined_torch import TorchJob

from echelon.analysis import analyze
from echelon.analysis.sources.torch.plain_pickle import load_plain, refuse
from echelon.errors import DumpFormatError


class Evil:
    """Calls os.system when unpickled."""

    def __init__(self, target: Path) -> None:
        self.command = f"touch {target}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(plain, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_passes(value: object, protocol: int) -> None:
    assert refuse(pickle.dumps(value, protocol=protocol)) == ""


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_judged_without_a_crash(data: bytes) -> None:
    refuse(b"\x80\x02" + data)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "owned"
    path = tmp_path / "trace_rank_0"
    path.write_bytes(
        pickle.dumps({"version": "2.10", "entries": [Evil(target)]}, protocol=protocol)
    )
    with pytest.raises(DumpFormatError, match="refused"):
        load_plain(path)
    assert not target.exists()


@pytest.mark.parametrize(
    "value",
    [collections.OrderedDict(a=1), complex(1, 2), {1, 2}, frozenset({1}), print, Path("x"), b"raw"],
    ids=repr,
)
def test_no_class_is_admitted(tmp_path: Path, value: object) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(pickle.dumps(value, protocol=4))
    with pytest.raises(DumpFormatError, match="refused"):
        load_plain(path)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02\x82\x01.",  # an extension code
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent object
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a bytearray of 1 TiB
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of 2**31 places
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of 2 GiB
        b"\x80\x02X\xff\xff\xff\x7fabc.",  # a string longer than the file
        b"\x80\x02]",  # no end
        b"",
    ],
)
def test_refused(data: bytes) -> None:
    assert refuse(data)


def test_deep_nesting_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    with pytest.raises(DumpFormatError, match="not a flight recorder dump"):
        analyze(tmp_path)


def _with_entry(tmp_path: Path, **fields: object) -> Path:
    job = TorchJob(2).all_call(2)
    job[1].call(**fields)
    return job.write(tmp_path / "dumps")


def test_lists_that_hold_each_other_a_billion_times(tmp_path: Path) -> None:
    laughs: list[object] = [1]
    for _ in range(40):
        laughs = [laughs] * 10
    folder = _with_entry(tmp_path, sizes=laughs)
    report = analyze(folder)
    assert report.ranks_present == (0,)
    assert any("rank_1" in warning for warning in report.warnings)


@pytest.mark.parametrize(
    "fields",
    [
        {"sizes": [[10**30]]},
        {"sizes": [["x"]]},
        {"input_sizes": 7},
        {"time_created_ns": 10**40},
        {"time_created_ns": "soon"},
        {"profiling_name": ["a"]},
        {"process_group": 5},
        {"frames": [1, 2]},
        {"collective_seq_id": [1]},
    ],
    ids=str,
)
def test_a_field_of_a_wrong_type_costs_that_file_only(
    tmp_path: Path, fields: dict[str, object]
) -> None:
    report = analyze(_with_entry(tmp_path, **fields))
    assert report.ranks_present == (0,)
    assert report.ranks_missing == (1,)


def test_a_huge_sequence_number_does_not_stretch_anything(tmp_path: Path) -> None:
    report = analyze(_with_entry(tmp_path, collective_seq_id=2**60))
    assert report.ranks_present == (0, 1)


def test_a_world_of_a_million_is_bounded(tmp_path: Path) -> None:
    job = TorchJob(2).all_call(2)
    job[0].config["0"]["ranks"] = "[0, 1, 1048575]"
    assert analyze(job.write(tmp_path / "dumps")).world_size <= 1 << 20
