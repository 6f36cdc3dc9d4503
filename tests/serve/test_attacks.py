"""What somebody may try who reaches the port, listens, changes what is said, or has another key.

Each attack is tried on each kind of connection: control, up and down.
"""

import contextlib
import datetime
import functools
import random
import secrets
import socket
import ssl
import threading
import time

import pytest
import trustme
from support.wire_ends import SAID, Said, frame, hear, raw, received
from support.wires import (
    ENCRYPTED,
    KINDS,
    Owner,
    Pair,
    ask,
    files,
    half_open,
    handshakes,
    joining,
    nothing_left,
    pair,
    until,
    write_certificate,
)

from csd_optim.errors import CSDUnavailableError, CSDValueError
from csd_optim.serve.wire import dial, init_key, keys, limits, listener
from csd_optim.serve.wire.connection import Connection, ConnectionClosed
from csd_optim.serve.wire.keys import PROTOCOL, Key, Role, fingerprint, read_certificates
from csd_optim.serve.wire.session import OpenControl, OpenData

__all__ = ["files"]

WAYS = ("control", "up", "down")


def refused(to, why, **options):
    with pytest.raises(CSDUnavailableError, match=why):
        to.connect(**options)
    assert not to.owner.settled()


@contextlib.contextmanager
def bare(to):
    """Return a bare connection to the owner."""
    with socket.create_connection(to.owner.address, 5) as sock:
        yield sock


def is_ended(sock):
    """Whether the owner ends a connection, after at most an alert of TLS or a refusal."""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1000):
            assert data[:1] in (b"\x15", b"\0")
            assert len(data) < 100
    return True


@contextlib.contextmanager
def opening(to, way):
    """Return the first message of this kind of connection; for up and down, a session waits for it."""
    if way == "control":
        yield OpenControl(protocol=PROTOCOL, streams=1)
        return
    control, name = half_open(to, streams=1)
    yield OpenData(protocol=PROTOCOL, session=name, way=way, stream=0)
    control.end()


