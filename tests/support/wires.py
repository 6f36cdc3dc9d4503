"""Both ends of the connections of optimizer ranks, with somebody in between."""

import contextlib
import gc
import os
import queue
import socket
import threading
import time
from typing import NamedTuple

import pytest

from csd_optim.errors import CSDUnavailableError
from csd_optim.serve import dial, handshake, listener, sealed
from csd_optim.serve.init_key import init_key
from csd_optim.serve.keys import Key
from csd_optim.serve.messages import PROTOCOL
from csd_optim.serve.tcp import ConnectionClosed, Tcp
from csd_optim.serve.tls import Tls

KINDS = ("frames", "ssl", "plain", "readers")  # of connections; without `cryptography`, `ssl` carries the data

# A request for a session.
HELLO = {
    "op": "hello",
    "protocol": PROTOCOL,
    "token": "0" * 32,
    "store": "0" * 32,
    "trainer": 0,
    "trainers": 1,
    "here": 1,
    "who": "a test",
    "model": "",
    "tile_elems": 0,
    "mode": "resume",
    "n": 1,
}


class Files(NamedTuple):
    """Key files that exist once for all tests, and the certificates in them alone."""

    owner: object
    trainer: object
    stranger: object

    def certificate(self, name):
        return getattr(self, name).with_suffix(".crt")


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("keys")
    made = Files(*(directory / f"{name}.pem" for name in Files._fields))
    for path in made:
        init_key(path)
        write_certificate(path.with_suffix(".crt"), path.read_text())
    return made


def write_certificate(path, pem):
    path.write_text(pem[pem.index("-----BEGIN CERTIFICATE-----") :])
    path.chmod(0o644)


class Owner:
    """A listener whose sessions answer each message with itself, and each frame with itself."""

    def __init__(self, **options):
        self.lines, self.used, self.sessions = [], queue.Queue(), []
        options = {"log": self.lines.append, "timeout": 20, "on_session": self.serve} | options
        self.listener = listener.Listener(("127.0.0.1", 0), **options)
        self.address = self.listener.address

    def serve(self, session):
        self.sessions.append(session)
        frames = [threading.Thread(target=self.return_frames, args=(data,)) for data in session.data]
        for thread in frames:
            thread.start()
        with contextlib.suppress(ConnectionClosed):
            while True:
                message, arrays = session.control.receive()
                self.used.put(session)
                session.control.send(message, *arrays)
        session.close()
        for thread in frames:
            thread.join()

    def return_frames(self, data):
        with contextlib.suppress(ConnectionClosed):
            while True:
                header = data.receive_header()
                payload = bytearray(header.nbytes)
                data.receive(header, [payload])
                data.send(header, [payload])

    def settled(self):
        """Wait until each connection has been refused or used; return whether one was used."""
        until(lambda: not handshakes() and all(session.closed for session in self.sessions))
        used = not self.used.empty()
        while not self.used.empty():
            self.used.get()
        self.sessions.clear()
        return used

    def close(self):
        self.listener.close()
        for session in self.sessions:
            session.close()
        until(lambda: not handshakes())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Pair(NamedTuple):
    """How to reach an owner by one kind of connection: the arguments of dial.connect(), but for the address."""

    owner: Owner
    options: dict

    def connect(self, **options):
        return dial.connect(self.owner.address, **({"within": 0} | self.options | options))

    def admitted(self, **options):
        """Connect. Returns whether that has let somebody in, in the opinion of either side."""
        session = None
        try:
            session = self.connect(**options)
            session.control.send({})
            session.control.receive(30)
        except (CSDUnavailableError, ConnectionClosed):
            answered = False
        else:
            answered = True
        finally:
            if session is not None:
                session.close()
        return self.owner.settled() or answered


@contextlib.contextmanager
def pair(kind, files, streams=1, **options):
    """An owner, and what connects to it by this kind of connection."""
    with pytest.MonkeyPatch.context() as patch:
        how = {"key": None, "streams": streams}
        if kind != "plain":
            role = listener.Role.READER if kind == "readers" else listener.Role.TRAINER
            options = {"key": files.owner, "accept": [(role, files.certificate("trainer"))]} | options
            how |= {"key": Key(files.trainer), "owner": Key(files.owner).fingerprint}
        if kind == "readers":
            how |= {"streams": 0}
        if kind == "ssl":
            patch.setattr(sealed, "AVAILABLE", False)
        with Owner(**options) as owner:
            yield Pair(owner, how)


