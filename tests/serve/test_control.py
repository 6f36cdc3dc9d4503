"""Messages of control connections: JSON and arrays, whose lengths are checked before memory is taken."""

import json
import struct
import threading
import tracemalloc

import numpy as np
import pytest
from support.wires import connected, files, nothing_left, pair

from csd_optim.errors import CSDValueError
from csd_optim.serve import control
from csd_optim.serve.control import MESSAGE_BYTES, MOST_ARRAYS, ControlConnection
from csd_optim.serve.tcp import ConnectionClosed

__all__ = ["files"]


def ends():
    one, other = connected()
    return ControlConnection(one), ControlConnection(other)


@pytest.mark.parametrize("kind", ["frames", "plain"])
def test_messages(kind, files):
    """In both directions, and while another thread waits for one: TLS as well."""
    with nothing_left(), pair(kind, files) as to:
        session = to.connect()
        arrays = [np.arange(300_000, dtype=np.float32).reshape(3, -1), b"", np.empty((0, 3)), b"x"]
        got = []
        waits = threading.Thread(target=lambda: got.extend(session.control.receive(20) for _ in range(40)))
        waits.start()
        senders = [threading.Thread(target=send, args=(session.control, k, arrays)) for k in range(4)]
        for thread in senders:
            thread.start()
        for thread in (*senders, waits):
            thread.join()
        assert sorted((m["thread"], m["k"]) for m, _ in got) == [(t, k) for t in range(4) for k in range(10)]
        for _, back in got:
            assert [bytes(b) for b in back] == [memoryview(a).tobytes() for a in arrays]
        session.close()


def send(connection, thread, arrays):
    for k in range(10):
        connection.send({"thread": thread, "k": k, "text": "Grüße\u202e\0\U0001f600"}, *arrays)


def test_what_is_not_sent(monkeypatch):
    monkeypatch.setattr(control, "MESSAGE_BYTES", 1000)
    one, other = ends()
    for message, arrays in [
        ({"lr": float("nan")}, []),
        ({"lr": [float("-inf")]}, []),
        ({"a": {1, 2}}, []),
        ({"a": "x" * 1000}, []),
        ({}, [bytes(1000)]),
        ({}, [b""] * (MOST_ARRAYS + 1)),
    ]:
        with pytest.raises(CSDValueError):
            one.send(message, *arrays)
    one.send({"a": 1})
    assert other.receive(5) == ({"a": 1}, [])


def encoded(text, *arrays):
    lengths = [len(array) for array in arrays]
    return struct.pack(f"!II{len(arrays)}Q", len(text), len(arrays), *lengths) + text + b"".join(arrays)


@pytest.mark.parametrize(
    "data",
    [
        encoded(b"[1]"),
        encoded(b"1"),
        encoded(b""),
        encoded(b'{"a": NaN}'),
        encoded(b'{"a": -Infinity}'),
        encoded(b'{"a": 1e999}'),
        encoded(b'{"a": ' + b"9" * 5000 + b"}"),
        encoded(b"[" * 100_000),
        encoded(b'{"a":' * 100_000),
        encoded(b'{"a": 1'),
        encoded(b'{"a": "\xff"}'),
        encoded(b'{"a": "\\ud800"}'),
        encoded(b'{"\\uDFFF": 1}'),
        encoded(b"\x80\x04\x95pickle"),
        struct.pack("!II", MESSAGE_BYTES + 1, 0),
        struct.pack("!II", 2**32 - 1, 0),
        struct.pack("!II", 2, MOST_ARRAYS + 1),
        struct.pack("!II", 2, 2**32 - 1),
        struct.pack("!IIQ", 2, 1, 2**64 - 1),
        struct.pack("!IIQQ", 2, 2, MESSAGE_BYTES // 2, MESSAGE_BYTES // 2),
        struct.pack("!IIQQ", 2, 2, 2**63, 2**63),
    ],
)
def test_what_is_refused(data):
    """Without memory for it, and the connection ends. The error does not repeat what was said."""
    one, other = connected()
    receiver = ControlConnection(other)
    one.send([memoryview(data)])
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionClosed) as error:
            receiver.receive(5)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "pickle" not in str(error.value)
    with pytest.raises(ConnectionClosed):
        receiver.send({})


def test_a_cut_message():
    whole = encoded(json.dumps({"a": 1}).encode(), b"abc")
    for n in range(len(whole)):
        one, other = connected()
        one.send([memoryview(whole)[:n]])
        one.shutdown()
        with pytest.raises(ConnectionClosed):
            ControlConnection(other).receive(5)


def test_a_silent_peer():
    one, other = ends()
    with pytest.raises(ConnectionClosed, match=r"has said nothing for 0.05 s"):
        one.receive(0.05)
    with pytest.raises(ConnectionClosed):
        other.receive()
