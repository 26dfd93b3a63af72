"""Links: the channels from this rank to those that hold its stages' neighbours.

Three channels a peer, each in the order of the sender: headers, which the host reads and its engine
carries; the data, which the engine of the stages' device carries; and the spill, for outputs that
outgrew the receive that was posted for them. On a device each of the last two is a communicator of
two ranks for each direction; the data's are connected when the pipeline is made, the spill's by the
first outputs that need it.
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
        is_joined: whether headers whose payload has a known size are sent in front of it: data of
            the host needs no message of its own for what the host reads.
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
    """Open the channels to some peers, which do the same; blocks until devices are connected.

    Args:
        group: the pipeline's ranks.
        name: of the pipeline, the same on all its ranks and no other pipeline's.
        peers: group ranks.
        device: of the data.

    Raises:
        CollectiveError: a peer is lost or did not open its end within the group's timeout.
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
    """Connect channels for a device, all at once, so that no order among ranks matters."""
    like = torch.empty(1, device=device)
    for opening in [channel.open(like, async_op=True) for channel in channels]:
        assert opening is not None
        opening.wait()