# ---- keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_a_strangers_key(kind, files):
    with nothing_left(), pair(kind, files) as to:
        stranger = Key(files.stranger)
        refused(to, f"does not accept the key {stranger.fingerprint}", key=stranger)
        assert to.admitted()


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_a_false_owner(kind, files):
    """It took the port while the owner was down. It accepts everybody, and learns nothing."""
    with nothing_left(), pair(kind, files, key=files.stranger) as to:
        refused(to, f"has the key {Key(files.stranger).fingerprint}, not {to.options['owner']}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("whose", [None, "stranger", "trainer"])
def test_another_certificate_or_version_of_tls(whose, version, way, files):
    """On each kind of connection, also for a session that waits for this connection."""
    if (whose, version) == ("trainer", ssl.TLSVersion.TLSv1_3):
        pytest.skip("this is the right one")
    with nothing_left(), pair("tls", files) as to, opening(to, way) as said:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, version
        context.set_alpn_protocols([PROTOCOL])
        if whose:
            context.load_cert_chain(getattr(files, whose))
        answers = []
        with bare(to) as sock, contextlib.suppress(ssl.SSLError, ConnectionError, ConnectionClosed):
            connection = Connection(context.wrap_socket(sock), 5)
            connection.send(said)
            answers.append(hear(connection))
        assert not answers
        assert to.owner.used.empty()


@pytest.mark.parametrize("way", ["up", "down"])
def test_another_accepted_key_does_not_join_a_session(way, files):
    accept = [(Role.TRAINER, files.certificate(name)) for name in ("trainer", "stranger")]
    with nothing_left(), pair("tls", files, accept=accept) as to:
        control, name = half_open(to, streams=1)
        for whose, works in (("stranger", False), ("owner", False), ("trainer", True)):
            connection, opened = joining(to, name, way, key=Key(getattr(files, whose)))
            assert opened.refused == ("" if works else "session")
            connection.end()
        control.end()


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_signed_by_an_accepted_certificate(kind, files, tmp_path):
    """Only accepted certificates count, not certificates signed by them.

    The signer of an accepted one does not matter.
    """
    authority = trustme.CA()
    leaf = authority.issue_cert("trainer.example")
    chain = leaf.private_key_pem.bytes() + leaf.cert_chain_pems[0].bytes()
    (tmp_path / "leaf.pem").write_bytes(chain)
    (tmp_path / "leaf.pem").chmod(0o600)
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    write_certificate(tmp_path / "leaf.crt", chain.decode())
    key = Key(tmp_path / "leaf.pem")
    role = Role.READER if kind == "readers" else Role.TRAINER
    with nothing_left():
        with pair(kind, files, accept=[(role, tmp_path / "ca.crt")]) as to:
            refused(to, f"does not accept the key {key.fingerprint}", key=key)
        with pair(kind, files, accept=[(role, tmp_path / "leaf.crt")]) as to:
            assert to.admitted(key=key)


@pytest.mark.parametrize("kind", ENCRYPTED)
@pytest.mark.parametrize(("begin", "end"), [(1950, 1990), (2100, 2200)])
def test_no_date_counts(kind, begin, end, files, tmp_path, monkeypatch):
    """As after 1990, or before 2100: certificates that are no longer or not yet valid are as good as others."""
    monkeypatch.setattr(init_key, "FROM", datetime.datetime(begin, 1, 1))
    monkeypatch.setattr(init_key, "UNTIL", datetime.datetime(end, 1, 1))
    for name in ("owner", "trainer"):
        init_key.init_key(tmp_path / f"{name}.pem")
        write_certificate(tmp_path / f"{name}.crt", (tmp_path / f"{name}.pem").read_text())
    role = Role.READER if kind == "readers" else Role.TRAINER
    with pair(kind, files, key=tmp_path / "owner.pem", accept=[(role, tmp_path / "trainer.crt")]) as to:
        owner = fingerprint(read_certificates(tmp_path / "owner.crt")[0])
        assert to.admitted(key=Key(tmp_path / "trainer.pem"), owner=owner)


def test_one_key_for_all(files):
    with nothing_left(), Owner(key=files.owner) as owner:
        key = Key(files.owner)
        to = Pair(owner, {"key": key, "owner": key.fingerprint})
        session = to.connect()
        until(lambda: owner.sessions)
        assert owner.sessions[0].peer.role is Role.ADMIN
        session.close()


def test_roles(files):
    assert Role.ADMIN.may(Role.TRAINER)
    assert Role.TRAINER.may(Role.READER)
    assert not Role.READER.may(Role.TRAINER)
    for role in Role:
        with pair("tls", files, accept=[(role, files.certificate("trainer"))]) as to:
            session = to.connect()
            until(lambda: to.owner.sessions)
            assert to.owner.sessions[0].peer.role is role
            session.close()


# ---- no way around ----------------------------------------------------------------------------


def test_neither_side_goes_on_without_its_key(files):
    with nothing_left():
        with pair("plain", files) as to:
            key = Key(files.trainer)
            refused(to, "the owner has no key, and this side insists", key=key, owner=key.fingerprint)
        with pair("tls", files) as to:
            refused(to, "this side has none", key=None)
            with bare(to) as sock:
                sock.sendall(frame(b'{"protocol":"csd-optim/7","kind":"control","streams":0}'))
                assert b'"needs key"' in sock.recv(100)
                assert is_ended(sock)


def test_what_a_false_owner_says_without_tls(files):
    """Whatever it is: nobody who has a key sends anything but TLS."""
    for answer in (
        b"",
        b"\0" * 12,
        frame(b'{"session":"' + b"0" * 32 + b'"}'),
        b"\x15\x03\x01\x00\x02\x02\x28",
        b"HTTP/1.1 ",
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:
            said = []

            def speak(server=server, said=said, answer=answer):
                with server.accept()[0] as sock:
                    said.append(sock.recv(1 << 16))
                    sock.sendall(answer)
                    sock.shutdown(socket.SHUT_WR)
                    said.append(sock.recv(1 << 16))

            thread = threading.Thread(target=speak)
            thread.start()
            with pytest.raises(CSDUnavailableError):
                dial.connect(server.getsockname(), key=Key(files.trainer), owner=Key(files.owner).fingerprint, within=0)
            thread.join()
        assert said[0][:2] == b"\x16\x03"
        assert said[1][:1] in (b"", b"\x15")  # an alert


def test_without_a_key_only_loopback(files):
    for address in ("0.0.0.0", "", "::"):
        with pytest.raises(CSDValueError, match="can be reached from other machines, and there is no key"):
            listener.Listener((address, 0), on_session=print)
    with pytest.raises(CSDValueError, match="is another machine, which is reached with a key only"):
        dial.connect(("192.0.2.1", 7), key=None)
    with pytest.raises(CSDValueError, match="but the owner has no key"):
        Owner(accept=[(Role.TRAINER, files.certificate("trainer"))])
    with Owner(key=files.owner) as owner:
        assert owner.listener.fingerprint == Key(files.owner).fingerprint


@pytest.mark.parametrize("kind", ["tls", "plain"])
@pytest.mark.parametrize("side", ["trainer", "owner"])
def test_another_version_is_said_in_a_sentence(side, kind, files, monkeypatch):
    """ALPN tells it, and without a key the first message."""
    with nothing_left(), pair(kind, files) as to:
        if kind == "plain":
            monkeypatch.setattr(dial, "PROTOCOL", "csd-optim/8")
        else:
            monkeypatch.setattr(keys, "PROTOCOL", "csd-optim/8")
            key = Key(files.trainer)
            monkeypatch.setattr(dial, "PROTOCOL", "csd-optim/8")
        options = {"key": key} if kind == "tls" else {}
        refused(to, "speaks another version of the protocol than .*: install the same csd_optim", **options)
        until(lambda: any("1 of another version" in line for line in to.owner.lines))


def test_a_first_message_of_another_version(files):
    """Whatever else it has."""
    with nothing_left(), pair("plain", files) as to, bare(to) as sock:
        sock.sendall(frame(b'{"protocol":"csd-optim/99","kind":"other","more":[1]}'))
        assert b'"refused":"version"' in sock.recv(100)
        assert is_ended(sock)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + bytes(600),
        bytes(5000),
        b"\x80\x04" * 50,
        b"csdserve" + bytes(20),
    ],
    ids=["http", "tls", "zeros", "pickle", "version 4"],
)
def test_other_protocols(kind, said, files):
    """They get at most an alert or a refusal, and leave nothing."""
    with nothing_left(), pair(kind, files) as to:
        with bare(to) as sock:
            sock.sendall(said)
            assert is_ended(sock)
        assert to.admitted()


