"""Choose this rank's device when no array determines it."""

from __future__ import annotations

import dataclasses
from typing import Any

from echelon.dist.backends.interface import Members
from echelon.dist.membership.environment import local_rank


def with_own_device(members: Members, accelerator: Any) -> Members:
    """Return a copy of `members` in which this rank's device is set.

    If the program has selected a device other than 0 (`torch.cuda.set_device`), that device is
    used. Otherwise the device is LOCAL_RANK modulo the number of devices.

    Raises:
        ValueError: no device is visible to this process.
    """
    if members.device:
        return members
    number = int(accelerator.device_count())
    if number == 0:
        raise ValueError("no device is visible to this process")
    index = int(accelerator.current_device()) or local_rank() % number
    return dataclasses.replace(members, device_index=index)
