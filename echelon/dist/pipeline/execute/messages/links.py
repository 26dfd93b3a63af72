"""Open the channels to the ranks that hold the stages before and after this rank's stages.

There are three channels per peer; each delivers messages in the order in which they were sent. The
headers channel uses the host's engine, because the host reads the headers. The data channel uses
the engine of the stages' device. The spill channel is for outputs that are larger than the receive
posted for them. On a device, the data and spill channels each use one two-rank communicator per
direction. The data channel is connected when the pipeline is created, and the spill channel when
outputs first need it.
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
        headers, data, spill: the three channels, as described at the top of this module.
        is_joined: whether a header and a payload of known size are sent in one message, which is
            the case for host data.
        sent, received: the size in bytes of the last payload for each stage and micro-batch, in
            each direction. `sent` at one end of the link equals `received` at the other end.
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
    """Open the channels to all peers, which must call this function too.

    On a device, the call blocks until the data channels are connected.

    Args:
        group: the pipeline's ranks.
        name: the pipeline's unique name, which is the same on all ranks.
        peers: the group ranks of the peers.
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
    """Connect a device's channels concurrently, because ranks can list them in different orders."""
    like = torch.empty(1, device=device)
    for opening in [channel.open(like, async_op=True) for channel in channels]:
        assert opening is not None
        opening.wait()
