"""Frames arrive as they were sent, in their order, or the connection ends."""

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.wires import connected, nothing_left

from csd_optim.errors import CSDRuntimeError, CSDValueError
from csd_optim.serve import sealed
from csd_optim.serve.frames import CHUNK, FRAME_BYTES, HEADER, DataConnection, Header
from csd_optim.serve.sealed import TAG, SealedConnection
from csd_optim.serve.tcp import ConnectionClosed, Tcp

KEYS = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(sealed, "PIECE", CHUNK)


def ends(encrypted, timeout=20):
    """Return both ends of a data connection."""
    one, other = connected(timeout)
    if not encrypted:
        return DataConnection(one), DataConnection(other)
    return SealedConnection(one, *KEYS), SealedConnection(other, *KEYS[::-1])


def frame(nbytes, tile=0):
    return Header(1, tile, 7, nbytes, 0), random.Random(nbytes + tile).randbytes(nbytes)


def cut(data, *sizes):
    """Cut bytes into pieces of these sizes, again and again."""
    pieces, at = [], 0
    while at < len(data):
        for size in sizes:
            pieces.append(data[at : at + size])
            at += size
    return pieces


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5])
def test_frames(encrypted, nbytes):
    """From and to buffers of any sizes, in both directions at once."""
    one, other = ends(encrypted)
    header, payload = frame(nbytes)
    pieces = cut(payload, 1000, 0, 70_001, 3) if nbytes else [b""]
    for sender, receiver in (one, other), (other, one), (one, other):
        thread = threading.Thread(target=sender.send, args=(header, pieces))
        thread.start()
        assert receiver.receive_header(30) == header
        into = bytearray(nbytes)
        receiver.receive(header, cut(memoryview(into), 4097, 100_000) if nbytes else [])
        thread.join()
        assert into == payload
    one.shutdown()
    with pytest.raises(ConnectionClosed, match="has closed"):
        other.receive_header()


@pytest.mark.parametrize("encrypted", [False, True])
def test_more_buffers_than_one_system_call_takes(encrypted):
    one, other = ends(encrypted)
    arrays = [np.full(3, k, np.float32) for k in range(2500)]
    header = Header(2**32 - 1, 2**32 - 1, 2**64 - 1, 12 * 2500, 2**64 - 1)
    one.send(header, arrays)
    assert other.receive_header() == header
    into = [np.empty((1, 3), np.float32) for _ in arrays]
    other.receive(header, into)
    assert all((a == b).all() for a, b in zip(arrays, into, strict=True))


@pytest.mark.parametrize("encrypted", [False, True])
def test_discarded(encrypted):
    one, other = ends(encrypted)
    for nbytes in (0, 5, 2 * CHUNK + 1, 7):
        header, payload = frame(nbytes)
        thread = threading.Thread(target=one.send, args=(header, [payload]))
        thread.start()
        assert other.receive_header() == header
        other.discard(header)
        thread.join()
    one.send(*(header, [payload]))
    into = bytearray(7)
    other.receive(other.receive_header(), [into])
    assert into == payload


@pytest.mark.parametrize("encrypted", [False, True])
def test_wrong_lengths_send_nothing(encrypted):
    one, other = ends(encrypted)
    for header, views in [
        (Header(1, 1, 1, 3, 0), [b"ab"]),
        (Header(1, 1, 1, 0, 0), [b"ab"]),
        (Header(2**32, 1, 1, 2, 0), [b"ab"]),
        (Header(1, -1, 1, 2, 0), [b"ab"]),
    ]:
        with pytest.raises(CSDValueError):
            one.send(header, views)
    one.send(Header(1, 1, 1, 2, 0), [b"ab"])
    header = other.receive_header()
    with pytest.raises(CSDValueError):
        other.receive(header, [bytearray(3)])
    with pytest.raises(CSDRuntimeError, match="has not been received"):
        other.receive_header()
    other.receive(header, [into := bytearray(2)])
    assert into == b"ab"
    one.send(Header(1, 1, 1, 2, 0), [b"ab"])
    other.receive_header()
    with pytest.raises(CSDRuntimeError, match="not that of"):
        other.receive(Header(1, 2, 1, 2, 0), [bytearray(2)])
    with pytest.raises(ConnectionClosed):
        other.receive_header()


