"""The messages before a connection is admitted, byte by byte. docs/optimizer-ranks.md has the table.

    1   >   "csdserve", version, kind, session               28 bytes   in the clear
    2   <   "csdowner", version, status                      12         in the clear: believed only if it says no
    3   <>  TLS 1.3 with the certificates of both
    4   >   1 again                                          28         in TLS: so nobody has changed it
    5   <   2, session, ticket                               60         in TLS

    6   >   1 with the session of 5, nonce                   60         each data connection
    7   <   nonce, proof that the owner has the ticket       64
    8   >   proof that the other side has it                 32
    9   <   2                                                12

`>` is sent by the side that connects. Integers are big-endian. The session in 1 and 4 contains a Request. Without a
key, which is possible on loopback only, message 3 is left out, and the kinds differ: a side with a key never continues
without TLS, and a side without a key never pretends to have one.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

from .tcp import ConnectionClosed, Stream

VERSION = 4
MAGIC, REPLY = b"csdserve", b"csdowner"
PREFACE, ANSWER, REQUEST = struct.Struct("!8sHH16s"), struct.Struct("!8sHH"), struct.Struct("!II8x")
CONTROL, DATA, DATA_IN_TLS = 1, 2, 3  # kinds of connections
PLAIN = 0x100  # added to the kind without a key
GO_ON, OTHER_VERSION, BUSY, REFUSED, GO_ON_IN_TLS, NEEDS_KEY, HAS_NO_KEY = range(7)  # status
SESSION, TICKET, NONCE, PROOF = 16, 32, 32, 32  # bytes
ADMITTED = ANSWER.size, SESSION, TICKET  # bytes of the parts of message 5
IS_BUSY = "it is busy"  # with other handshakes
NO_FRAMES = 1  # flag of a request: the connecting side cannot encrypt frames, so data connections use TLS
MOST_STREAMS = 8  # data connections of a session
DEADLINE = 10.0  # seconds for the handshake of a connection


class Refusal(Exception):
    """The handshake fails. The text contains nothing that the other side has sent."""


class BusyError(ConnectionClosed):
    """The owner has too many handshakes or sessions at once: try again."""


class Request(NamedTuple):
    """The session field of messages 1 and 4 of a control connection: 16 bytes."""

    streams: int  # data connections that will follow
    flags: int

    def pack(self) -> bytes:
        return REQUEST.pack(*self)


def preface(kind: int, session: bytes) -> bytes:
    """Return message 1."""
    return PREFACE.pack(MAGIC, VERSION, kind, session)


def answer(status: int) -> bytes:
    """Return message 2."""
    return ANSWER.pack(REPLY, VERSION, status)


def status_of(message: bytes) -> int:
    """Return the status in message 2. Raises Refusal."""
    magic, version, status = ANSWER.unpack(message)
    if magic != REPLY:
        raise Refusal("no `csd-optim serve` answers there")
    if status == OTHER_VERSION or version != VERSION:
        raise Refusal(f"the owner speaks another version of the protocol than {VERSION}")
    return int(status)


def read(stream: Stream, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    stream.receive([memoryview(data)])
    return bytes(data)


def say(stream: Stream, *parts: bytes) -> None:
    stream.send([memoryview(b"".join(parts))])


# ---- the ticket, on data connections --------------------------------------------------------


def prove_to_owner(stream: Stream, kind: int, session: bytes, ticket: bytes) -> bytes:
    """Send messages 6 and 8, and verify 7. Returns the bytes from which keys are derived. Raises Refusal."""
    said = preface(kind, session) + secrets.token_bytes(NONCE)
    say(stream, said)
    first = read(stream, ANSWER.size)
    if first == answer(BUSY):
        raise BusyError(IS_BUSY)
    theirs = first + read(stream, NONCE + PROOF - ANSWER.size)
    said += theirs[:NONCE]
    if not hmac.compare_digest(theirs[NONCE:], _proof(ticket, b"owner", said)):
        raise Refusal("the owner does not know the ticket")
    say(stream, _proof(ticket, b"trainer", said + theirs[NONCE:]))
    if status_of(read(stream, ANSWER.size)) != GO_ON:
        raise Refusal("the owner refuses the data connection")
    return said


def prove_to_trainer(stream: Stream, first: bytes, ticket: bytes) -> bytes:
    """Receive the rest of 6, send 7, and verify 8. `first`: message 1. Returns as prove_to_owner(). Raises Refusal."""
    said = first + read(stream, NONCE) + secrets.token_bytes(NONCE)
    proof = _proof(ticket, b"owner", said)
    say(stream, said[-NONCE:], proof)
    if not hmac.compare_digest(read(stream, PROOF), _proof(ticket, b"trainer", said + proof)):
        raise Refusal("without the ticket")
    return said


def frame_keys(ticket: bytes, said: bytes) -> tuple[bytes, bytes]:
    """Return the keys of frames to the owner and from the owner, 32 bytes each. `said`: contains both nonces."""
    up, down = (hmac.digest(ticket, b"csd-optim frames 4 " + way + b"\0" + said, "sha256") for way in (b"up", b"down"))
    return up, down


def _proof(ticket: bytes, whose: bytes, said: bytes) -> bytes:
    return hmac.digest(ticket, b"csd-optim data 4 " + whose + b"\0" + said, "sha256")  # `whose`: no reflection
