"""Which device is this rank's, where no array says it."""

from __future__ import annotations

import dataclasses
from typing import Any

from echelon.dist.backends.interface import Members
from echelon.dist.membership.environment import local_rank


def with_own_device(members: Members, accelerator: Any) -> Members:
    """Return the members with this rank's device filled in.

    The program's choice (`torch.cuda.set_device`) comes first, as far as it can be seen: the
    current device, unless that is the first. Else LOCAL_RANK's, counted around the devices that are
    there.

    Raises:
        ValueError: there is no device.
    """
    if members.device:
        return members
    number = int(accelerator.device_count())
    if number == 0:
        raise ValueError("this process sees no device")
    index = int(accelerator.current_device()) or local_rank() % number
    return dataclasses.replace(members, device_index=index)