WRONG = [
    b"{}",
    b"[]",
    b'{"protocol":"csd-optim/7"}',
    b'{"protocol":"csd-optim/7","kind":"control"}',
    b'{"protocol":"csd-optim/7","kind":"control","streams":9}',
    b'{"protocol":"csd-optim/7","kind":"control","streams":-1}',
    b'{"protocol":"csd-optim/7","kind":"control","streams":true}',
    b'{"protocol":"csd-optim/7","kind":"control","streams":1.0}',
    b'{"protocol":"csd-optim/7","kind":"control","streams":1,"more":1}',
    b'{"protocol":"csd-optim/7","kind":"both","streams":1}',
    b'{"protocol":"csd-optim/7","kind":"data","session":"x","way":"up","stream":0}',
    b'{"protocol":"csd-optim/7","kind":"data","session":"' + b"0" * 32 + b'","way":"side","stream":0}',
    b'{"protocol":"csd-optim/7","kind":"data","session":"' + b"0" * 32 + b'","way":"up","stream":8}',
    b'{"protocol":["csd-optim/7"],"kind":"control","streams":1}',
    b'{"protocol":"csd-optim/7","kind":"control","streams":1}' + b" " * 2000,
    b"\xff",
]


@pytest.mark.parametrize("kind", ["tls", "plain"])
def test_wrong_first_messages(kind, files):
    """Of somebody with an accepted key."""
    with nothing_left(), pair(kind, files) as to:
        for text in WRONG:
            with contextlib.suppress(ConnectionClosed):
                connection, opened = None, None
                sock = socket.create_connection(to.owner.address, 30)
                if kind == "tls":
                    sock = to.options["key"].client.wrap_socket(sock, do_handshake_on_connect=False)
                connection = Connection(sock, 30)
                if kind == "tls":
                    connection.handshake(PROTOCOL)
                raw(connection).sendall(frame(text))
                opened = hear(connection)[0]
            assert opened is None, text
            connection.end()
        with pytest.raises(CSDValueError, match="it is 0 to 8"):
            to.connect(streams=9)
        assert not to.owner.settled()
        assert to.admitted()