class Meddled(Tcp):
    """The end of whoever connects, of a wire on which a byte is changed or after which nothing is carried.

    `plan` = (connection, direction, offset, bits): connections count from 0, bytes of a direction ("sends", "gets")
    from 0. `bits`: what the byte is combined with by xor; 0: the connection ends before that byte.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.meddler = Meddler(Meddler.tcp)
        Meddler.tcp += 1

    def send(self, views, begins=True):
        data = self.meddler.meddle("sends", b"".join(views))
        super().send([memoryview(data)], begins)
        if self.meddler.cut:
            self.shutdown()

    def receive(self, views):
        super().receive(views)
        self.meddler.change(views, self)

    def receive_some(self, most):
        data = self.meddler.meddle("gets", super().receive_some(most))
        if self.meddler.cut:
            self.shutdown()
            raise ConnectionClosed("cut")
        return data


class MeddledTls(Tls):
    """The same within TLS: what only somebody with an accepted key can do."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.meddler = Meddler(("tls", Meddler.tls))
        Meddler.tls += 1

    def send(self, views, begins=True):
        super().send([memoryview(self.meddler.meddle("sends", b"".join(views)))], begins)
        if self.meddler.cut:
            self.shutdown()

    def receive(self, views):
        super().receive(views)
        self.meddler.change(views, self)


class Meddler:
    plan, carried = None, {}  # carried: the bytes of each connection and direction
    tcp = tls = 0  # number of connections

    def __init__(self, connection):
        self.connection, self.cut = connection, False
        self.at = {"sends": 0, "gets": 0}

    def meddle(self, direction, data):
        self.carried[self.connection, direction] = self.carried.get((self.connection, direction), b"") + data
        begin, self.at[direction] = self.at[direction], self.at[direction] + len(data)
        *where, offset, bits = self.plan or (None, None, 0, 0)
        if tuple(where) == (self.connection, direction) and begin <= offset < begin + len(data):
            self.cut = not bits
            here = offset - begin
            return data[:here] if self.cut else data[:here] + bytes([data[here] ^ bits]) + data[here + 1 :]
        return data

    def change(self, views, stream):
        for view in views:
            data = self.meddle("gets", bytes(view))
            if self.cut:
                stream.shutdown()
                raise ConnectionClosed("cut")
            view[:] = data


@contextlib.contextmanager
def meddling(plan=None):
    """Connections that are made in the block have this somebody in between. Returns what is carried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dial, "Tcp", Meddled)
        patch.setattr(dial, "Tls", MeddledTls)
        Meddler.plan, Meddler.carried, Meddler.tcp, Meddler.tls = plan, {}, 0, 0
        try:
            yield Meddler.carried
        finally:
            Meddler.plan = None


def handshakes():
    return [thread for thread in threading.enumerate() if thread.name == "csd_optim handshake"]


def until(condition, seconds=120):
    """Wait until this is true."""
    end, pause = time.monotonic() + seconds, 0.001
    while not condition():
        assert time.monotonic() < end, "it has taken too long"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.02)


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def nothing_left():
    """After the block there are as many descriptors and threads as before, and no thread has ended by an exception."""
    failures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failures.append)
        before = descriptors(), threading.active_count()
        yield
        until(lambda: threading.active_count() <= before[1])
        assert descriptors() <= before[0]
    assert not failures


def connected(timeout=20):
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    return Tcp(one, timeout), Tcp(other, timeout)


def half_open(to, streams=2, key=None):
    """Connect without data connections. Returns the control stream, the session and its ticket."""
    request = handshake.Request(streams, 0)
    sock = socket.create_connection(to.owner.address, 5)
    stream = tcp = Tcp(sock, 5)
    hello = handshake.preface(handshake.CONTROL | (0 if key else handshake.PLAIN), request.pack())
    handshake.say(tcp, hello)
    assert handshake.read(tcp, 12) == handshake.answer(handshake.GO_ON)
    if key:
        stream = Tls(tcp, key.client, server=False)
        stream.handshake()
    handshake.say(stream, hello)
    assert handshake.read(stream, 12) == handshake.answer(handshake.GO_ON)
    return stream, handshake.read(stream, 16), handshake.read(stream, 32)
