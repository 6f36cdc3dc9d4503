"""Messages of a control connection: a JSON object, and arrays of bytes after it.

A message begins with two 32-bit numbers, the length of the JSON and how many arrays there are, and the 64-bit length of
each array. Received data is never unpickled, and its lengths are checked before memory is taken.
"""

from __future__ import annotations

import json
import math
import re
import struct
import threading
from collections.abc import Mapping
from typing import Any

from ..errors import CSDValueError
from .tcp import Buffer, ConnectionClosed, Stream, bytes_of

MESSAGE_BYTES = 64 << 20  # maximum length of a message
MOST_ARRAYS = 64  # in a message
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a character; alone, it would be an error wherever it is printed
LENGTHS = struct.Struct("!II")


class ControlConnection:
    """Sends and receives messages; one thread at a time receives. Without a key: plain, else TLS 1.3."""

    def __init__(self, stream: Stream, most: int = MESSAGE_BYTES) -> None:
        """`most`: maximum length in bytes of a message that is received."""
        self._stream, self._most = stream, most
        self._sending = threading.Lock()

    def send(self, message: Mapping[str, Any], *arrays: Buffer) -> None:
        """Send a message with the bytes of contiguous arrays, together at most MESSAGE_BYTES.

        Raises CSDValueError, with nothing sent, if it is too long or contains NaN or infinity; ConnectionClosed.
        """
        try:
            text = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, TypeError) as e:
            raise CSDValueError(f"a message cannot be sent: {e}") from None
        sizes = [memoryview(a).nbytes for a in arrays]
        if len(text) + sum(sizes) > MESSAGE_BYTES or len(arrays) > MOST_ARRAYS:
            raise CSDValueError(
                f"a message has {len(text) + sum(sizes)} bytes and {len(arrays)} arrays; "
                f"{MESSAGE_BYTES} and {MOST_ARRAYS} are the limits"
            )
        head = LENGTHS.pack(len(text), len(arrays)) + struct.pack(f"!{len(sizes)}Q", *sizes)
        with self._sending:
            try:
                self._stream.send(bytes_of([head, text, *arrays]))
            except BaseException:
                self.shutdown()
                raise

    def receive(
        self, timeout: float | None = None, most: int = MESSAGE_BYTES
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the next message and its arrays. `timeout`: seconds until it begins (None: no limit).

        `most`: its maximum length in bytes, if that is less than usual.

        Raises ConnectionClosed, also if what was sent is no message.
        """
        try:
            self._stream.wait(timeout)
            return self._receive(min(most, self._most))
        except BaseException:
            self.shutdown()  # also after Ctrl-C: nobody knows how much of the message was received
            raise

    def _receive(self, most: int) -> tuple[dict[str, Any], list[memoryview]]:
        length, n = LENGTHS.unpack(self._bytes(LENGTHS.size))
        if n > MOST_ARRAYS or length > most:
            raise ConnectionClosed(f"a message was refused: {n} arrays, JSON of {length} bytes")
        sizes = struct.unpack(f"!{n}Q", self._bytes(8 * n))
        if length + sum(sizes) > most:
            raise ConnectionClosed(f"a message of {length + sum(sizes)} bytes was refused")
        message = parse(self._bytes(length))
        return message, [memoryview(self._bytes(size)) for size in sizes]

    def settimeout(self, seconds: float) -> None:
        """Set for how long the other side may be silent within a message."""
        self._stream.settimeout(seconds)

    def shutdown(self) -> None:
        """End the connection; any thread may do so, and threads that wait on it raise ConnectionClosed."""
        self._stream.shutdown()

    def _bytes(self, n: int) -> bytearray:
        data = bytearray(n)
        self._stream.receive(bytes_of([data]))
        return data


def parse(data: bytes | bytearray) -> dict[str, Any]:
    """Decode a JSON object without NaN and infinity. Raises ConnectionClosed."""
    try:
        message = json.loads(data.decode(), parse_constant=_finite, parse_float=_finite)
        if SURROGATE.search(data):
            json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise ConnectionClosed("a message is no JSON, or has numbers or characters that are none") from None
    if not isinstance(message, dict):
        raise ConnectionClosed("a message is not a JSON object")
    return message


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value
