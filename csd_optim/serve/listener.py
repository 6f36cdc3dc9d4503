"""Listens at an owner's address, and calls back for each admitted peer."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import CSDError, CSDOSError, CSDValueError
from . import handshake, sealed
from .admission import Admission
from .handshake import Refusal
from .keys import Accepted
from .limits import QuietLog, has_place, is_loopback, network
from .session import Role, Session
from .tcp import ConnectionClosed, Tcp, arrives

FIRST_SECONDS = 2.0  # for message 1
BACKLOG = 128
PR_SET_DUMPABLE = 4  # constant of prctl(), which Python does not have
TICK = 0.25  # seconds between checks of deadlines, while there are any


class Listener:
    """Accepts connections. Each handshake has a thread of its own, which then runs the session."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        key: Path | None = None,
        accept: Sequence[tuple[Role, Path]] = (),
        on_session: Callable[[Session], None],
        log: Callable[[str], None] = print,
        timeout: float = 600.0,
    ) -> None:
        """Listen at (host, port); port 0: any free one.

        key          key file; None: only on loopback, where everybody on this machine is an admin
        accept       files of certificates, and what their holders may do; holders of `key` are admins
        on_session   called in a thread of its own when all connections of a peer are there. The callee closes the
                 session; after an exception the listener does.
        log          prints a line; any thread calls it
        timeout      seconds for which a peer may later be silent within a message

        Raises CSDOSError, and CSDValueError if the address is not on loopback and there is no key.
        """
        if key is None and accept:
            raise CSDValueError("certificates are accepted, but the owner has no key: add --key FILE")
        self._files, self._has_key = (key, accept), key is not None
        if key is not None:
            _forbid_core_dumps()
        accepted = None if key is None else Accepted(key, accept)
        self.fingerprint: str = "" if accepted is None else accepted.key.fingerprint  # of this owner
        self._on_session, self._log = on_session, QuietLog(log)
        self._admission = Admission(accepted, timeout)
        # Handshakes under way: by thread, with connection and origin. Only _accept() adds entries.
        self._handshakes: dict[threading.Thread, tuple[Tcp, str]] = {}
        self._closed = False
        self._sock = _listening(address, self._has_key)
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        if self._has_key and not sealed.AVAILABLE:
            self._log.say(sealed.SLOW)
        self._thread = threading.Thread(target=self._listen, name="csd_optim listen", daemon=True)
        self._thread.start()

    def reload(self) -> None:
        """Read the key file and the certificates again, and revoke sessions whose key has lost its role.

        If a file is unusable, nothing changes, and the log says so.
        """
        key, accept = self._files
        if key is None:
            return
        try:
            accepted = Accepted(key, accept)
        except CSDError as e:
            self._log.say(f"the accepted keys remain those from before: {e}")
            return
        self._admission.replace(accepted)
        self.fingerprint = accepted.key.fingerprint
        self._log.say(f"{len(accepted.roles)} keys are accepted")

    def close(self) -> None:
        """Stop listening, and end handshakes. Sessions continue."""
        self._closed = True
        with contextlib.suppress(OSError):  # closed before
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        while others := {t: tcp for t, (tcp, _) in [*self._handshakes.items()] if t is not threading.current_thread()}:
            for thread, tcp in others.items():
                tcp.shutdown()
                thread.join(TICK)  # the thread may have become a session's
        self._admission.tidy(everything=True)

    def _listen(self) -> None:
        with self._sock:
            while not self._closed:
                # In this order: a handshake is counted until its session or waiting connection is.
                busy = len(self._handshakes) + self._admission.tidy() + self._log.print_counts()
                if arrives(self._sock, TICK if busy else None) and not self._closed:
                    self._accept()

    def _accept(self) -> None:
        try:
            sock, (host, *_) = self._sock.accept()
        except OSError as e:
            if self._closed or isinstance(e, ConnectionError):
                return
            # No descriptors or no memory: wait for some.
            self._log.refused(f"for lack of resources ({errno.errorcode.get(e.errno or 0)})")
            time.sleep(TICK)
            return
        if not (self._has_key or is_loopback(host)):  # Linux may let neighbours in (route_localnet)
            self._log.refused("from elsewhere, without a key")
            sock.close()
            return
        if not has_place(host, [place for _, place in [*self._handshakes.values()]]):
            self._log.refused("of too many at once")
            _send_away(sock)
            return
        try:
            tcp = Tcp(sock, handshake.DEADLINE)
        except (OSError, ConnectionClosed, MemoryError) as e:  # the peer is already gone
            self._log.refused(f"by {type(e).__name__}")
            sock.close()
            return
        tcp.finish_by(time.monotonic() + FIRST_SECONDS)
        thread = threading.Thread(target=self._welcome, args=(tcp,), name="csd_optim handshake", daemon=True)
        self._handshakes[thread] = tcp, network(host)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as e:  # no thread available
            self._refuse(tcp, f"by {type(e).__name__}", thread)

    def _welcome(self, tcp: Tcp) -> None:
        thread = threading.current_thread()
        try:
            session = self._admission.admit(tcp)
        except Refusal as e:
            return self._refuse(tcp, str(e), thread)
        except ConnectionClosed:
            return self._refuse(tcp, "that were cut or late", thread)
        except ssl.SSLError:
            return self._refuse(tcp, "without an accepted certificate, or TLS 1.3", thread)
        except Exception as e:
            return self._refuse(tcp, f"by {type(e).__name__}", thread)
        del self._handshakes[thread]
        if session is not None:
            self._run(session)

    def _refuse(self, tcp: Tcp, why: str, thread: threading.Thread) -> None:
        """Count a refusal, end the connection, and free its place."""
        self._log.refused(why)
        tcp.shutdown()
        del self._handshakes[thread]

    def _run(self, session: Session) -> None:
        threading.current_thread().name = "csd_optim session"
        self._log.say(f"admitted {session.peer}")
        try:
            self._on_session(session)
        except Exception as e:
            session.close()
            self._log.say(f"the session of {session.peer} has ended by {type(e).__name__}")
            if not isinstance(e, CSDError):
                raise


def _forbid_core_dumps() -> None:
    """Keep this process's memory, which contains keys, out of core dumps and away from other users' debuggers."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _listening(address: tuple[str, int], has_key: bool) -> socket.socket:
    """Return a socket that listens at (host, port). Raises CSDOSError; CSDValueError if the address needs a key."""
    host, port = address
    try:
        family, *_, place = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
        # The name is looked up once, so that the same address is checked and used.
        if not (has_key or is_loopback(str(place[0]))):
            raise CSDValueError(
                f"{host}:{port} can be reached from other machines, and there is no key. Make one by `csd-optim serve "
                f"--init-key FILE`, start with `--key FILE`, and copy it to the trainers (CSD_OPTIM_KEY); or listen at "
                f"127.0.0.1, where everybody on this machine is let in"
            )
        return socket.create_server((str(place[0]), port), family=family, backlog=BACKLOG)
    except CSDError:
        raise
    except (OSError, UnicodeError) as e:  # UnicodeError: no name of a host can be like that
        number, why = getattr(e, "errno", errno.EINVAL), getattr(e, "strerror", None) or e
        raise CSDOSError(number, f"cannot listen at {host!r}, port {port}: {why}") from None


def _send_away(sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(handshake.answer(handshake.BUSY))
        sock.shutdown(socket.SHUT_WR)
        sock.recv(64)  # closing with unread data resets the connection, and may lose the answer
