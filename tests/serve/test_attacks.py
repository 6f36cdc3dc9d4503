"""What somebody may try who reaches the port, listens, changes what is said, or has another key."""

import contextlib
import datetime
import secrets
import socket
import ssl
import threading

import pytest
import trustme
from support.wires import (
    KINDS,
    Meddler,
    Owner,
    Pair,
    files,
    half_open,
    handshakes,
    meddling,
    nothing_left,
    pair,
    until,
    write_certificate,
)

from csd_optim.errors import CSDUnavailableError, CSDValueError
from csd_optim.serve import dial, handshake, init_key, listener, sealed
from csd_optim.serve.handshake import CONTROL, DATA, PLAIN, Request
from csd_optim.serve.keys import Key, fingerprint, read_certificates
from csd_optim.serve.session import Role
from csd_optim.serve.tcp import ConnectionClosed, Tcp
from csd_optim.serve.tls import Tls

__all__ = ["files"]

ENCRYPTED = [kind for kind in KINDS if kind != "plain"]
pytestmark = pytest.mark.filterwarnings("ignore:data is encrypted by")
REQUEST = Request(1, 0)


def refused(to, why, **options):
    with pytest.raises(CSDUnavailableError, match=why):
        to.connect(**options)
    assert not to.owner.settled()


@contextlib.contextmanager
def raw(to):
    """Return a bare connection to the owner."""
    with socket.create_connection(to.owner.address, 5) as sock:
        yield sock


def says_nothing(sock):
    """Whether the owner has closed a connection without another byte."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


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


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_no_certificate(kind, files):
    with nothing_left(), pair(kind, files) as to:
        for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = version
            assert over_tls(to, context) == b""


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_tls_1_2_with_the_right_key(kind, files):
    with nothing_left(), pair(kind, files) as to:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(files.trainer)
        assert over_tls(to, context) == b""


def over_tls(to, context):
    """Say messages 1 to 4 with this context, and return what the owner answers."""
    hello = handshake.preface(CONTROL, REQUEST.pack())
    with raw(to) as sock:
        sock.sendall(hello)
        assert sock.recv(100) == handshake.answer(handshake.GO_ON)
        try:
            with context.wrap_socket(sock) as tls:
                tls.sendall(hello)
                answer = tls.recv(100)
        except (ssl.SSLError, ConnectionError):
            answer = b""
    assert not to.owner.settled()
    return answer


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
        with pair("frames", files, accept=[(role, files.certificate("trainer"))]) as to:
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
        with pair("frames", files) as to:
            refused(to, "this side has none", key=None)
            hello = handshake.preface(CONTROL | PLAIN, REQUEST.pack())
            with raw(to) as sock:
                sock.sendall(hello + hello)
                assert sock.recv(100) == handshake.answer(handshake.NEEDS_KEY)


@pytest.mark.parametrize("status", range(8))
def test_what_a_false_owner_says_in_the_clear(status, files):
    """Whatever message 2 says: nobody who has a key sends anything but TLS after it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = []

        def answer():
            with server.accept()[0] as sock:
                said.append(sock.recv(28))
                sock.sendall(handshake.answer(status))
                said.append(sock.recv(1000))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(CSDUnavailableError):
            dial.connect(server.getsockname(), key=Key(files.trainer), owner=Key(files.owner).fingerprint, within=0)
        thread.join()
    assert said[0] == handshake.preface(CONTROL, REQUEST.pack())
    assert said[1][:3] == b"\x16\x03\x01" if status == handshake.GO_ON else said[1] == b""


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


@pytest.mark.parametrize("kind", KINDS)
def test_other_versions(kind, files):
    with nothing_left(), pair(kind, files) as to:
        for version in (0, 3, 5, 2**16 - 1):
            with raw(to) as sock:
                sock.sendall(handshake.PREFACE.pack(handshake.MAGIC, version, CONTROL, bytes(16)))
                assert sock.recv(100) == handshake.answer(handshake.OTHER_VERSION)
                assert says_nothing(sock)
        assert to.admitted()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + bytes(500),
        bytes(5000),
        b"\x80\x04" * 50,
    ],
    ids=["http", "tls", "zeros", "pickle"],
)
def test_other_protocols(kind, said, files):
    """They get no byte."""
    with nothing_left(), pair(kind, files) as to:
        with raw(to) as sock:
            sock.sendall(said)
            assert says_nothing(sock)
        assert to.admitted()


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_kinds_and_requests(kind, files):
    plain = PLAIN if kind == "plain" else 0
    with nothing_left(), pair(kind, files) as to:
        for wrong in (0, 5, 0x201, 0x8000):
            with raw(to) as sock:
                sock.sendall(handshake.preface(wrong | plain, bytes(16)) + bytes(32))
                assert says_nothing(sock)
        with pytest.MonkeyPatch.context() as patch:
            for request in (Request(9, 0), Request(2**32 - 1, 0), Request(1, 2)):
                patch.setattr(dial, "Request", lambda *_, said=request: said)
                refused(to, "refuses|does not accept")
        with pytest.raises(CSDValueError, match="it is 0 to 8"):
            to.connect(streams=9)


