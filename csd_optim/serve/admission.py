"""Lets peers in: the handshake of an owner, and what joins a control connection and its data connections."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
import weakref

from . import handshake, sealed
from .accepted import Accepted
from .control import MESSAGE_BYTES, ControlConnection
from .frames import DataConnection
from .handshake import Refusal, Request
from .keys import fingerprint
from .limits import Deadlines, most_connections
from .session import Peer, Role, Session
from .tcp import Stream, Tcp
from .tls import Tls

JOIN_SECONDS = 60.0  # for all data connections, once the control connection is admitted
REFUSALS = {  # by the status that the other side is told
    handshake.REFUSED: "of a key that is not accepted, or not for this",
    handshake.OTHER_OWNER: "for another owner",
    handshake.BUSY: "of more sessions than the limit of open files (ulimit -n) or of readers allows",
}
SESSIONS, READERS = 4096, 64  # that are open at once, in all and by readers
READER_BYTES = 64 << 10  # maximum length of a reader's message


@dataclasses.dataclass(frozen=True, eq=False)
class Joining:
    """An admitted control connection that waits for its data connections."""

    ticket: bytes = dataclasses.field(repr=False)
    peer: Peer
    tcp: Tcp
    stream: Stream
    streams: int
    kind: int  # of its data connections
    data: list[DataConnection]

    def shutdown(self) -> None:
        self.tcp.shutdown()
        for connection in self.data:
            connection.shutdown()


class Admission:
    """Decides about each connection of an owner."""

    def __init__(self, accepted: Accepted | None, number: int, timeout: float, deadlines: Deadlines) -> None:
        """`accepted`: None, where no keys are needed. `number`: of this owner. `timeout`: of admitted connections."""
        self._accepted, self._number, self._timeout, self._deadlines = accepted, number, timeout, deadlines
        self._lock = threading.Lock()
        self._joining: dict[bytes, Joining] = {}  # by session
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    def admit(self, tcp: Tcp) -> Session | None:
        """Do the handshake of a connection. Returns a session if this connection was the last that it needs.

        Raises Refusal, ConnectionClosed, ssl.SSLError; the connection is then for the caller to shut down.
        """
        until = time.monotonic() + handshake.DEADLINE
        first = handshake.read(tcp, handshake.PREFACE.size)
        self._deadlines.set(tcp, until)
        magic, version, kind, name = handshake.PREFACE.unpack(first)
        if magic != handshake.MAGIC:
            raise Refusal("of another protocol")
        if version != handshake.VERSION:
            handshake.say(tcp, handshake.answer(handshake.OTHER_VERSION))
            raise Refusal("of another version")
        accepted = self._accepted
        if bool(kind & handshake.PLAIN) is not (accepted is None):
            handshake.say(tcp, handshake.answer(handshake.HAS_NO_KEY if accepted is None else handshake.NEEDS_KEY))
            raise Refusal("with a key, and there is none here" if accepted is None else "without a key")
        kind &= ~handshake.PLAIN
        if kind in (handshake.CONTROL, handshake.OWNERS):
            return self._control(tcp, first, kind == handshake.OWNERS, Request(*handshake.REQUEST.unpack(name)))
        if kind in (handshake.DATA, handshake.DATA_IN_TLS):
            return self._data(tcp, first, kind, name)
        raise Refusal("of an unknown kind")

    def replace(self, accepted: Accepted) -> None:
        """Accept other keys from now on; sessions of a key that has lost its role are revoked."""
        with self._lock:
            self._accepted = accepted
            for session in self._sessions:
                session.revoked |= not self._stands(session.peer)
        self.tidy()

    def tidy(self, everything: bool = False) -> None:
        """End what waits for data connections but is over or revoked, or everything that waits."""
        with self._lock:
            # Before its data connections are there, a peer says nothing on the control connection.
            gone = [n for n, j in self._joining.items() if everything or j.tcp.has_news() or not self._stands(j.peer)]
            ended = [self._joining.pop(name) for name in gone]
        for joining in ended:
            self._deadlines.clear(joining.tcp)
            joining.shutdown()

    # ---- control connections ----------------------------------------------------------------

    def _control(self, tcp: Tcp, first: bytes, owners: bool, request: Request) -> Session | None:
        accepted = self._accepted
        handshake.say(tcp, handshake.answer(handshake.GO_ON))
        stream, print_ = self._stream(tcp, accepted)
        if handshake.read(stream, handshake.PREFACE.size) != first:
            raise Refusal("with a message that was changed on the way")
        usual = Role.OWNER if owners else Role.ADMIN
        role = usual if accepted is None else accepted.roles.get(print_)
        name, ticket = secrets.token_bytes(handshake.SESSION), secrets.token_bytes(handshake.TICKET)
        peer = Peer(role or Role.READER, print_, tcp.address, request.prover)
        with self._lock:
            status = self._status(role, peer, owners, request)
            if status in (handshake.GO_ON, handshake.GO_ON_IN_TLS):
                kind = handshake.DATA if status == handshake.GO_ON else handshake.DATA_IN_TLS
                joining = Joining(ticket, peer, tcp, stream, request.streams, kind, [])
                if request.streams:
                    self._joining[name] = joining  # before 5, after which data connections may come
        if status not in (handshake.GO_ON, handshake.GO_ON_IN_TLS):
            handshake.say(stream, handshake.answer(status), bytes(handshake.SESSION + handshake.TICKET))
            raise Refusal(REFUSALS[status])
        self._deadlines.set(tcp, time.monotonic() + JOIN_SECONDS)
        try:
            handshake.say(stream, handshake.answer(status), request.answered_by_owner() if owners else name, ticket)
        except BaseException:
            with self._lock:
                self._joining.pop(name, None)
            raise
        return None if request.streams else self._session(joining)

    def _status(self, role: Role | None, peer: Peer, owners: bool, request: Request) -> int:
        """Return what 5 says. Called with the lock held."""
        if role is None or owners is not (role is Role.OWNER) or not self._stands(peer):
            return handshake.REFUSED
        if request.wanted != self._number or (owners and request.prover == self._number):
            return handshake.OTHER_OWNER
        most = 0 if owners else handshake.MOST_STREAMS
        if request.streams > most or request.flags & ~handshake.NO_FRAMES or (request.prover and not owners):
            return handshake.REFUSED
        if not self._has_room(role, 1 + request.streams):
            return handshake.BUSY
        plain = self._accepted is None
        return handshake.GO_ON if plain or (sealed.AVAILABLE and not request.flags) else handshake.GO_ON_IN_TLS

    def _has_room(self, role: Role, connections: int) -> bool:
        """Return whether there may be another session of so many connections. Called with the lock held."""
        live = [(session.peer.role, 1 + len(session.data)) for session in self._sessions if not session.closed]
        live += [(joining.peer.role, 1 + joining.streams) for joining in self._joining.values()]
        readers = sum(of is Role.READER for of, _ in live)
        return (
            len(live) < SESSIONS
            and (role is not Role.READER or readers < READERS)
            and connections + sum(n for _, n in live) <= most_connections()
        )

    def _stands(self, peer: Peer) -> bool:
        """Return whether the peer's key has still the role that it was admitted with. Called with the lock held."""
        return self._accepted is None or self._accepted.roles.get(peer.fingerprint) is peer.role

    # ---- data connections -------------------------------------------------------------------

    def _data(self, tcp: Tcp, first: bytes, kind: int, name: bytes) -> Session | None:
        with self._lock:
            joining = self._joining.get(name)
        if joining is None or joining.kind != kind:
            raise Refusal("of an unknown session")  # without work, and without an answer
        stream: Stream = tcp
        if kind == handshake.DATA_IN_TLS:
            handshake.say(tcp, handshake.answer(handshake.GO_ON))
            stream, print_ = self._stream(tcp, self._accepted)
            if print_ != joining.peer.fingerprint or handshake.read(stream, handshake.PREFACE.size) != first:
                raise Refusal("with a message that was changed on the way")
        said = handshake.prove_to_trainer(stream, first, joining.ticket)
        if kind == handshake.DATA_IN_TLS or self._accepted is None:
            connection = DataConnection(stream)
        else:
            up, down = handshake.frame_keys(joining.ticket, said)
            connection = sealed.SealedConnection(tcp, sends=down, receives=up)
        with self._lock:
            if self._joining.get(name) is not joining:
                raise Refusal("of an unknown session")
            joining.data.append(connection)
            if complete := len(joining.data) == joining.streams:
                del self._joining[name]  # and with it the ticket: nothing can join any more
        try:
            handshake.say(stream, handshake.answer(handshake.GO_ON))
            self._deadlines.clear(tcp)
            return self._session(joining) if complete else None
        except BaseException:
            joining.shutdown()
            raise

    def _session(self, joining: Joining) -> Session:
        self._deadlines.clear(joining.tcp)
        most = READER_BYTES if joining.peer.role is Role.READER else MESSAGE_BYTES
        session = Session(ControlConnection(joining.stream, most, is_owner=True), joining.data, joining.peer)
        session.settimeout(self._timeout)
        with self._lock:
            session.revoked = not self._stands(joining.peer)
            self._sessions.add(session)
        return session

    def _stream(self, tcp: Tcp, accepted: Accepted | None) -> tuple[Stream, str]:
        """Change to TLS if there is a key. Returns the stream, and the fingerprint of the other side."""
        if accepted is None:
            return tcp, ""
        tls = Tls(tcp, accepted.context, server=True)
        return tls, fingerprint(tls.handshake())
