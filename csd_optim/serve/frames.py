"""Frames of a data connection: a header of 32 bytes, and the payload that it announces.

The frames here are not encrypted: they travel on loopback without a key, or within TLS where `cryptography` is missing.
sealed.py has encrypted frames.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import CSDRuntimeError, CSDValueError
from .tcp import Buffer, Connection, ConnectionClosed, Stream, bytes_of

HEADER = struct.Struct("!IIQQQ")
FRAME_BYTES = 1 << 30  # maximum length of a payload
CHUNK = 256 << 10  # bytes discarded, encrypted or decrypted at a time: small enough for the cache


class Header(NamedTuple):
    """The header of a frame; all numbers are unsigned."""

    kind: int  # 32 bits: PUSH, PARAMS, ...
    tile: int  # 32 bits
    begin: int  # 64 bits: number of the step's BEGIN
    nbytes: int  # 64 bits: length of the payload, at most FRAME_BYTES
    entries: int  # 64 bits: words of Top-K entries in the payload


class DataConnection(Connection):
    """Sends and receives frames.

    Call receive_header(), check the header, then call receive() or discard(): no byte of a payload is received before
    its header was checked. Any error closes the connection, except where a docstring says otherwise.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._due: Header | None = None  # the payload that comes next

    def send(self, header: Header, views: Sequence[Buffer] = ()) -> None:
        """Send a frame without copying it. `views`: contiguous buffers, header.nbytes in total.

        Raises CSDValueError, with nothing sent, if the lengths differ; ConnectionClosed.
        """
        parts = self._parts(header, views)
        try:
            head = HEADER.pack(*header)
        except struct.error as e:
            raise CSDValueError(f"{header}: {e}") from None
        with self._sending, self._whole():
            self._send(head, parts)

    def receive_header(self, timeout: float | None = None) -> Header:
        """Return the next frame's header. `timeout`: seconds until it begins (None: no limit).

        Raises ConnectionClosed, also at the end of the connection.
        """
        if self._due is not None:
            raise CSDRuntimeError("the payload of the frame before has not been received")
        with self._whole():
            self._stream.wait(timeout)
            header = Header._make(HEADER.unpack(self._receive_head()))
            if header.nbytes > FRAME_BYTES:
                raise ConnectionClosed(f"a frame of {header.nbytes} bytes was refused")
            self._due = header if header.nbytes else None
            return header

    def receive(self, header: Header, views: Sequence[Buffer] = ()) -> None:
        """Receive the payload of the frame with this header into contiguous buffers, header.nbytes in total.

        The buffers' content is unspecified until this has returned without an error. Raises CSDValueError, with nothing
        received, if the lengths differ; ConnectionClosed.
        """
        parts = self._parts(header, views)
        with self._whole():
            if self._taken(header):
                self._receive(parts)

    def discard(self, header: Header) -> None:
        """Receive the payload and forget it. Raises ConnectionClosed."""
        with self._whole():
            if self._taken(header):
                self._discard(header.nbytes)

    def _parts(self, header: Header, views: Sequence[Buffer]) -> list[memoryview]:
        parts = bytes_of(views)
        if (n := sum(map(len, parts))) != header.nbytes or n > FRAME_BYTES:
            raise CSDValueError(
                f"the buffers have {n} bytes, the header says {header.nbytes}, {FRAME_BYTES} is the limit"
            )
        return parts

    def _taken(self, header: Header) -> bool:
        """Return whether a payload comes next. Raises CSDRuntimeError if it belongs to another frame."""
        due, self._due = self._due, None
        if due != (header if header.nbytes else None):
            raise CSDRuntimeError(f"the payload that comes next is not that of {header}")
        return due is not None

    def _send(self, head: bytes, parts: list[memoryview]) -> None:
        self._stream.send([memoryview(head), *parts])

    def _receive_head(self) -> bytes | bytearray:
        return self._bytes(HEADER.size)

    def _receive(self, parts: list[memoryview]) -> None:
        self._stream.receive(parts)

    def _discard(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, CHUNK)))
        while nbytes:
            n = min(nbytes, CHUNK)
            self._stream.receive([scratch[:n]])
            nbytes -= n
