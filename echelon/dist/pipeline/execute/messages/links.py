"""Links: the channels from this rank to the ranks that hold its stages' neighbours.

There are three channels per peer, each in the sender's order: headers, which the host reads and its
engine carries; data, which the engine of the stages' device carries; and spill, for outputs larger
than the receive posted for them. On a device each of the last two uses a two-rank communicator per
direction; those for data are connected when the pipeline is created, those for spill by the first
outputs that need them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from echelon.dist.channel import Channel
from echelon.dist.group import ProcessGroup

Sizes = dict[tuple[int, int], int]  # (stage, micro-batch) -> bytes of the last payload


@dataclass(frozen=True, slots=True)
class Link:
    """The channels to one rank.

    Attributes:
        rank: the peer's rank within the group.
        headers, data, spill: see the module.
        is_joined: whether headers are sent in front of a payload of known size: host data does not
            need a separate message for its header.
        sent, received: sizes of the last payload of each output, the same at both ends.
    """

    rank: int
    headers: Channel
    data: Channel
    spill: Channel
    is_joined: bool
    sent: Sizes = field(default_factory=dict)
    received: Sizes = field(default_factory=dict)


def open_links(
    group: ProcessGroup, name: str, peers: Iterable[int], device: torch.device
) -> dict[int, Link]:
    """Open the channels to some peers, which must do the same; block until devices are connected.

    Args:
        group: the pipeline's ranks.
        name: the pipeline's name, unique and the same on all its ranks.
        peers: group ranks.
        device: the device of the data.

    Raises:
        CollectiveError: a peer was lost or did not open its end within the group's timeout.
    """
    links = {
        peer: Link(
            peer,
            group.channel(peer, f"{name}/headers"),
            group.channel(peer, f"{name}/data"),
            group.channel(peer, f"{name}/spill"),
            is_joined=device.type == "cpu",
        )
        for peer in sorted(peers)
    }
    connect((link.data for link in links.values()), device)
    return links


def connect(channels: Iterable[Channel], device: torch.device) -> None:
    """Connect channels for a device, all at once, so that the order among ranks does not matter."""
    like = torch.empty(1, device=device)
    for opening in [channel.open(like, async_op=True) for channel in channels]:
        assert opening is not None
        opening.wait()
