"""Both ends of one connection, plain or within TLS, and somebody in between."""

import contextlib
import json
import socket
import threading

from csd_optim.serve.wire.connection import FRAME, Connection, ConnectionClosed
from csd_optim.serve.wire.keys import PROTOCOL, Key
from csd_optim.serve.wire.schema import Message, msgspec

ENDS = ("plain", "tls")


class Said(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the tests."""

    a: int = 0
    text: str = ""


SAID, ANY = msgspec.json.Decoder(Said), msgspec.json.Decoder(msgspec.Raw)


def frame(text, buffers=b"", nbytes=None):
    """Return a frame as bytes. `nbytes`: what its head says of the buffers, if not the truth."""
    return FRAME.pack(len(text), len(buffers) if nbytes is None else nbytes) + text + buffers


def sockets(memory=None):
    """Return both ends of a TCP connection. `memory`: bytes of each of their buffers."""
    with socket.socket() as server:
        if memory:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, memory)
        server.bind(("127.0.0.1", 0))
        server.listen()
        both = socket.create_connection(server.getsockname()), server.accept()[0]
    for sock in both if memory else ():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, memory)
    return both


def ends(kind, files, timeout=20, on=None):
    """Return both ends of a connection: of the side that has connected, and of the owner. `on`: sockets to use."""
    one, other = on or sockets()
    if kind == "plain":
        return Connection(one, timeout), Connection(other, timeout)
    key = Key(files.owner)
    one = Connection(key.client.wrap_socket(one, do_handshake_on_connect=False), timeout)
    inside = key.server([key.certificate]).wrap_socket(other, server_side=True, do_handshake_on_connect=False)
    other = Connection(inside, timeout)
    thread = threading.Thread(target=one.handshake, args=(PROTOCOL,))
    thread.start()
    assert other.handshake(PROTOCOL) == (key.certificate, True)
    thread.join()
    return one, other


def raw(connection):
    """Return the socket of a connection, to say on it what no connection would."""
    return connection._sock


def received(connection, timeout=30):
    """Return all messages that arrive until the connection ends, with their buffers."""
    found = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            message, nbytes = connection.receive(SAID, timeout, 1 << 20)
            connection.fill([into := bytearray(nbytes)])
            found.append((message, bytes(into)))
    return found


def fields_of(message):
    """Return a message as the JSON that travels."""
    return json.loads(msgspec.json.encode(message))


def say(connection, fields, *arrays):
    """Send any JSON with arrays, whatever a schema says."""
    text = json.dumps({**fields, "sizes": [len(a) for a in arrays]}).encode()
    raw(connection).settimeout(30)
    raw(connection).sendall(frame(text, b"".join(arrays)))


def hear(connection, timeout=30):
    """Return a message as a dict, and its arrays."""
    message, nbytes = connection.receive(ANY, timeout)
    fields = json.loads(bytes(message))
    arrays = [bytearray(size) for size in fields.pop("sizes", [nbytes] if nbytes else [])]
    connection.fill(arrays)
    return fields, arrays