# ---- recorded, repeated, sent back ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_replay(kind, files):
    """All that an admitted peer has sent, once more, on each of its connections, during its session and after it."""
    with nothing_left(), pair(kind, files) as to:
        with meddling() as carried:
            session = to.connect()
        sent = [bytes(data) for (number, way), data in carried.items() if way == "sends" and isinstance(number, int)]
        for _ in range(2):
            for data in sent if kind != "plain" else sent[1:]:
                with raw(to) as sock, contextlib.suppress(OSError):  # the owner may have closed it by then
                    sock.sendall(data)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1000):
                        pass
            until(lambda: not handshakes())
            assert len(to.owner.sessions) <= 1
            session.close()


def data_connection(to):
    return Tcp(socket.create_connection(to.owner.address, 5), 5)


@pytest.fixture(params=["frames", "plain"])
def waiting(request, files):
    """An owner and two control connections whose data connections are missing: (pair, kind, one, other)."""
    with nothing_left(), pair(request.param, files) as to:
        key = None if request.param == "plain" else Key(files.trainer)
        both = [half_open(to, key=key) for _ in range(2)]
        yield to, DATA | (0 if key else PLAIN), *both
        for stream, *_ in both:
            stream.shutdown()
        assert not to.owner.sessions


def test_another_ticket_or_session(waiting):
    to, kind, (_, one, ticket), (_, other, another) = waiting
    for name, secret in [
        (one, another),
        (other, ticket),
        (one, bytes(32)),
        (one, ticket[:-1] + bytes([ticket[-1] ^ 1])),
    ]:
        tcp = data_connection(to)
        with pytest.raises(handshake.Refusal, match="does not know the ticket"):
            handshake.prove_to_owner(tcp, kind, name, secret)
        tcp.shutdown()
    for name in (bytes(16), secrets.token_bytes(16), one[::-1]):
        tcp = data_connection(to)
        with pytest.raises(ConnectionClosed):  # without an answer
            handshake.prove_to_owner(tcp, kind, name, ticket)


@pytest.mark.parametrize("proof", [lambda mine: mine, lambda mine: bytes(32), lambda mine: mine[::-1]])
def test_a_proof_that_is_sent_back(proof, waiting):
    """An attacker who only sees other people's tickets sends back the owner's own proof, zeros, or anything."""
    to, kind, (_, name, _), _ = waiting
    with raw(to) as sock:
        sock.sendall(handshake.preface(kind, name) + bytes(32))
        answer = sock.recv(64, socket.MSG_WAITALL)
        sock.sendall(proof(answer[32:]))
        assert says_nothing(sock)


def test_a_data_connection_that_is_replayed(waiting):
    """The session still waits for its second data connection. The owner's new nonce makes the old proof worthless."""
    to, kind, (_, name, ticket), _ = waiting
    Meddler.carried, Meddler.tcp = {}, 0
    with meddling() as carried:
        first = dial.Tcp(socket.create_connection(to.owner.address, 5), 5)
        handshake.prove_to_owner(first, kind, name, ticket)
    sent = carried[0, "sends"]
    tcp = data_connection(to)
    handshake.say(tcp, sent[:60])
    handshake.read(tcp, 64)
    handshake.say(tcp, sent[60:])
    with pytest.raises(ConnectionClosed):
        handshake.read(tcp, 12)
    first.shutdown()


def test_more_data_connections_than_were_announced(waiting):
    to, kind, (stream, name, ticket), _ = waiting
    tcps = [data_connection(to) for _ in range(3)]
    for tcp in tcps[:2]:
        handshake.prove_to_owner(tcp, kind, name, ticket)
    with pytest.raises(ConnectionClosed):
        handshake.prove_to_owner(tcps[2], kind, name, ticket)
    until(lambda: to.owner.sessions)
    for ending in (*tcps, stream):
        ending.shutdown()
    assert not to.owner.settled()


