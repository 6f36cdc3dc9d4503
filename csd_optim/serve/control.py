"""Messages of a control connection: a JSON object, and arrays of bytes after it.

A message begins with two 32-bit numbers, the length of the JSON and the number of arrays, and the 64-bit length of each
array. Received data is never unpickled. Lengths are checked before memory is taken, and so is the number of values in
the JSON, since a value of two bytes takes hundreds of bytes as a Python object.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import CSDValueError
from .tcp import Buffer, Connection, ConnectionClosed, Stream, bytes_of

MESSAGE_BYTES = 64 << 20  # maximum length of a message
MOST_ARRAYS = 64  # in a message
# Half of a character that is no part of UTF-8. Our side sends characters unescaped, so never such a half.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
LENGTHS = struct.Struct("!II")


class JsonLimits(NamedTuple):
    """Limits of the JSON in a message."""

    nbytes: int
    values: int  # counted by commas and opening brackets: cheap, and never too low

    def check(self, text: bytes | bytearray) -> None:
        """Raise CSDValueError if a text exceeds the limits."""
        values = sum(map(text.count, (b",", b"[", b"{")))
        if len(text) > self.nbytes or values > self.values:
            raise CSDValueError(
                f"the JSON of a message has {len(text)} bytes and {values} values; {self.nbytes} and {self.values} are "
                f"the limits, enough for {self.values // PARAM_VALUES} parameters: join parameters, give them shorter "
                f"names"
            )


# The longest message describes a model: 170 to 330 bytes and 14 to 21 values for a parameter, so some 100,000
# parameters. Parsed, the worst message within the limits takes 0.5 GiB (measured: keys and texts of 4 bytes a
# character).
PARAM_VALUES = 21
REQUEST = JsonLimits(32 << 20, 1 << 21)
# An owner's answer repeats the description beside the last record: everything accepted can be resumed.
ANSWER = JsonLimits(2 * REQUEST.nbytes, 2 * REQUEST.values)


class ControlConnection(Connection):
    """Sends and receives messages. Without a key: plain, else TLS 1.3."""

    def __init__(self, stream: Stream, most: int = MESSAGE_BYTES, *, is_owner: bool = False) -> None:
        """`most`: maximum length in bytes of a message that is received. `is_owner`: this end sends answers."""
        super().__init__(stream)
        self._most = most
        self._sends, self._receives = (ANSWER, REQUEST) if is_owner else (REQUEST, ANSWER)

    def send(self, message: Mapping[str, Any], *arrays: Buffer) -> None:
        """Send a message with the bytes of contiguous arrays, together at most MESSAGE_BYTES.

        Raises CSDValueError, with nothing sent, if the message is too long or contains NaN, infinity or half of a
        character; ConnectionClosed.
        """
        try:
            text = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
        except (ValueError, TypeError) as e:
            raise CSDValueError(f"a message cannot be sent: {e}") from None
        self._sends.check(text)
        sizes = [memoryview(a).nbytes for a in arrays]
        if len(text) + sum(sizes) > MESSAGE_BYTES or len(arrays) > MOST_ARRAYS:
            raise CSDValueError(
                f"a message has {len(text) + sum(sizes)} bytes and {len(arrays)} arrays; "
                f"{MESSAGE_BYTES} and {MOST_ARRAYS} are the limits"
            )
        head = LENGTHS.pack(len(text), len(arrays)) + struct.pack(f"!{len(sizes)}Q", *sizes)
        with self._sending, self._whole():
            self._stream.send(bytes_of([head, text, *arrays]))

    def receive(
        self, timeout: float | None = None, most: int = MESSAGE_BYTES
    ) -> tuple[dict[str, Any], list[memoryview]]:
        """Return the next message and its arrays. `timeout`: seconds until it begins (None: no limit).

        `most`: maximum length in bytes, if lower than usual.

        Raises ConnectionClosed, also for data that is no message.
        """
        with self._whole():
            self._stream.wait(timeout)
            return self._receive(min(most, self._most))

    def _receive(self, most: int) -> tuple[dict[str, Any], list[memoryview]]:
        length, n = LENGTHS.unpack(self._bytes(LENGTHS.size))
        most_text = min(most, self._receives.nbytes)
        if n > MOST_ARRAYS or length > most_text:
            limits = f"{MOST_ARRAYS} and {most_text} are the limits"
            raise ConnectionClosed(f"a message was refused: {n} arrays, JSON of {length} bytes; {limits}")
        sizes = struct.unpack(f"!{n}Q", self._bytes(8 * n))
        if length + sum(sizes) > most:
            raise ConnectionClosed(f"a message of {length + sum(sizes)} bytes was refused")
        message = parse(self._bytes(length), self._receives)
        return message, [memoryview(self._bytes(size)) for size in sizes]


def parse(data: bytes | bytearray, limits: JsonLimits) -> dict[str, Any]:
    """Decode a JSON object without NaN and infinity. Raises ConnectionClosed."""
    try:
        limits.check(data)
        if SURROGATE.search(data.replace(rb"\\", b"")):  # an escaped backslash begins no \u
            raise ValueError
        message = json.loads(data.decode(), parse_constant=_finite, parse_float=_finite)
    except CSDValueError as e:
        raise ConnectionClosed(str(e)) from None
    except (ValueError, RecursionError):
        raise ConnectionClosed("a message is no JSON, or has numbers or characters that are none") from None
    if not isinstance(message, dict):
        raise ConnectionClosed("a message is not a JSON object")
    return message


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value
