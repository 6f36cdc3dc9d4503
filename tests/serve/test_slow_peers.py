"""A message or frame that begins has to end: whoever lets a byte through now and then holds nobody for long."""

import contextlib
import functools
import re
import socket
import threading
import time
from typing import NamedTuple

import pytest
from support.wires import files, nothing_left

from csd_optim.serve import sealed, tcp
from csd_optim.serve.control import ControlConnection
from csd_optim.serve.frames import CHUNK, DataConnection, Header
from csd_optim.serve.keys import Key
from csd_optim.serve.sealed import SealedConnection
from csd_optim.serve.tcp import ConnectionClosed, Tcp
from csd_optim.serve.tls import Tls

__all__ = ["files"]

pytestmark = pytest.mark.ci

PAUSE, TIMEOUT = 0.05, 1.5  # seconds: nobody is ever silent for too long
KINDS = ("frames", "sealed", "frames in TLS", "messages", "messages in TLS")


class Wire(NamedTuple):
    """Both ends of a connection."""

    one: object
    other: object
    slow: threading.Event  # from now on, something is carried only once in PAUSE seconds


@contextlib.contextmanager
def wire(kind, files, piece, memory=4096):
    """Return a wire that carries at most `piece` bytes at a time. `memory`: bytes of each buffer on the way."""
    slow, sockets = threading.Event(), []
    for _ in range(2):
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, memory)
            server.bind(("127.0.0.1", 0))
            server.listen()
            sockets += [socket.create_connection(server.getsockname()), server.accept()[0]]
    one, near, other, far = sockets
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, memory)
    ends = [Tcp(one, 60), Tcp(other, 60)]
    threads = [threading.Thread(target=carry, args=(*way, piece, slow)) for way in ((near, far), (far, near))]
    for thread in threads:
        thread.start()
    try:
        made = connections(kind, files, ends)  # which may take a while on a busy machine
        for end in ends:
            end.settimeout(TIMEOUT)
        yield Wire(*made, slow)
    finally:
        for end in ends:
            end.shutdown()
        for thread in threads:
            thread.join()
        near.close()
        far.close()


def carry(source, sink, piece, slow):
    with contextlib.suppress(OSError):
        while data := source.recv(piece):
            sink.sendall(data)
            time.sleep(PAUSE if slow.is_set() else 0)


def connections(kind, files, ends):
    if kind.endswith("TLS"):
        key = Key(files.owner)
        ends = [Tls(ends[0], key.client, server=False), Tls(ends[1], key.server([key.certificate]), server=True)]
        thread = threading.Thread(target=ends[0].handshake)
        thread.start()
        ends[1].handshake()
        thread.join()
    if kind.startswith("messages"):
        return [ControlConnection(end) for end in ends]
    if kind == "sealed":
        keys = bytes(32), bytes(range(32))
        return SealedConnection(ends[0], *keys), SealedConnection(ends[1], *keys[::-1])
    return [DataConnection(end) for end in ends]


def send(connection, nbytes):
    if isinstance(connection, ControlConnection):
        connection.send({}, bytes(nbytes))
    else:
        connection.send(Header(1, 1, 1, nbytes, 0), [bytes(nbytes)])


def receive(connection):
    if isinstance(connection, ControlConnection):
        return connection.receive(30)
    header = connection.receive_header(30)
    return connection.receive(header, [bytearray(header.nbytes)])


@contextlib.contextmanager
def sending(connection, nbytes, times=1):
    def work():
        with contextlib.suppress(ConnectionClosed):
            for _ in range(times):
                send(connection, nbytes)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


class MachineStalledError(Exception):
    """This machine was so busy that not even a slow byte came in time."""


def is_too_slow(call, *arguments):
    began = time.monotonic()
    with pytest.raises(ConnectionClosed) as ended:
        call(*arguments)
    if "has said nothing" in str(ended.value):
        raise MachineStalledError
    assert re.search(r"is too slow: \d+ bytes in", str(ended.value))
    return TIMEOUT < time.monotonic() - began < 60  # a busy machine takes longer


def again_if_stalled(test):
    @functools.wraps(test)
    def repeated(*arguments, **named):
        for _ in range(4):
            with contextlib.suppress(MachineStalledError):
                return test(*arguments, **named)
        return test(*arguments, **named)

    return repeated


@pytest.mark.parametrize("kind", KINDS)
@again_if_stalled
def test_who_sends_slowly(kind, files):
    with nothing_left(), wire(kind, files, piece=1) as there:
        there.slow.set()
        with sending(there.one, 1000):
            assert is_too_slow(receive, there.other)
            there.slow.clear()


@pytest.mark.parametrize("kind", ["frames", "sealed", "frames in TLS"])
@pytest.mark.parametrize("how", ["receive", "discard"])
@again_if_stalled
def test_who_sends_the_payload_slowly(kind, how, files):
    """What the header was in time for."""
    with nothing_left(), wire(kind, files, piece=64) as there, sending(there.one, CHUNK + 1):
        header = there.other.receive_header(30)
        there.slow.set()
        arguments = (header, [bytearray(header.nbytes)]) if how == "receive" else (header,)
        assert is_too_slow(getattr(there.other, how), *arguments)
        there.slow.clear()


@pytest.mark.parametrize("kind", KINDS)
@again_if_stalled
def test_who_receives_slowly(kind, files, monkeypatch):
    """Also in pieces, of which each is in time."""
    monkeypatch.setattr(sealed, "PIECE", CHUNK)
    with nothing_left(), wire(kind, files, piece=4096) as there:
        there.slow.set()
        threading.Thread(target=swallow, args=(there.other,), name="swallows").start()
        assert is_too_slow(send, there.one, 4 << 20)
        there.slow.clear()
        there.other.shutdown()


def swallow(connection):
    with contextlib.suppress(ConnectionClosed):
        while True:
            receive(connection)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_message_has_more_time(kind, files, monkeypatch):
    """And each has its own: two of them, which take longer than anybody may be silent."""
    monkeypatch.setattr(tcp, "SLOWEST", 500)
    # Where buffers are full, TCP may pause for as long.
    with nothing_left(), wire(kind, files, piece=50, memory=1 << 20) as there:
        there.slow.set()
        with sending(there.one, 2000, times=2):
            for _ in range(2):
                began = time.monotonic()
                receive(there.other)
            assert time.monotonic() - began > TIMEOUT