def test_data_connections_in_tls_where_frames_are_agreed(files):
    """And the other way round: the kind is the one that the owner has said on the control connection."""
    with nothing_left(), pair("frames", files) as to:
        stream, name, ticket = half_open(to, key=Key(files.trainer))
        for kind in (handshake.DATA_IN_TLS, DATA | PLAIN):
            tcp = data_connection(to)
            handshake.say(tcp, handshake.preface(kind, name))
            if kind & PLAIN:
                assert handshake.read(tcp, 12) == handshake.answer(handshake.NEEDS_KEY)
            with pytest.raises(ConnectionClosed):
                handshake.read(tcp, 12)
        stream.shutdown()
    with nothing_left(), pair("ssl", files) as to:
        stream, name, ticket = half_open_in_tls(to, Key(files.trainer))
        tcp = data_connection(to)
        with pytest.raises(ConnectionClosed):
            handshake.prove_to_owner(tcp, DATA, name, ticket)
        stream.shutdown()


def half_open_in_tls(to, key):
    with pytest.MonkeyPatch.context() as patch:
        answer = handshake.answer
        patch.setattr(handshake, "answer", lambda status: answer(status) if status else Either())
        return half_open(to, key=key)


class Either(bytes):
    """Equal to both answers that let somebody go on."""

    def __new__(cls):
        return super().__new__(cls, handshake.ANSWER.pack(handshake.REPLY, handshake.VERSION, handshake.GO_ON))

    def __eq__(self, other):
        return other[-2:] in (b"\0\0", b"\0\4")

    __hash__ = None


def test_another_key_on_the_data_connection(files):
    """With TLS there: the key has to be that of the control connection, not just an accepted one."""
    accept = [(Role.TRAINER, files.certificate(name)) for name in ("trainer", "stranger")]
    with nothing_left(), pair("ssl", files, accept=accept) as to:
        stream, name, _ = half_open_in_tls(to, Key(files.trainer))
        for whose, works in (("stranger", False), ("trainer", True)):
            tcp, hello = data_connection(to), handshake.preface(handshake.DATA_IN_TLS, name)
            handshake.say(tcp, hello)
            handshake.read(tcp, 12)
            tls = Tls(tcp, Key(getattr(files, whose)).client, server=False)
            tls.handshake()
            handshake.say(tls, hello, bytes(32))
            if works:
                handshake.read(tls, 64)
            else:
                with pytest.raises(ConnectionClosed):
                    handshake.read(tls, 64)
            tls.shutdown()
        stream.shutdown()


# ---- nothing secret is said ---------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_in_texts(kind, files, monkeypatch):
    """Neither private keys nor tickets are in logs, exceptions, or what objects look like."""
    drawn = []
    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda n, draw=secrets.token_bytes: remember(drawn, draw(n)))
    with pair(kind, files) as to:
        session = to.connect()
        until(lambda: to.owner.sessions)
        texts = [*to.owner.lines, repr(to.owner.sessions[0]), str(to.owner.sessions[0].peer), repr(session.peer)]
        for thing in (session, session.control, *session.data, to.options["key"], to.owner.listener):
            texts += [repr(thing), str(thing)]
        with contextlib.suppress(CSDUnavailableError):
            to.connect(**({"key": Key(files.stranger)} if kind != "plain" else {"streams": 2})).close()
        session.close()
        with pytest.raises(ConnectionClosed) as error:
            session.control.send({})
        texts += [str(error.value), *to.owner.lines]
    assert len(drawn) >= 2
    said = "\n".join(texts)
    if kind != "plain":
        with pytest.raises(TypeError):
            to.options["key"].__reduce__()
        drawn += files.trainer.read_bytes().splitlines()[1:-1]
    for secret in drawn:
        for form in (repr(secret)[2:-1], secret.hex(), secret.decode("latin-1")):
            assert form not in said


def remember(drawn, secret):
    drawn.append(secret)
    return secret


def test_connections_are_encrypted_by_different_keys(files):
    """Two data connections, and both directions: four different streams of bytes for one frame."""
    with nothing_left(), pair("frames", files, streams=2) as to:
        keys = []
        with pytest.MonkeyPatch.context() as patch:
            made = sealed.Direction.__init__
            patch.setattr(sealed.Direction, "__init__", lambda self, key: made(self, remember(keys, key)))
            assert to.admitted()
        assert len(keys) == 8
        assert len({*keys}) == 4