# ---- sessions that others join ----------------------------------------------------------------


@pytest.fixture(params=["tls", "plain"])
def waiting(request, files):
    """An owner, and two sessions of two streams that wait for their other connections: (pair, one, other)."""
    with nothing_left(), pair(request.param, files) as to:
        both = [half_open(to) for _ in range(2)]
        yield to, *both
        for control, _ in both:
            control.end()
        assert not to.owner.sessions


@pytest.mark.parametrize("way", ["up", "down"])
def test_another_session(way, waiting):
    to, (_, one), _ = waiting
    for name in ("0" * 32, secrets.token_hex(16), one[::-1]):
        connection, opened = joining(to, name, way)
        assert opened.refused == "session"
        connection.end()


@pytest.mark.parametrize("way", ["up", "down"])
def test_more_connections_than_were_announced(way, waiting):
    to, (_, name), _ = waiting
    first, opened = joining(to, name, way)
    assert not opened.refused
    for stream in (0, 2, 7):
        again, opened = joining(to, name, way, stream)
        assert opened.refused == "request"
        again.end()
    first.end()


def test_a_session_that_is_complete_is_joined_by_nobody(files):
    with nothing_left(), pair("tls", files) as to:
        control, name = half_open(to, streams=1)
        made = [control, *(joining(to, name, way)[0] for way in ("up", "down"))]
        until(lambda: to.owner.sessions)
        for way in ("up", "down"):
            late, opened = joining(to, name, way)
            assert opened.refused == "session"
            late.end()
        for connection in made:
            connection.end()


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_that_is_replayed(way, files):
    """Everything that an admitted peer has sent on a connection, once more: TLS's random numbers differ."""
    with nothing_left(), pair("tls", files) as to:
        with recorded(to) as sent, opening(to, way) as said:
            sent.clear()
            to.opened(said)[0].end()
        data = b"".join(sent)
        assert len(data) > 500
        with bare(to) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            assert len(sock.recv(1 << 16)) > 0  # the owner's part of TLS, which cannot be answered
        until(lambda: not handshakes())
        assert to.owner.used.empty()


@contextlib.contextmanager
def recorded(to, change=lambda data, at, connection: data):
    """Put somebody in between who keeps, and may change, what is sent to the owner on each connection."""
    sent, threads, sockets = [], [], []
    server = socket.create_server(("127.0.0.1", 0))
    address, to.owner.address = to.owner.address, server.getsockname()

    def carry(source, sink, connection, keep):
        at = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if keep:
                    sent.append(data)
                    data, at = change(data, at, connection), at + len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def accept():
        with contextlib.suppress(OSError):
            for connection in range(100):
                near = server.accept()[0]
                far = socket.create_connection(address)
                sockets.extend((near, far))
                for way in ((near, far, connection, True), (far, near, connection, False)):
                    threads.append(threading.Thread(target=carry, args=way))
                    threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield sent
    finally:
        to.owner.address = address
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        accepting.join()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for sock in sockets:
            sock.close()


def flipped(plan, data, at, connection):
    """Change a byte, or cut: `plan` = (connection, offset, bits)."""
    number, offset, bits = plan
    if number != connection or not at <= offset < at + len(data):
        return data
    here = offset - at
    if not bits:
        raise OSError
    return data[:here] + bytes([data[here] ^ bits]) + data[here + 1 :]


def meddled(kind, files, step, seed):
    """Change every `step`-th byte that is sent while a session begins, and cut there, on each of its connections."""
    generator = random.Random(seed)
    with nothing_left(), pair(kind, files) as to:
        began, runs = time.monotonic(), 0
        for number, bits in [(n, bits) for n in range(1 + 2 * to.options["streams"]) for bits in (1, 0)]:
            for offset in range(generator.randrange(step), 900, step):
                plan = (number, offset, bits and 1 << generator.randrange(8))
                with recorded(to, functools.partial(flipped, plan)):
                    session = None
                    with contextlib.suppress(CSDUnavailableError, ConnectionClosed):
                        session = to.connect()
                        if kind != "plain":
                            assert ask(session) == Said(a=1)
                    if session:
                        session.close()
                runs += 1
        to.owner.settled()
        assert to.admitted()
        refused_lines = [line for line in to.owner.lines if line.startswith("refused")]
        assert len(refused_lines) <= 1 + (time.monotonic() - began) / limits.LOG_SECONDS
    return runs


