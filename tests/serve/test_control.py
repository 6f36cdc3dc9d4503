"""Messages of control connections: JSON and arrays, whose lengths are checked before memory is taken."""

import contextlib
import json
import struct
import threading
import tracemalloc

import numpy as np
import pytest
from support.wires import connected, files, nothing_left, pair

from csd_optim.errors import CSDValueError
from csd_optim.serve import control
from csd_optim.serve.control import ANSWER, MESSAGE_BYTES, MOST_ARRAYS, REQUEST, ControlConnection, JsonLimits
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
        ({"a": "\ud800"}, []),
        ({"a": "x" * 1000}, []),
        ({}, [bytes(1000)]),
        ({}, [b""] * (MOST_ARRAYS + 1)),
    ]:
        with pytest.raises(CSDValueError):
            one.send(message, *arrays)
    one.send({"a": 1})
    assert other.receive(30) == ({"a": 1}, [])


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
        encoded(b'{"a": "\\\\\\ud83d\\ude00"}'),
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
            receiver.receive(30)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "pickle" not in str(error.value)
    with pytest.raises(ConnectionClosed):
        receiver.send({})


def test_a_backslash_is_no_escape():
    one, other = ends()
    message = {"a": "\\ud800 \\\\udfff", "\\": "\U0001f600"}
    one.send(message)
    assert other.receive(30) == (message, [])


# ---- the JSON of a message ------------------------------------------------------------------


def test_a_model_of_100000_parameters_fits():
    """With names, shapes and all that may be in a manifest, and beside a record in an owner's answer."""
    param = {"name": f"model.layers.60.mlp.experts.383.{'x' * 60}.weight", "group": 10, "position": 100_000}
    param |= {"shape": [16384, 16384], "stride": [16384, 1], "dtype": "bfloat16", "extent": 10, "start": 10**12}
    param |= {"numel": 16384 * 16384, "of": {"shape": [16384, 65536], "first": [0, 16384]}}
    text = json.dumps({"manifest": {"params": [param] * 95_000}}, separators=(",", ":")).encode()
    REQUEST.check(text)
    ANSWER.check(text * 2)
    assert ANSWER.nbytes <= MESSAGE_BYTES


def unlike(n):
    """Return `n` different texts, with a character that makes all others of a text as wide as itself: four bytes."""
    return [f"{chr(0x10000 + k % 999)}{k // 999}" for k in range(n)]


def costly(limits):
    """Return texts of JSON that become many times as much memory."""
    n, texts = limits.values - 10, unlike(limits.values)
    width = limits.nbytes // (n * 2 // 3) - 22
    yield "[" + ",".join(["[]"] * (n // 2)) + "]"
    yield "[" + ",".join(f'{{"{c}":0.1}}' for c in texts[: n // 2]) + "]"
    yield "[" + ",".join([('{"a":' * 300 + "0.1" + "}" * 300)] * (n // 301)) + "]"
    yield "{" + ",".join(f'"{c}":"{c}{"x" * width}"' for c in texts[: n * 2 // 3]) + "}"
    yield f'["{texts[0]}{"x" * (limits.nbytes - 20)}"]'


def test_memory_of_a_message():
    """A sixteenth of the limits, which takes a sixteenth of the memory: 0.5 GiB for the worst of a whole message."""
    limits, peaks = JsonLimits(REQUEST.nbytes // 16, REQUEST.values // 16), []
    for text in costly(limits):
        data = bytearray(text.encode())
        limits.check(data)
        tracemalloc.start()
        try:
            with contextlib.suppress(ConnectionClosed):
                control.parse(data, limits)
            peaks.append((tracemalloc.get_traced_memory()[1] + len(data)) * 16 >> 20)
        finally:
            tracemalloc.stop()
    assert 300 < max(peaks) < 600, peaks  # MiB


@pytest.mark.parametrize("text", [b"[" * 1001, b'{"a":[' + b"0," * 1001 + b"0]}", b'{"a":"' + b"x" * 20_000 + b'"}'])
def test_more_values_or_text_than_is_allowed(text, monkeypatch):
    """Neither is it sent, nor is it parsed. Whoever sends learns what to do."""
    limits = JsonLimits(20_000, 1000)
    for name in ("REQUEST", "ANSWER"):
        monkeypatch.setattr(control, name, limits)
    one, other = connected()
    one.send([memoryview(encoded(text))])
    with monkeypatch.context() as patch:
        patch.setattr(json, "loads", None)
        with pytest.raises(ConnectionClosed, match=r"(1000|20000) are the limits"):
            ControlConnection(other).receive(30)
    one, other = ends()
    for message in ({"a": [0] * 1001}, {"a": "x" * 20_000}):
        with pytest.raises(CSDValueError, match="are the limits, enough for 47 parameters: join parameters"):
            one.send(message)
    one.send({"a": [0] * 900})
    assert other.receive(30) == ({"a": [0] * 900}, [])


def test_an_answer_may_have_twice_as_much(monkeypatch):
    """An owner repeats what it was told before, and more: what it has accepted can be resumed."""
    monkeypatch.setattr(control, "REQUEST", JsonLimits(1000, 100))
    monkeypatch.setattr(control, "ANSWER", JsonLimits(2000, 200))
    one, other = connected()
    trainer, owner = ControlConnection(one), ControlConnection(other, is_owner=True)
    for message in ({"a": "x" * 1500}, {"a": [0] * 150}):
        with pytest.raises(CSDValueError):
            trainer.send(message)
        owner.send(message)
        assert trainer.receive(30) == (message, [])
    one.send([memoryview(encoded(b'{"a":"' + b"x" * 1500 + b'"}'))])
    with pytest.raises(ConnectionClosed, match="64 and 1000 are the limits"):
        owner.receive(30)


def test_a_cut_message():
    whole = encoded(json.dumps({"a": 1}).encode(), b"abc")
    for n in range(len(whole)):
        one, other = connected()
        one.send([memoryview(whole)[:n]])
        one.shutdown()
        with pytest.raises(ConnectionClosed):
            ControlConnection(other).receive(30)


def test_a_silent_peer():
    one, other = ends()
    with pytest.raises(ConnectionClosed, match=r"has said nothing for 0.05 s"):
        one.receive(0.05)
    with pytest.raises(ConnectionClosed):
        other.receive()
