"""Messages arrive as they were sent, in their order, or the connection ends."""

import contextlib
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.wire_ends import ENDS, SAID, Said, ends, frame, raw, received, sockets
from support.wires import files, nothing_left

from csd_optim.errors import CSDRuntimeError, CSDValueError
from csd_optim.serve.wire import connection
from csd_optim.serve.wire.connection import CHUNK, FRAME_BYTES, SMALL, Connection, ConnectionClosed
from csd_optim.serve.wire.schema import MOST_ARRAYS

__all__ = ["files"]


def cut(data, *sizes):
    """Cut bytes into pieces of these sizes, again and again."""
    pieces, at = [], 0
    while at < len(data):
        for size in sizes:
            pieces.append(data[at : at + size])
            at += size
    return pieces


@pytest.fixture(params=ENDS)
def both(request, files):
    """Both ends of a connection of each kind."""
    with nothing_left():
        pair = ends(request.param, files)
        yield pair
        for end in pair:
            end.end()
        del pair


SIZES = [0, 1, SMALL - 1, SMALL, SMALL + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


@pytest.mark.parametrize("nbytes", SIZES)
def test_messages(nbytes, both):
    """From and to buffers of any sizes, in each direction."""
    one, other = both
    payload = random.Random(nbytes).randbytes(nbytes)
    message = Said(a=-(2**63), text="Grüße\u202e\0\U0001f600\\ud800")
    for sender, receiver in (one, other), (other, one), (one, other):
        thread = threading.Thread(target=sender.send, args=(message, *cut(payload, 1000, 0, 70_001, 3)))
        thread.start()
        assert receiver.receive(SAID, 30) == (message, nbytes)
        into = bytearray(nbytes)
        receiver.fill(cut(memoryview(into), 4097, 5, 100_000))
        thread.join()
        assert into == payload
    one.end()
    with pytest.raises(ConnectionClosed, match="has closed"):
        other.receive(SAID)


def test_thousands_of_small_buffers(both):
    """Together they take few system calls, and few records."""
    one, other = both
    arrays = [np.full(3, k, np.float32) for k in range(5000)]
    calls, real = [], connection.runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "runs", lambda views: [calls.append(run) or run for run in real(views)])
        one.send(Said(), *arrays)
    assert len(calls) <= 60_000 // SMALL + 2
    assert other.receive(SAID, 30) == (Said(), 60_000)
    into = [np.empty((1, 3), np.float32) for _ in arrays]
    other.fill(into)
    assert all((a == b).all() for a, b in zip(arrays, into, strict=True))


def test_arrays(both):
    one, other = both
    arrays = [np.arange(300_000, dtype=np.float32).reshape(3, -1), b"", np.empty((0, 3)), b"x"]
    thread = threading.Thread(target=one.send_arrays, args=(Said(a=1), *arrays))
    thread.start()
    message, found = other.receive_arrays(SAID, 30)
    thread.join()
    assert message.sizes == [1_200_000, 0, 0, 1]
    assert [bytes(b) for b in found] == [memoryview(a).tobytes() for a in arrays]


def test_discarded(both):
    one, other = both
    for nbytes in (0, 5, 2 * CHUNK + 1, 7):
        payload = random.Random(nbytes).randbytes(nbytes)
        thread = threading.Thread(target=one.send, args=(Said(), payload))
        thread.start()
        assert other.receive(SAID, 30) == (Said(), nbytes)
        other.discard()
        thread.join()
    one.send(Said(), payload)
    assert other.receive(SAID, 30)[1] == 7
    other.fill([into := bytearray(7)])
    assert into == payload


def test_wrong_lengths(both, monkeypatch):
    """Nothing is sent or received, and the connection goes on."""
    one, other = both
    monkeypatch.setattr(connection, "FRAME_BYTES", 1000)
    for message, buffers in [(Said(), [bytes(1001)]), (Said(text="\ud800"), [])]:
        with pytest.raises(CSDValueError):
            one.send(message, *buffers)
    with pytest.raises(CSDValueError):
        one.send_arrays(Said(text="x" * (64 << 20)))
    one.send(Said(a=1), b"ab")
    assert other.receive(SAID, 30)[1] == 2
    with pytest.raises(CSDValueError):
        other.fill([bytearray(3)])
    with pytest.raises(CSDRuntimeError, match="have not been received"):
        other.receive(SAID)
    other.fill([into := bytearray(2)])
    assert into == b"ab"


