"""The connections of an admitted peer: one for control, and some for data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

from .control import ControlConnection
from .frames import DataConnection


class Role(str, enum.Enum):
    """What the holder of a key may do.

    An admin may also do everything that a trainer may, and a trainer what a reader may.
    """

    READER = "reader"  # statistics
    TRAINER = "trainer"  # train, read and set states
    ADMIN = "admin"  # erase and save

    def may(self, needed: Role) -> bool:
        """Return whether this role includes what `needed` may do."""
        order = (Role.READER, Role.TRAINER, Role.ADMIN)
        return order.index(self) >= order.index(needed)


class Peer(NamedTuple):
    """Who is on the other side."""

    role: Role
    fingerprint: str  # of its certificate, `sha256:...`; empty without a key
    address: str  # `host:port`

    def __str__(self) -> str:
        who = f"{self.address} as {self.role.value}"
        return f"{who}, key {self.fingerprint[7:19]}" if self.fingerprint else who


AN_OWNER = Peer(Role.ADMIN, "", "")  # the peer of a side that has connected to an owner


class Session:
    """The connections of an admitted peer."""

    def __init__(self, control: ControlConnection, data: Sequence[DataConnection], peer: Peer = AN_OWNER) -> None:
        """`peer`: the admitted peer, if this side is the owner."""
        self.control: ControlConnection = control
        self.data: list[DataConnection] = [*data]
        self.peer: Peer = peer
        self.closed: bool = False
        self.revoked: bool = False  # the peer's key has lost its role: close after the step

    def settimeout(self, seconds: float) -> None:
        """Set how long the peer may be silent within a message or frame, or leave data unacknowledged."""
        for connection in (self.control, *self.data):
            connection.settimeout(seconds)

    def close(self) -> None:
        """End all connections. Any thread may call this; threads that wait on a connection raise ConnectionClosed."""
        self.closed = True
        for connection in (self.control, *self.data):
            connection.shutdown()
