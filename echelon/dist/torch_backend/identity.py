"""Provide a group's name, rank and size, which torch reads both in C++ and in Python."""

from __future__ import annotations

from typing import Any

import torch

_core: Any = torch._C._distributed_c10d


class Identity(_core.ProcessGroup):  # type: ignore[misc]  # torch's own class, untyped
    """The name, rank, size and description of a torch group."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size)  # of its constructors, the one for subclasses
        self._group_rank = rank
        self._group_size = size
        self._store = store
        self._torch_name = ""
        self._description = ""

    def rank(self) -> int:
        """Return this process's rank within the group."""
        return self._group_rank

    def size(self) -> int:
        """Return the number of members."""
        return self._group_size

    def name(self) -> str:
        """Return the backend's name."""
        return "echelon"

    getRank = rank  # noqa: N815 -- C++ looks these names up
    getSize = size  # noqa: N815
    getBackendName = _get_backend_name = name  # noqa: N815

    @property
    def group_name(self) -> str:
        """Torch's name for the group, by which compiled code looks the group up."""
        return self._torch_name

    @property
    def group_desc(self) -> str:
        """The name that the user gave to the group."""
        return self._description

    def getGroupName(self) -> str:  # noqa: D102, N802 -- C++ looks this name up
        return self._torch_name

    def getGroupDesc(self) -> str:  # noqa: D102, N802
        return self._description

    def setGroupName(self, name: str) -> None:  # noqa: D102, N802
        self._torch_name = name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description, and join the other members.

        The members join in this method because torch calls it last.
        """
        self._description = description
        self._meet()

    def _meet(self) -> object:
        raise NotImplementedError

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[Any]:
        kinds = ["cpu"]
        kinds += [kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()]
        return [torch.device(kind) for kind in kinds]

    def get_group_store(self) -> Any:
        """Return torch's store for this group."""
        return self._store