@pytest.mark.parametrize("encrypted", [False, True])
def test_several_threads_send(encrypted):
    """Frames stay whole, and no nonce is used twice."""
    one, other = ends(encrypted)
    frames = [frame(nbytes, tile) for tile, nbytes in enumerate([10, 300_000, 0, 5000] * 5)]
    threads = [threading.Thread(target=one.send, args=(header, [payload])) for header, payload in frames]
    for thread in threads:
        thread.start()
    arrived = {}
    for _ in frames:
        header = other.receive_header()
        other.receive(header, [into := bytearray(header.nbytes)])
        arrived[header] = bytes(into)
    assert arrived == dict(frames)
    for thread in threads:
        thread.join()


def test_too_long():
    """2^40 bytes are refused before memory is taken or anything is waited for."""
    one, other = connected()
    one.send([memoryview(HEADER.pack(1, 1, 1, 2**40, 0))])
    with pytest.raises(ConnectionClosed, match="1099511627776 bytes was refused"):
        DataConnection(other).receive_header(30)
    with pytest.raises(CSDValueError):
        ends(True)[0].send(Header(1, 1, 1, FRAME_BYTES + 1, 0), [np.empty(FRAME_BYTES + 1, np.uint8)])


# ---- somebody in between --------------------------------------------------------------------


def on_the_wire(*frames, keys=KEYS):
    """Return these frames as they are sent, each as bytes."""
    one, other = connected()
    sender, wire = SealedConnection(one, *keys), []
    for header, payload in frames:
        sender.send(header, [payload])
        wire.append(bytearray(HEADER.size + TAG + (header.nbytes + TAG if header.nbytes else 0)))
        other.receive([memoryview(wire[-1])])
    return wire


def receives(wire, keys=KEYS[::-1]):
    """Return the frames that are accepted when somebody sends these bytes and then no more."""
    one, other = connected()
    receiver, accepted = SealedConnection(other, *keys), []
    sender = threading.Thread(target=lambda: (one.send([memoryview(b"".join(wire))]), one.shutdown()))
    sender.start()
    try:
        while True:
            header = receiver.receive_header(30)
            receiver.receive(header, [into := bytearray(header.nbytes)])
            accepted.append((header, bytes(into)))
    except ConnectionClosed:
        assert closed(receiver)
        return accepted
    finally:
        other.shutdown()
        sender.join()


def closed(connection):
    with pytest.raises(ConnectionClosed):
        connection.send(Header(0, 0, 0, 0, 0))
    return True


FRAMES = [frame(40), frame(0), frame(3, tile=1), frame(40, tile=2)]