def test_several_threads_send(both):
    """Messages stay whole."""
    one, other = both
    made = [random.Random(n).randbytes(n) for n in [10, 300_000, 0, 5000] * 5]
    threads = [threading.Thread(target=one.send, args=(Said(a=k), data)) for k, data in enumerate(made)]
    for thread in threads:
        thread.start()
    found = {}
    for _ in made:
        message, nbytes = other.receive(SAID, 30)
        other.fill([into := bytearray(nbytes)])
        found[message.a] = bytes(into)
    for thread in threads:
        thread.join()
    assert [found[k] for k in range(len(made))] == made


# ---- what is refused ------------------------------------------------------------------------

REFUSED = [
    frame(b"[1]"),
    frame(b"1"),
    frame(b""),
    frame(b'{"a": NaN}'),
    frame(b'{"a": 1e999}'),
    frame(b'{"a": 1.0}'),
    frame(b'{"a": true}'),
    frame(b'{"a": "1"}'),
    frame(b'{"a": null}'),
    frame(b'{"a": ' + b"9" * 5000 + b"}"),
    frame(b'{"a": 1, "b": 1}'),
    frame(b"[" * 100_000),
    frame(b'{"a":' * 100_000),
    frame(b'{"a": 1'),
    frame(b'{"text": "\xff"}'),
    frame(b'{"text": "\\ud800"}'),
    frame(b'{"\\uDFFF": 1}'),
    frame(b"\x80\x04\x95pickle"),
    frame(b'{"sizes": [-1]}'),
    frame(b'{"sizes": [1073741825]}', nbytes=1073741825),
    frame(b'{"sizes": [1]}'),
    frame(b'{"sizes": [1, 1]}', b"abc"),
    frame(b"{}", b"abc"),
    frame(b'{"sizes": [' + b"0," * MOST_ARRAYS + b"0]}"),
    frame(b'{"sizes": [9000000]}', nbytes=9_000_000),
    frame(b"{}", nbytes=FRAME_BYTES + 1),
    frame(b"{}", nbytes=2**64 - 1),
    struct.pack("!IQ", 2**32 - 1, 0),
    struct.pack("!IQ", (1 << 20) + 1, 0),
]


