"""Both ends of the connections of optimizer ranks."""

import contextlib
import gc
import os
import queue
import socket
import threading
import time
from typing import NamedTuple

import pytest
from support.wire_ends import SAID, Said

from csd_optim.errors import CSDUnavailableError
from csd_optim.serve.wire import dial, listener
from csd_optim.serve.wire.connection import Connection, ConnectionClosed
from csd_optim.serve.wire.init_key import init_key
from csd_optim.serve.wire.keys import PROTOCOL, Key, Role
from csd_optim.serve.wire.session import OPENED, OpenControl, OpenData

KINDS = ("tls", "plain", "readers")  # of sessions
ENCRYPTED = ("tls", "readers")

# A request for a session.
HELLO = {
    "op": "hello",
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
    """A listener whose sessions answer each message with itself, on each stream, too."""

    def __init__(self, **options):
        self.lines, self.used, self.sessions = [], queue.Queue(), []
        options = {"log": self.lines.append, "timeout": 20, "on_session": self.serve} | options
        self.listener = listener.Listener(("127.0.0.1", 0), **options)
        self.address = self.listener.address

    def serve(self, session):
        self.sessions.append(session)
        ways = zip(session.up, session.down, strict=True)
        threads = [threading.Thread(target=self.return_tiles, args=(session, *way)) for way in ways]
        for thread in threads:
            thread.start()
        with contextlib.suppress(ConnectionClosed):
            while True:
                message, arrays = session.control.receive_arrays(SAID)
                self.used.put(session)
                session.control.send_arrays(message, *arrays)
        session.close()
        for thread in threads:
            thread.join()

    def return_tiles(self, session, up, down):
        with contextlib.suppress(ConnectionClosed):
            while True:
                message, nbytes = up.receive(SAID)
                up.fill([payload := bytearray(nbytes)])
                down.send(message, payload)
        session.close()

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
    """How to reach an owner by one kind of session: the arguments of dial.connect(), but for the address."""

    owner: Owner
    options: dict

    def connect(self, **options):
        return dial.connect(self.owner.address, **({"within": 0} | self.options | options))

    def admitted(self, **options):
        """Connect. Returns whether that has let somebody in, in the opinion of either side."""
        session = None
        try:
            session = self.connect(**options)
            answered = ask(session) == Said(a=1)
        except (CSDUnavailableError, ConnectionClosed):
            answered = False
        finally:
            if session is not None:
                session.close()
        return self.owner.settled() or answered

    def opened(self, opening, key=None):
        """Open one connection as with this first message, and return it with the answer. `key`: another one."""
        sock = socket.create_connection(self.owner.address, 30)
        if key := key or self.options["key"]:
            sock = key.client.wrap_socket(sock, do_handshake_on_connect=False)
        connection = Connection(sock, 30)
        if key:
            connection.handshake(PROTOCOL)
        connection.send(opening)
        return connection, connection.receive(OPENED, 30)[0]


def ask(session):
    """Have the control connection's message returned."""
    session.control.send_arrays(Said(a=1))
    return session.control.receive_arrays(SAID, 30)[0]


@contextlib.contextmanager
def pair(kind, files, streams=1, **options):
    """An owner, and what connects to it by this kind of session."""
    how = {"key": None, "streams": streams}
    if kind != "plain":
        role = Role.READER if kind == "readers" else Role.TRAINER
        options = {"key": files.owner, "accept": [(role, files.certificate("trainer"))]} | options
        how |= {"key": Key(files.trainer), "owner": Key(files.owner).fingerprint}
    if kind == "readers":
        how |= {"streams": 0}
    with Owner(**options) as owner:
        yield Pair(owner, how)


def half_open(to, streams=2, key=None):
    """Connect without the other connections. Returns the control connection, and the session's name."""
    control, opened = to.opened(OpenControl(protocol=PROTOCOL, streams=streams), key)
    return control, opened.session


def joining(to, name, way="up", stream=0, key=None):
    """Open a connection that joins a session. Returns it, and the owner's answer."""
    return to.opened(OpenData(protocol=PROTOCOL, session=name, way=way, stream=stream), key)


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
