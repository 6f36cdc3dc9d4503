"""What strangers may take: places, time, memory, lines of the log."""

import contextlib
import os
import resource
import socket
import threading
import time

import pytest
from support.wire_ends import SAID, Said, frame
from support.wires import (
    Owner,
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

from csd_optim.cli import serving
from csd_optim.errors import CSDUnavailableError
from csd_optim.serve.wire import dial, limits, listener
from csd_optim.serve.wire.connection import ConnectionClosed
from csd_optim.serve.wire.init_key import init_key
from csd_optim.serve.wire.keys import Key, Role
from csd_optim.serve.wire.limits import (
    HANDSHAKES,
    MOST_STREAMS,
    PER_ADDRESS,
    QuietLog,
    has_place,
    is_loopback,
    network,
)

__all__ = ["files"]

HELLO = b"\x16\x03\x01\x40\x00" + bytes(100)  # as TLS begins


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch):
    monkeypatch.setattr(listener, "TICK", 0.02)


@contextlib.contextmanager
def silent(owner, n, host="127.0.0.1", said=b""):
    """Return `n` connections from this address of this machine that say no more than this."""
    with contextlib.ExitStack() as stack:
        made = [socket.create_connection(owner.address, 60, source_address=(host, 0)) for _ in range(n)]
        for sock in made:
            stack.enter_context(sock)
            with contextlib.suppress(ConnectionError):
                sock.sendall(said)
        yield made


def answered(sock):
    with contextlib.suppress(ConnectionError):
        return sock.recv(100)


def test_the_ninth_of_an_address(files):
    with nothing_left(), pair("tls", files) as to:
        with silent(to.owner, PER_ADDRESS + 1) as made:
            assert not answered(made[-1])
            with pytest.raises(CSDUnavailableError, match="is it busy"):
                to.connect()
        until(lambda: to.owner.listener.address and not to.owner.sessions)


def test_a_flood_from_one_address_does_not_lock_out_another(files, monkeypatch):
    """A hundred silent connections from one address do not delay clients from other addresses."""
    monkeypatch.setattr(listener, "FIRST_SECONDS", 20.0)
    with nothing_left(), pair("tls", files) as to, silent(to.owner, 100, "127.0.0.2"):
        session = to.connect()
        assert ask(session) == Said(a=1)
        session.close()


