"""The connections of an admitted peer: one for control, and for each stream one up, to the owner, and one down."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from .connection import Connection
from .keys import Role
from .limits import MOST_STREAMS
from .schema import Meta, Name, Struct, msgspec


class Opening(Struct, frozen=True, kw_only=True):
    """The first message of a connection, in every version of the protocol."""

    protocol: str


class OpenControl(Opening, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="control"):
    """Asks for a session, with so many streams."""

    streams: Annotated[int, Meta(ge=0, le=MOST_STREAMS)]


class OpenData(Opening, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="data"):
    """Joins a session, for the tiles of one direction of one stream."""

    session: Name
    way: Literal["up", "down"]
    stream: Annotated[int, Meta(ge=0, lt=MOST_STREAMS)]


class Opened(Struct, frozen=True, kw_only=True):
    """The owner's answer, in every version of the protocol. `refused`: why not; `session`: a name to join it by."""

    refused: Literal["", "key", "full", "request", "session", "version", "needs key", "has no key"] = ""
    session: str = ""


ANY_OPENING = msgspec.json.Decoder(msgspec.Raw)
VERSION, OPENING = msgspec.json.Decoder(Opening), msgspec.json.Decoder(OpenControl | OpenData)
OPENED = msgspec.json.Decoder(Opened)
OPENING_BYTES = 1 << 10


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
    """The connections of an admitted peer. `up` and `down`: by stream."""

    def __init__(self, control: Connection, peer: Peer = AN_OWNER) -> None:
        """`peer`: the admitted peer, if this side is the owner."""
        self.control: Connection = control
        self.up: list[Connection] = []
        self.down: list[Connection] = []
        self.peer: Peer = peer
        self.closed: bool = False
        self.revoked: bool = False  # the peer's key has lost its role: close after the step

    @property
    def is_worn(self) -> bool:
        """Whether the session should be replaced by another one: see Connection."""
        return any(connection.is_worn for connection in (self.control, *self.up, *self.down))

    def settimeout(self, seconds: float) -> None:
        """Set how long the peer may be silent within a message, or leave data unacknowledged."""
        for connection in (self.control, *self.up, *self.down):
            connection.settimeout(seconds)

    def close(self) -> None:
        """End all connections. Any thread may call this; threads that wait on a connection raise ConnectionClosed."""
        self.closed = True
        for connection in (self.control, *self.up, *self.down):
            connection.end()