@pytest.mark.parametrize("data", REFUSED, ids=lambda data: str(data[12:40]))
def test_what_is_refused(data, both):
    """Without memory for it, and the connection ends. The error does not repeat what was said."""
    one, other = both
    raw(one).sendall(data)
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionClosed) as error:
            other.receive_arrays(SAID, 30, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "pickle" not in str(error.value)
    with pytest.raises(ConnectionClosed):
        other.send(Said())


@pytest.mark.parametrize(
    "piece", [b"[]", b"1", b'{"a":1}', b'""', b'{"a":[[[[[[[]]]]]]]}', b'{"a":1,"text":"\xf0\x9f\x98\x80"}']
)
def test_32_mb_of_hostile_json_take_little_memory(piece, files):
    one, other = ends("plain", files)
    text = b'{"a":[' + b",".join([piece] * ((32 << 20) // (len(piece) + 1) - 9)) + b"]}"
    thread = threading.Thread(target=raw(one).sendall, args=(frame(text),))
    thread.start()
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionClosed):
            other.receive(SAID, 60)
        assert tracemalloc.get_traced_memory()[1] < len(text) + (8 << 20)
    finally:
        tracemalloc.stop()
        thread.join()


@pytest.mark.parametrize("kind", ENDS)
def test_every_cut(kind, files):
    """After each byte of a message, and of its buffers."""
    whole = frame(b'{"a":7}', b"abc") + frame(b"{}")
    with nothing_left():
        for n in range(len(whole)):
            one, other = ends(kind, files)
            raw(one).sendall(whole[:n])
            one.end()
            assert received(other) == [(Said(a=7), b"abc")] * (n >= 22), n


def copy(source, sink, change=bytes):
    """Carry bytes from one socket to another, changed."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(change(data))
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def through(kind, files, change):
    """Send three messages through somebody who changes them; return which arrive.

    `change`: a function of the bytes, and how many went before.
    """
    (one, near), (far, other) = sockets(), sockets()
    armed, at = threading.Event(), [0]

    def change_later(data):
        if not armed.is_set():
            return data
        began, at[0] = at[0], at[0] + len(data)
        return change(data, began)

    threads = [
        threading.Thread(target=copy, args=(near, far, change_later)),
        threading.Thread(target=copy, args=(far, near)),
    ]
    for thread in threads:
        thread.start()
    sender, receiver = ends(kind, files, on=(one, other))
    armed.set()
    with contextlib.suppress(ConnectionClosed):
        for message, data in MESSAGES:
            sender.send(message, data)
    sender.end()
    found = received(receiver)
    receiver.end()
    for thread in threads:
        thread.join()
    near.close()
    far.close()
    return found


MESSAGES = [(Said(a=1), b"abc"), (Said(a=2), b""), (Said(a=3), bytes(40))]


def test_every_byte_within_tls(files):
    """Nothing but what was sent before arrives: not a byte of a changed record.

    Only the version in the head of a record has no effect: receivers must ignore it.
    """
    whole, at, unnoticed = 1, 0, 0

    def change(data, began):
        nonlocal whole
        whole = max(whole, began + len(data))
        if began <= at < began + len(data):
            data = data[: at - began] + bytes([data[at - began] ^ 1 << at % 8]) + data[at - began + 1 :]
        return data

    with nothing_left():
        while at < whole:
            found = through("tls", files, change)
            assert found == MESSAGES[: len(found)]
            unnoticed += len(found) == len(MESSAGES)
            at += 1
    assert whole > 150
    assert unnoticed <= 2 * len(MESSAGES)


@given(st.data())
def test_changed_messages(data):
    """Whatever is said, what arrives is a message of the schema, or the connection ends."""
    whole = wire = frame(b'{"a":7}', b"abc") + frame(b'{"text":"x"}') + frame(b"{}", b"y")
    for _ in range(data.draw(st.integers(1, 3))):
        wire = data.draw(changed(wire))
    assume(wire != whole)
    one, other = sockets()
    other = Connection(other, 20)
    with one:
        one.sendall(wire)
        one.shutdown(socket.SHUT_WR)
        for message, _ in received(other):
            assert type(message.a) is int
            assert type(message.text) is str
            assert all(type(size) is int and size >= 0 for size in message.sizes)
    other.end()


@st.composite
def changed(draw, wire):
    """Draw bytes with a change: a part was cut out, inserted, overwritten, repeated or erased, or the end cut off."""
    at, other = draw(st.integers(0, len(wire))), draw(st.integers(0, len(wire)))
    n = draw(st.sampled_from([1, 2, 4, 12, 20]))
    new = draw(st.binary(min_size=n, max_size=n))
    return draw(
        st.sampled_from(
            [
                wire[:at] + wire[at + n :],
                wire[:at] + new + wire[at:],
                wire[:at] + new + wire[at + n :],
                wire[:at] + wire[other : other + n] + wire[at:],
                wire[:at] + bytes(n) + wire[at + n :],
                wire[:at],
            ]
        )
    )


# ---- ends -----------------------------------------------------------------------------------


def test_an_end_wakes_threads(both):
    """Those that wait for a message, and for room to send."""
    one, other = both
    errors = []

    def run(call, *arguments):
        try:
            call(*arguments)
        except ConnectionClosed as e:
            errors.append(e)

    waits = threading.Thread(target=run, args=(other.receive, SAID))
    sends = threading.Thread(target=run, args=(one.send, Said(), bytes(1 << 26)))
    waits.start()
    sends.start()
    waits.join(60)  # it has the message, and takes none of the buffers
    begins = threading.Thread(target=run, args=(other.fill, [bytearray(1 << 26)]))
    time.sleep(0.05)
    one.end()
    begins.start()
    for thread in (sends, begins):
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == 2


def test_no_ciphertext_after_the_end(files):
    """`ssl` would go on without TLS after SSLSocket.shutdown(), and another thread receive ciphertext as data."""
    for _ in range(20):
        one, other = ends("tls", files)
        found = []
        with contextlib.suppress(ConnectionClosed):
            one.send(Said(), b"x" * 1000)
            other.receive(SAID, 30)

            def fill(to=other, into=found):
                into.append(bytearray(1000))
                with contextlib.suppress(ConnectionClosed):
                    to.fill(into)

            thread = threading.Thread(target=fill)
            thread.start()
            other.end()
            thread.join()
        assert {*found[0]} <= {0, ord("x")}
        one.end()


def receive_whole(end):
    _, nbytes = end.receive(SAID, 30)
    end.fill([bytearray(nbytes)])


@pytest.mark.parametrize("kind", ENDS)
def test_a_peer_that_is_silent(kind, files):
    one, other = ends(kind, files)
    other.settimeout(0.1)
    with pytest.raises(ConnectionClosed, match=r"has said nothing, or too little, for 0.05 s"):
        other.receive(SAID, 0.05)
    with pytest.raises(ConnectionClosed):
        one.receive(SAID)
    for said in (frame(b'{"a":1}')[:15], frame(b"{}", bytes(1000))[:-1]):
        one, other = ends(kind, files)
        other.settimeout(0.1)
        raw(one).sendall(said)
        with pytest.raises(ConnectionClosed, match=r"has said nothing, or too little, for 0.1 s"):
            other.receive_arrays(SAID, 30) if len(said) < 20 else (
                other.receive(SAID, 30),
                other.fill([bytearray(1000)]),
            )
    one, other = ends(kind, files)
    one.settimeout(0.1)
    with pytest.raises(ConnectionClosed, match=r"has taken nothing, or too little, for 0.1 s|has ended"):
        one.send(Said(), bytes(1 << 26))


def test_the_kernel_notices_a_machine_that_is_gone(both):
    """Nothing here can lose packets; so this looks at what the kernel was told."""
    for end in both:
        end.settimeout(30)
        assert raw(end).getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert raw(end).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert raw(end).getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert raw(end).getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10


@pytest.mark.parametrize("ending", [os._exit, sys.exit])
def test_a_child(ending, both):
    """A forked child may neither send nor receive, nor disturb its parent's connection, however it ends."""
    one, other = both
    child = os.fork()
    if not child:
        refused = 0
        for call in (lambda: one.send(Said()), lambda: one.receive(SAID)):
            try:
                call()
            except CSDRuntimeError as e:
                refused += "forked" in str(e)
        one.end()
        try:
            ending(refused)
        finally:
            del one, other  # as at the end of the interpreter
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    for sender, receiver in (one, other), (other, one):
        sender.send(Said(a=5), b"abcd")
        assert receiver.receive(SAID, 30) == (Said(a=5), 4)
        receiver.fill([into := bytearray(4)])
        assert into == b"abcd"


def test_a_child_does_not_hide_the_end_of_its_parent():
    """The parent is killed, and a child of it lives on: the other side notices at once."""
    server = socket.create_server(("127.0.0.1", 0))
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        kept = Connection(socket.create_connection(server.getsockname()), 20)
        child = os.fork()
        if not child:
            time.sleep(300)
        os.write(write, child.to_bytes(4, "big"))
        time.sleep(300)
        os._exit(kept.sent)
    with server:
        other = Connection(server.accept()[0], 20)
    child = int.from_bytes(os.read(read, 4), "big")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    began = time.monotonic()
    with pytest.raises(ConnectionClosed, match="has closed the connection"):
        other.receive(SAID, 120)
    assert time.monotonic() - began < 60
    os.kill(child, signal.SIGKILL)
    os.close(read)
    os.close(write)


def test_an_interrupt_ends_the_connection(both, monkeypatch):
    """Nobody knows how much of the message was sent."""
    one, other = both

    def interrupted(views):
        raise KeyboardInterrupt

    monkeypatch.setattr(connection, "runs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.send(Said(), b"abc")
    monkeypatch.undo()
    with pytest.raises(ConnectionClosed):
        one.send(Said())
    with pytest.raises(ConnectionClosed):
        other.receive(SAID, 30)


def test_a_worn_connection(both, monkeypatch):
    monkeypatch.setattr(connection, "MOST_BYTES", 1000)
    one, other = both
    one.send(Said(), bytes(1000))
    assert one.is_worn
    other.receive(SAID, 30)
    other.fill([bytearray(1000)])
    assert other.is_worn
    one.send(Said(a=1))
    assert other.receive(SAID, 30) == (Said(a=1), 0)


# ---- slow peers -----------------------------------------------------------------------------

PAUSE, TIMEOUT = 0.05, 1.5  # seconds: nobody is ever silent for too long


@contextlib.contextmanager
def slow_wire(kind, files, piece, memory=4096):
    """Return both ends of a wire that carries at most `piece` bytes at a time, and an event after which it is slow."""
    slow = threading.Event()
    (one, near), (far, other) = sockets(memory), sockets(memory)

    def pass_on(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(piece):
                sink.sendall(data)
                time.sleep(PAUSE if slow.is_set() else 0)

    threads = [threading.Thread(target=pass_on, args=way) for way in ((near, far), (far, near))]
    for thread in threads:
        thread.start()
    made = ends(kind, files, 60, on=(one, other))
    try:
        for end in made:
            end.settimeout(TIMEOUT)
        yield *made, slow
    finally:
        for end in made:
            end.end()
        for sock in (near, far):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        near.close()
        far.close()


def is_too_slow(call, *arguments):
    began = time.monotonic()
    with pytest.raises(ConnectionClosed, match=r"is too slow: |, or too little, for 1.5 s"):
        call(*arguments)
    return TIMEOUT / 2 < time.monotonic() - began < 60  # a busy machine takes longer


@contextlib.contextmanager
def sending(end, nbytes, times=1, text=""):
    def work():
        with contextlib.suppress(ConnectionClosed):
            for _ in range(times):
                end.send(Said(text=text), bytes(nbytes))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.mark.ci
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("message", "plain"),  # in TLS, a message begins with a whole record
        *((what, kind) for what in ("buffers", "discarded") for kind in ENDS),
    ],
)
def test_who_sends_slowly(what, kind, files):
    """With a byte now and then, in time for each."""
    with nothing_left(), slow_wire(kind, files, piece=1 if what == "message" else 64) as (one, other, slow):
        if what == "message":
            slow.set()
            with sending(one, 0, text="x" * 200):
                assert is_too_slow(other.receive, SAID, 30)
                slow.clear()
            return
        with sending(one, CHUNK + 1):
            other.receive(SAID, 30)
            slow.set()
            assert (
                is_too_slow(other.discard) if what == "discarded" else is_too_slow(other.fill, [bytearray(CHUNK + 1)])
            )
            slow.clear()


@pytest.mark.ci
@pytest.mark.parametrize("kind", ENDS)
def test_who_receives_slowly(kind, files):
    with nothing_left(), slow_wire(kind, files, piece=4096) as (one, other, slow):
        slow.set()
        threading.Thread(target=received, args=(other,), name="swallows").start()
        assert is_too_slow(one.send, Said(), bytes(900_000))
        slow.clear()
        other.end()


@pytest.mark.ci
@pytest.mark.parametrize("kind", ENDS)
def test_a_long_message_has_more_time(kind, files, monkeypatch):
    """And each has its own: two of them, which take longer than anybody may be silent."""
    monkeypatch.setattr(connection, "SLOWEST", 500)
    # Where buffers are full, TCP may pause for as long.
    with nothing_left(), slow_wire(kind, files, piece=50, memory=1 << 20) as (one, other, slow):
        slow.set()
        with sending(one, 2000, times=2):
            for _ in range(2):
                began = time.monotonic()
                other.receive(SAID, 30)
                other.fill([bytearray(2000)])
                assert time.monotonic() - began > TIMEOUT