def test_a_flood_from_everywhere(files, monkeypatch):
    """All places are taken. Whoever tries again gets in when those that say nothing have had their time."""

    @contextlib.contextmanager
    def flood(seconds):
        monkeypatch.setattr(listener, "FIRST_SECONDS", seconds)
        with contextlib.ExitStack() as stack:
            for k in range(HANDSHAKES // PER_ADDRESS):
                stack.enter_context(silent(to.owner, PER_ADDRESS, f"127.0.0.{k + 2}"))
            yield

    with nothing_left(), pair("tls", files, streams=2) as to:
        with flood(300.0), pytest.raises(CSDUnavailableError, match="is it busy"):
            to.connect()
        to.owner.settled()
        with flood(0.5):
            assert to.admitted(within=60)


def test_a_trainer_gets_in_during_a_flood_that_goes_on(files, monkeypatch):
    monkeypatch.setattr(listener, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(dial, "MOST_DELAY", 0.1)  # some ten attempts are needed
    over = threading.Event()

    def flood(owner, host):
        while not over.is_set():
            with silent(owner, PER_ADDRESS, host):
                time.sleep(0.12)

    with nothing_left(), pair("tls", files, streams=2) as to:
        threads = [threading.Thread(target=flood, args=(to.owner, f"127.0.0.{k}")) for k in range(1, 10)]
        for thread in threads:
            thread.start()
        try:
            session = to.connect(within=60)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        session.close()
        assert len(to.owner.lines) <= 5


@pytest.mark.parametrize("said", [0, 1, 6, 40])
def test_the_handshake_has_a_deadline(said, files, monkeypatch):
    """In all, however slowly and steadily bytes come."""
    monkeypatch.setattr(listener, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(listener, "DEADLINE", 0.4)
    with nothing_left(), pair("tls", files) as to, silent(to.owner, 1, said=HELLO[:said]) as made:
        sent = said
        with contextlib.suppress(ConnectionError):
            for k in range(said, 100):
                made[0].sendall(HELLO[k : k + 1])
                time.sleep(0.05)
                sent += 1
        assert sent < 100


def test_the_first_message_has_a_deadline(files, monkeypatch):
    """Without TLS as well, byte by byte."""
    monkeypatch.setattr(listener, "DEADLINE", 0.4)
    said = frame(b'{"protocol":"csd-optim/7","kind":"control","streams":1}')
    with nothing_left(), pair("plain", files) as to, silent(to.owner, 1, said=said[:1]) as made:
        with contextlib.suppress(ConnectionError):
            for k in range(1, len(said)):
                made[0].sendall(said[k : k + 1])
                time.sleep(0.05)
        assert not answered(made[0])
        until(lambda: not handshakes())


@pytest.mark.parametrize("way", ["up", "down"])
def test_the_other_connections_have_a_deadline(way, files, monkeypatch):
    """An admitted peer that does not open all of them does not stay, and neither do those that it has opened."""
    monkeypatch.setattr(listener, "JOIN_SECONDS", 0.5)
    with nothing_left(), pair("tls", files) as to:
        control, name = half_open(to)
        data, opened = joining(to, name, way)
        assert not opened.refused
        for connection in (control, data):
            with pytest.raises(ConnectionClosed, match="has closed"):
                connection.receive(SAID, 30)
            connection.end()
        assert not to.owner.settled()


def test_sessions_and_readers_are_limited(files, monkeypatch):
    monkeypatch.setattr(listener, "READERS", 1)
    with nothing_left(), pair("tls", files, accept=[(Role.READER, files.certificate("trainer"))]) as to:
        session = to.connect(streams=0)
        with pytest.raises(CSDUnavailableError, match="it has as many sessions as it may have"):
            to.connect(streams=0)
        session.close()
        to.owner.settled()
        assert to.admitted(streams=0)
        monkeypatch.setattr(listener, "SESSIONS", 0)
        with pytest.raises(CSDUnavailableError, match="it has as many sessions as it may have"):
            to.connect(streams=0)


@contextlib.contextmanager
def open_files(n):
    """Return within a limit of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_than_64_trainers_with_the_usual_limit_of_open_files(files):
    with open_files(1024), nothing_left(), pair("plain", files, streams=2) as to:
        sessions = [to.connect(within=60) for _ in range(70)]
        for session in sessions:
            assert ask(session) == Said(a=1)
            session.close()


@pytest.mark.parametrize("whole", [True, False])
def test_sessions_leave_descriptors_to_the_engine(whole, files, monkeypatch):
    """Also sessions that still wait for their data connections. A session that ends frees its place."""
    monkeypatch.setattr(listener, "most_connections", lambda: 16)
    with nothing_left(), pair("plain", files, streams=2) as to:
        sessions = [to.connect() if whole else half_open(to)[0] for _ in range(3)]
        with pytest.raises(CSDUnavailableError, match="more need a higher limit of open files"):
            to.connect()
        until(lambda: any("more sessions than the limit of open files (ulimit -n)" in line for line in to.owner.lines))
        to.connect(streams=0).close()
        for session in sessions:
            session.close() if whole else session.end()
        to.owner.settled()
        assert to.admitted(within=60)


def test_small_and_large_limits_of_open_files():
    for limit, left in ((1024, 768), (300, 150), (512, 256), (64, 32)):
        with open_files(limit):
            assert limits.most_connections() == left
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with open_files(1024):
        serving.raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, serving.MOST_FILES), hard)


def test_a_peer_that_leaves_before_its_data_connections(files, monkeypatch):
    """The owner notices, and somebody else may have its place."""
    monkeypatch.setattr(listener, "READERS", 1)
    with nothing_left(), pair("tls", files, accept=[(Role.READER, files.certificate("trainer"))]) as to:
        control, _ = half_open(to)
        assert not to.admitted()
        control.end()
        assert to.admitted(within=60)


def test_no_descriptors_left(files):
    """The owner goes on when there are some again."""
    with nothing_left(), pair("tls", files) as to:
        session = to.connect()
        until(lambda: to.owner.sessions)
        filled = []
        with contextlib.ExitStack() as stack, open_files(max(map(int, os.listdir("/proc/self/fd"))) + 5):
            try:
                with contextlib.suppress(OSError):
                    while True:
                        filled.append(os.dup(0))
                os.close(filled.pop())
                stack.enter_context(silent(to.owner, 1))
                until(lambda: any("for lack of resources (EMFILE)" in line for line in to.owner.lines))
                assert ask(session) == Said(a=1)
            finally:
                for fd in filled:
                    os.close(fd)
        session.close()
        to.owner.settled()
        assert to.admitted(within=60)


def test_hundreds_of_connections_leave_nothing(files):
    with nothing_left(), pair("tls", files) as to:
        said = [b"", b"x", HELLO, frame(b"{}")]
        for k in range(100):
            with silent(to.owner, 3, said=said[k % 4]):
                pass
        until(lambda: not to.owner.settled())
        assert to.admitted(within=60)
        assert len(to.owner.lines) <= 3


def test_close_during_handshakes(files, monkeypatch):
    monkeypatch.setattr(listener, "FIRST_SECONDS", 300.0)
    with nothing_left(), Owner(key=files.owner) as owner, silent(owner, 5), silent(owner, 3, said=HELLO):
        began = time.monotonic()
        owner.listener.close()
        owner.listener.close()
        assert time.monotonic() - began < 60


def test_streams_have_the_same_order_on_both_sides(files):
    with nothing_left(), pair("tls", files, streams=MOST_STREAMS) as to:
        session = to.connect()
        for k, (up, down) in enumerate(zip(session.up, session.down, strict=True)):
            up.send(Said(a=k), b"x" * k)
            assert down.receive(SAID, 30) == (Said(a=k), k)
            down.discard()
        assert len(session.down) == MOST_STREAMS
        session.close()


# ---- keys that are taken away -----------------------------------------------------------------


def test_reload(files, tmp_path):
    """Sessions of a key that is no longer accepted, are revoked; a broken file changes nothing."""
    for name in ("new", "old"):
        init_key(tmp_path / f"{name}.pem")
    accepted = tmp_path / "accepted.crt"
    write_certificate(accepted, (tmp_path / "old.pem").read_text())
    with nothing_left(), pair("tls", files, accept=[(Role.TRAINER, accepted)]) as to:
        old, new = (Key(tmp_path / f"{name}.pem") for name in ("old", "new"))
        session = to.connect(key=old)
        until(lambda: to.owner.sessions)
        seen = to.owner.sessions[0]
        to.owner.listener.reload()
        assert not seen.revoked
        with contextlib.suppress(CSDUnavailableError):
            to.connect(key=new).close()
        accepted.write_text("nonsense")
        to.owner.listener.reload()
        assert not seen.revoked
        assert "the accepted keys remain those from before" in to.owner.lines[-1]
        write_certificate(accepted, (tmp_path / "new.pem").read_text())
        to.owner.listener.reload()
        assert seen.revoked
        session.close()
        to.owner.settled()
        with pytest.raises(CSDUnavailableError, match="does not accept the key"):
            to.connect(key=old)
        assert to.admitted(key=new)


def test_a_key_that_is_taken_away_during_the_handshake(files, tmp_path, monkeypatch):
    accepted = tmp_path / "accepted.crt"
    accepted.write_bytes(files.certificate("trainer").read_bytes())
    with nothing_left(), pair("tls", files, accept=[(Role.TRAINER, accepted)]) as to:
        receive = listener.Connection.receive

        def reload(connection, *arguments):  # TLS has accepted the certificate
            if threading.current_thread().name == "csd_optim handshake":
                accepted.write_bytes(files.certificate("stranger").read_bytes())
                to.owner.listener.reload()
            return receive(connection, *arguments)

        monkeypatch.setattr(listener.Connection, "receive", reload)
        with pytest.raises(CSDUnavailableError, match="does not accept the key"):
            to.connect()
        assert not to.owner.settled()


def test_a_key_that_is_taken_away_before_the_other_connections(files, tmp_path):
    accepted = tmp_path / "accepted.crt"
    accepted.write_bytes(files.certificate("trainer").read_bytes())
    with nothing_left(), pair("tls", files, accept=[(Role.TRAINER, accepted)]) as to:
        control, name = half_open(to)
        accepted.write_bytes(b"".join(files.certificate(n).read_bytes() for n in ("trainer", "stranger")))
        to.owner.listener.reload()
        joining(to, name)[0].end()
        accepted.write_bytes(files.certificate("stranger").read_bytes())
        to.owner.listener.reload()
        with pytest.raises(ConnectionClosed):
            joining(to, name, "down")
        with pytest.raises(ConnectionClosed):
            control.receive(SAID, 30)


# ---- the log ----------------------------------------------------------------------------------


def test_the_log_is_quiet(monkeypatch):
    monkeypatch.setattr(limits, "LOG_SECONDS", 0.2)
    lines = []
    log = QuietLog(lines.append)
    for k in range(1000):
        log.refused("of another version" if k % 4 else "without a key")
    assert lines == ["refused connections: 1 without a key"]
    time.sleep(0.2)
    log.print_counts()
    log.print_counts()
    assert lines[1:] == ["refused connections: 750 of another version, 249 without a key"]


def test_without_a_key_nobody_from_elsewhere(files, monkeypatch):
    """Even where the kernel delivers packets of others to loopback."""
    with nothing_left(), pair("plain", files) as to:
        monkeypatch.setattr(listener, "is_loopback", lambda host: False)
        with pytest.raises(CSDUnavailableError):
            to.connect()
        monkeypatch.undo()
        assert to.admitted()
        assert "1 from elsewhere, without a key" in to.owner.lines[0]


def test_a_connection_to_itself(monkeypatch):
    """Which TCP makes on loopback now and then, if nobody listens at a port."""

    class Itself(socket.socket):
        def connect(self, where):
            self.bind(where)
            super().connect(where)

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    monkeypatch.setattr(socket, "socket", Itself)
    with pytest.raises(CSDUnavailableError, match="Connection refused"):
        dial.connect(address, key=None, within=0)


def test_a_log_that_cannot_be_written(files):
    def full(line):
        raise OSError(28, "No space left on device")

    with nothing_left(), pair("tls", files, log=full) as to:
        with silent(to.owner, 1, said=b"x" * 28) as made:
            assert not answered(made[0])
        assert to.admitted()


def test_an_exception_of_a_session_ends_it(files):
    """With one line, and for errors of ours without a traceback."""

    def fails(session):
        raise ConnectionClosed("secret")

    with nothing_left(), pair("tls", files, on_session=fails) as to:
        assert not to.admitted()
        until(lambda: len(to.owner.lines) == 2)
        assert to.owner.lines[1].endswith("has ended by ConnectionClosed")


# ---- addresses --------------------------------------------------------------------------------


def test_addresses():
    assert [is_loopback(a) for a in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")] == [True] * 4
    outside = ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "128.0.0.1", "1.0.0.127")
    assert [is_loopback(a) for a in outside] == [False] * 7
    assert network("2001:db8:1:2:3::4") == network("2001:db8:1:2:ffff::") != network("2001:db8:1:3::")
    assert network("::ffff:10.0.0.1") == network("10.0.0.1") == "10.0.0.1"


def test_places():
    def entered(hosts):
        for host in hosts:
            before = len(under_way)
            under_way.extend([network(host)] * has_place(host, under_way))
            yield len(under_way) - before

    under_way = []
    assert [*entered(["10.0.0.1"] * 9)] == [1] * 8 + [0]
    under_way.remove("10.0.0.1")
    assert sum(entered(["10.0.0.1"])) == 1
    assert sum(entered(f"2001:db8::{k}" for k in range(99))) == 8
    assert sum(entered(f"10.0.1.{k}" for k in range(99))) == HANDSHAKES - 16