def test_only_what_was_sent_arrives():
    """Replay, loss, exchange, reflection, another key, lengths, cuts: only what was sent before arrives."""
    first, empty, short, last = wire = on_the_wire(*FRAMES)
    assert receives(wire) == FRAMES
    attacks = {
        "replay": ([first, empty, first, short], 2),
        "replay at once": ([first, first], 1),
        "loss": ([first, short, last], 1),
        "loss of the first": (wire[1:], 0),
        "exchange": ([first, short, empty, last], 1),
        "payload of another frame": ([first, empty, short, last[:48] + first[48:]], 3),
        "header of another frame": ([first, empty, short, first[:48] + last[48:]], 3),
        "tag of another frame": ([first, empty, short, last[:-TAG] + first[-TAG:]], 3),
        "no payload": ([first, empty, short[:48], last], 2),
        "header as payload": ([first[:48] + first[:48]], 0),
    }
    for name, (attack, accepted) in attacks.items():
        assert receives(attack) == FRAMES[:accepted], name
    for n in range(len(first) + len(empty)):
        assert receives([b"".join(wire)[:n]]) == FRAMES[: n // len(first)], n
    assert receives(wire, KEYS) == []  # reflected to who has sent them
    assert receives(on_the_wire(FRAMES[0], keys=(bytes(32), KEYS[1]))) == []


def test_every_byte():
    wire = b"".join(on_the_wire(*FRAMES[:2]))
    for at in range(len(wire)):
        changed = bytearray(wire)
        changed[at] ^= 1 << at % 8
        assert receives([changed]) == (FRAMES[:1] if at >= 48 + 40 + TAG else []), at


@st.composite
def changed(draw, wire):
    """Draw bytes with a change: a part was cut out, inserted, overwritten, repeated or erased, or the end cut off."""
    at, other = draw(st.integers(0, len(wire))), draw(st.integers(0, len(wire)))
    n = draw(st.sampled_from([1, 2, 4, 16, 48, 104]))
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


class Wire:
    """A stream that has all that will ever arrive. It is enough for a receiver, and takes no system calls."""

    def __init__(self, data):
        self.data, self.at, self.over = memoryview(data), 0, False

    def receive(self, views):
        for view in views:
            arrived = self.data[self.at : self.at + len(view)]
            self.at += len(view)
            if len(arrived) < len(view) or self.over:
                raise ConnectionClosed("the end")
            view[:] = arrived

    def wait(self, seconds):
        pass

    def shutdown(self):
        self.over = True


@functools.cache
def intact_wire():
    """Return FRAMES as they are sent, and where each of them ends."""
    wire = on_the_wire(*FRAMES)
    return b"".join(wire), [*itertools.accumulate(map(len, wire))]


@given(st.data())
def test_changed_frames(data):
    """Frames are accepted only up to the first byte that differs."""
    intact, ends_at = intact_wire()
    wire = intact
    for _ in range(data.draw(st.integers(1, 3))):
        wire = data.draw(changed(wire))
    assume(wire != intact)
    same = next((at for at, (a, b) in enumerate(zip(intact, wire, strict=False)) if a != b), len(wire))
    stream = Wire(wire)
    receiver, accepted = SealedConnection(stream, *KEYS[::-1]), []
    with contextlib.suppress(ConnectionClosed):
        while True:
            header = receiver.receive_header()
            receiver.receive(header, [into := bytearray(header.nbytes)])
            accepted.append((header, bytes(into)))
    assert accepted == FRAMES[: sum(end <= same for end in ends_at)]
    assert stream.over


def test_a_new_key_after_many_bytes(monkeypatch):
    """Both sides replace their keys after the same frames; with one that stays, nothing arrives."""
    monkeypatch.setattr(sealed, "KEY_BYTES", 100)
    one, other = ends(True)
    wire = on_the_wire(*FRAMES * 3)
    assert receives(wire) == FRAMES * 3
    for header, payload in FRAMES:
        one.send(header, [payload])
        other.discard(other.receive_header(30))
        one.send(header, [payload])
        other.receive(other.receive_header(30), [into := bytearray(header.nbytes)])
        assert into == payload
    monkeypatch.setattr(sealed, "KEY_BYTES", 1 << 36)
    assert receives(wire) == FRAMES[:2]
    assert len({bytes(part) for part in wire}) == 12
    one.shutdown()
    other.shutdown()


# ---- ends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True])
def test_shutdown_wakes_threads(encrypted):
    """Those that wait for a header, for a payload, and for room to send."""
    with nothing_left():
        one, other = ends(encrypted)
        errors = []

        def run(call, *arguments):
            try:
                call(*arguments)
            except ConnectionClosed as e:
                errors.append(e)

        waits = threading.Thread(target=run, args=(one.receive_header,))
        sends = threading.Thread(target=run, args=(one.send, Header(1, 1, 1, 1 << 26, 0), [bytes(1 << 26)]))
        for thread in (waits, sends):
            thread.start()
        other.receive_header()
        receives = threading.Thread(target=run, args=(one.shutdown,))
        receives.start()
        for thread in (waits, sends, receives):
            thread.join(60)
            assert not thread.is_alive()
        assert len(errors) == 2
        other.shutdown()
        del one, other


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_peer_that_is_silent_within_a_frame(encrypted):
    one, other = ends(encrypted, timeout=0.1)
    header, payload = frame(1000)
    wire = on_the_wire((header, payload))[0] if encrypted else bytearray(HEADER.pack(*header) + payload)
    raw, far = connected()
    raw.send([memoryview(wire)[:-1]])
    far.settimeout(0.1)
    receiver = SealedConnection(far, *KEYS[::-1]) if encrypted else DataConnection(far)
    assert receiver.receive_header() == header
    with pytest.raises(ConnectionClosed, match=r"has said nothing for 0.1 s|is too slow"):
        receiver.receive(header, [bytearray(1000)])
    with pytest.raises(ConnectionClosed, match=r"has said nothing for 0.1 s"):
        other.receive_header(timeout=0.1)
    one, other = ends(encrypted, timeout=0.1)
    with pytest.raises(ConnectionClosed, match=r"has said nothing for 0.1 s|timed out|is too slow"):
        one.send(Header(1, 1, 1, 1 << 26, 0), [bytes(1 << 26)])


def test_the_kernel_notices_a_machine_that_is_gone():
    """Nothing here can lose packets; so this looks at what the kernel was told."""
    tcp, far = connected()
    tcp.settimeout(30)
    with socket.socket(fileno=os.dup(find(tcp))) as copy:
        assert copy.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        assert copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
    far.shutdown()


def find(tcp):
    """Return the descriptor of a connection, by the address of its other end."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family == socket.AF_INET and "{}:{}".format(*sock.getpeername()) == tcp.address:
                    return int(name)
        except OSError:
            continue
    raise AssertionError("no descriptor")


def test_fork():
    """A child shares keys and frame numbers: it may neither send nor receive, nor end its parent's connection."""
    one, other = ends(True)
    child = os.fork()
    if not child:
        refused = 0
        for call in (lambda: one.send(Header(1, 1, 1, 0, 0)), one.receive_header):
            try:
                call()
            except CSDRuntimeError as e:
                refused += "forked" in str(e)
        one.shutdown()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    one.send(*(Header(1, 2, 3, 4, 5), [b"abcd"]))
    header = other.receive_header(30)
    other.receive(header, [into := bytearray(4)])
    assert into == b"abcd"


def test_a_child_does_not_hide_the_end_of_its_parent():
    """The parent is killed, and a child of it lives on: the other side notices at once."""
    server = socket.create_server(("127.0.0.1", 0))
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        DataConnection(Tcp(socket.create_connection(server.getsockname()), 20))
        kept = [DataConnection(Tcp(socket.create_connection(server.getsockname()), 20))]
        child = os.fork()
        if not child:
            time.sleep(300)
        os.write(write, child.to_bytes(4, "big"))
        time.sleep(300)
        os._exit(len(kept))
    with server:
        for _ in range(2):
            other = Tcp(server.accept()[0], 20)
    child = int.from_bytes(os.read(read, 4), "big")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    began = time.monotonic()
    with pytest.raises(ConnectionClosed, match="has closed the connection"):
        DataConnection(other).receive_header(120)
    assert time.monotonic() - began < 60
    os.kill(child, signal.SIGKILL)
    os.close(read)
    os.close(write)


def test_an_interrupt_ends_the_connection(monkeypatch):
    """Nobody knows how much of the frame was sent: its number must not be used again."""
    one, other = ends(True)
    sent = []

    def interrupted(view, *_):
        sent.append(view)
        raise KeyboardInterrupt

    monkeypatch.setattr(sealed, "_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.send(Header(1, 1, 1, 3, 0), [b"abc"])
    monkeypatch.undo()
    assert sent
    assert closed(one)
    with pytest.raises(ConnectionClosed):
        other.receive_header(30)