@pytest.fixture
def short_deadlines(monkeypatch):
    for module in (dial, listener):
        monkeypatch.setattr(module, "DEADLINE", 1.0)
    monkeypatch.setattr(listener, "TICK", 0.02)


@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize("kind", KINDS)
def test_some_bytes_while_a_session_begins(kind, files):
    assert meddled(kind, files, 97, seed=1) > 15


@pytest.mark.soak
@pytest.mark.usefixtures("short_deadlines")
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_while_a_session_begins(kind, files):
    assert meddled(kind, files, 3, seed=2) > 500


# ---- a session under way ----------------------------------------------------------------------

IN_A_SESSION = {
    "2**32 bytes": b"\xff" * 4 + bytes(8),
    "2**40 bytes of buffers": frame(b"{}", nbytes=2**40),
    "unknown fields": frame(b'{"b":1}'),
    "true": frame(b'{"a":true}'),
    "1e400": frame(b'{"a":1e400}'),
    "brackets": frame(b"[" * 60_000),
    "no text": frame(b"\xff"),
    "a half": frame(b"{}", bytes(100))[:-50],
}


@pytest.mark.parametrize("kind", ["tls", "plain"])
@pytest.mark.parametrize("way", ["control", "up"])
@pytest.mark.parametrize("what", IN_A_SESSION)
def test_what_ends_a_session(what, way, kind, files):
    """Said by somebody with an accepted key, to the owner."""
    with nothing_left(), pair(kind, files, timeout=0.3) as to:
        session = to.connect()
        assert ask(session) == Said(a=1)
        connection = session.control if way == "control" else session.up[0]
        raw(connection).settimeout(20)
        raw(connection).sendall(IN_A_SESSION[what])
        if what == "a half":  # of buffers, after which nothing comes
            time.sleep(0.5)
        with pytest.raises(ConnectionClosed, match=r"has closed|has ended"):
            (session.control if way == "control" else session.down[0]).receive(SAID, 30)
        session.close()


@pytest.mark.parametrize("kind", ["tls", "plain"])
@pytest.mark.parametrize("what", IN_A_SESSION)
def test_what_a_false_owner_says_in_a_session(what, kind, files):
    """Down, and as an answer."""
    with nothing_left(), pair(kind, files) as to:
        for way in ("control", "down"):
            session = to.connect(timeout=0.3)
            until(lambda: to.owner.sessions)
            there = to.owner.sessions.pop()
            connection = there.control if way == "control" else there.down[0]
            raw(connection).settimeout(20)
            raw(connection).sendall(IN_A_SESSION[what])
            mine = session.control if way == "control" else session.down[0]
            assert not received(mine)
            session.close()
            there.close()


# ---- nothing secret is said ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_in_texts(kind, files, monkeypatch):
    """Neither private keys nor names of sessions are in logs, exceptions, or what objects look like."""
    drawn = []
    monkeypatch.setattr(listener.secrets, "token_hex", lambda n, draw=secrets.token_hex: remember(drawn, draw(n)))
    with pair(kind, files) as to:
        session = to.connect()
        until(lambda: to.owner.sessions)
        texts = [*to.owner.lines, repr(to.owner.sessions[0]), str(to.owner.sessions[0].peer), repr(session.peer)]
        for thing in (session, session.control, *session.up, *session.down, to.options["key"], to.owner.listener):
            texts += [repr(thing), str(thing)]
        with contextlib.suppress(CSDUnavailableError):
            to.connect(**({"key": Key(files.stranger)} if kind != "plain" else {"streams": 2})).close()
        session.close()
        with pytest.raises(ConnectionClosed) as error:
            session.control.send(Said())
        texts += [str(error.value), *to.owner.lines]
    assert drawn
    said = "\n".join(texts)
    if kind != "plain":
        with pytest.raises(TypeError):
            to.options["key"].__reduce__()
        drawn += files.trainer.read_text().splitlines()[1:-1]
    for secret in drawn:
        assert secret not in said


def remember(drawn, secret):
    drawn.append(secret)
    return secret
