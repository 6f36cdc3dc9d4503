"""Frames that are encrypted with AES-256-GCM, by `cryptography`.

A frame is the header (32 bytes encrypted, and a tag of 16) and, unless it is empty, the payload with a tag of its own:
so a header is verified before anything acts on it. Each direction of each connection has its own key. The nonce
consists of the frame's number and the part (header or payload), and is never sent: so a frame that was repeated, left
out, moved or cut fails. After KEY_BYTES a key is replaced by a key derived from it.
"""

from __future__ import annotations

import hmac
import struct
from typing import Any

from .frames import HEADER, DataConnection
from .tcp import Buffer, ConnectionClosed, Stream, bytes_of

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    AVAILABLE = True
except ImportError:
    AVAILABLE = False

NONCE = struct.Struct("!IQ")
TAG = 16  # bytes
HEAD, PAYLOAD = 0, 1  # parts of a frame
SLOW = (
    "data is encrypted by `ssl`, which takes two to four times the CPU time of `cryptography`, because one side lacks "
    "that: pip install csd_optim[serve]"
)
PIECE = 2 << 20  # bytes encrypted or decrypted at a time: smaller pieces take more CPU time
KEY_BYTES = 1 << 36  # bytes after which a key is replaced; one frame more is harmless


class Direction:
    """Key and frame number of one direction. Never used again after an error, so that no nonce is used twice."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._used = 0  # bytes
        self._frame = -1

    def next_frame(self) -> None:
        self._frame += 1
        if self._used > KEY_BYTES:
            self._key, self._used = hmac.digest(self._key, b"csd-optim frames 4 next\0", "sha256"), 0

    def count(self, nbytes: int) -> None:
        """Count the bytes for which the key is used. Both sides have to arrive at the same number."""
        self._used += nbytes

    def cipher(self, part: int, nbytes: int) -> Any:
        self.count(nbytes)
        # Not AESGCM, which holds the GIL while it works.
        return Cipher(algorithms.AES(self._key), modes.GCM(NONCE.pack(part, self._frame)))


class SealedConnection(DataConnection):
    """A data connection whose frames are encrypted."""

    def __init__(self, stream: Stream, sends: bytes, receives: bytes) -> None:
        """`sends`, `receives`: keys of 32 bytes; the other side has the same two, swapped."""
        super().__init__(stream)
        self._out, self._in = Direction(sends), Direction(receives)
        self._sealed = self._arrived = memoryview(b"")  # scratch

    def _send(self, head: bytes, parts: list[memoryview]) -> None:
        self._out.next_frame()
        seal = self._out.cipher(HEAD, len(head)).encryptor()
        first: list[Buffer] = [seal.update(head) + seal.finalize(), seal.tag]
        if not parts:
            return self._stream.send(bytes_of(first))
        nbytes = sum(map(len, parts))
        self._sealed = _room(self._sealed, nbytes)
        seal, filled = self._out.cipher(PAYLOAD, nbytes).encryptor(), 0
        for part in parts:
            for piece in _pieces(part, len(self._sealed) - filled, len(self._sealed)):
                seal.update_into(piece, self._sealed[filled : filled + len(piece)])
                filled += len(piece)
                if filled == len(self._sealed):
                    self._stream.send(bytes_of([*first, self._sealed]), begins=bool(first))
                    first, filled = [], 0
        seal.finalize()
        self._stream.send(bytes_of([*first, self._sealed[:filled], seal.tag]), begins=bool(first))

    def _receive_head(self) -> bytes:
        sealed = self._bytes(HEADER.size + TAG)
        self._in.next_frame()
        unseal = self._in.cipher(HEAD, HEADER.size).decryptor()
        head: bytes = unseal.update(sealed[: HEADER.size])
        _verify(unseal, sealed[HEADER.size :])
        return head

    def _receive(self, parts: list[memoryview]) -> None:
        left, tag, arrived = sum(map(len, parts)), bytearray(TAG), self._arrived[:0]
        self._arrived = _room(self._arrived, left)
        unseal = self._in.cipher(PAYLOAD, left).decryptor()
        for part in parts:
            while part:
                if not arrived:
                    arrived = self._arrived[:left]
                    left -= len(arrived)
                    self._stream.receive([arrived] if left else [arrived, memoryview(tag)])
                n = min(len(part), len(arrived))
                unseal.update_into(arrived[:n], part[:n])
                part, arrived = part[n:], arrived[n:]
        _verify(unseal, tag)

    def _discard(self, nbytes: int) -> None:
        self._in.count(nbytes)
        super()._discard(nbytes + TAG)  # unused, so not verified


def _verify(unseal: Any, tag: bytearray) -> None:
    try:
        unseal.finalize_with_tag(bytes(tag))
    except InvalidTag:
        raise ConnectionClosed("a frame was changed on the way, or is out of order") from None


def _room(scratch: memoryview, nbytes: int) -> memoryview:
    """Return `scratch`, or new memory if a larger piece of a payload of `nbytes` needs it."""
    wanted = min(nbytes, PIECE)
    return scratch if len(scratch) >= wanted else memoryview(bytearray(wanted))


def _pieces(view: memoryview, first: int, most: int) -> list[memoryview]:
    """Cut a view into pieces: the first of at most `first` bytes, the others of at most `most`."""
    return [view[:first], *(view[at : at + most] for at in range(first, len(view), most))]
