"""A session at an owner: requests are executed one by one, while frames travel on threads of their own."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ...errors import CSDError, CSDRankError, CSDStoreError
from ...store.recovery import RanksStore
from ...threads import start_thread
from ..messages import failure_of, refuse, said
from ..requests import (
    CHOOSE,
    GRADIENTS,
    HEAD_BYTES,
    HELLO,
    REQUEST,
    Alive,
    Answer,
    CommitNews,
    Done,
    Down,
    Failed,
    Found,
    Hello,
    Parameters,
    StepFailed,
    TileGradients,
    Working,
    op_of,
)
from ..wire.connection import ConnectionClosed
from ..wire.keys import Role
from ..wire.schema import msgspec
from ..wire.session import Session
from .log import printable
from .owner_requests import Closed, OwnerRequests, check_attach, check_hello, summary_of
from .owner_step import OwnerStep
from .ownership import Ownership

CLOSE_SECONDS = 5.0  # how long the connections stay open after the answer to `close`
HELLO_SECONDS = 60.0  # an admitted trainer has to ask for a session within this time
HELLO_BYTES = 64 << 10  # maximum length of the request for a session
LINE, TEXT = 500, 200  # characters of a line in the log, and of a trainer's name
Granted = tuple[Answer, list[Any]]  # the answer to a HELLO


class OwnerSession:
    """The session of one trainer. `run()` returns when the session is over; `end()` ends it, on any thread."""

    def __init__(
        self, ownership: Ownership, session: Session, timeout: float, print_line: Callable[[str], None]
    ) -> None:
        """`session`: the connections. `timeout`: seconds for which the trainer may wait for a sign of life."""
        self._ownership, self._session, self._print_line = ownership, session, print_line
        self._interval = timeout / 4
        self._requests = OwnerRequests(ownership, session.peer.role, self._note_begun)
        self._step: OwnerStep | None = None
        self._changed = threading.Condition()
        self._news: deque[Down] = deque()
        self._answering: int | None = None  # number of the request that is being executed
        self._over = False
        self._control_lock = threading.Lock()  # one message at a time
        self.why: str = "its trainer has closed it"
        self.ended: threading.Event = threading.Event()

    # ---- its life --------------------------------------------------------------------

    def run(self, answer: Granted, number: int) -> None:
        """Answer a granted HELLO, and serve until the session is over. The engine is open."""
        engine = self._ownership.engine
        work: list[Callable[[], None]] = [partial(self._receive, s) for s in range(len(self._session.up))]
        work += [partial(self._send, device) for device in range(len(engine.devices.specs))]
        threads = [threading.Thread(target=w, name="csd_optim session", daemon=True) for w in (*work, self._tell)]
        self._ownership.committer.background.on_progress = self._note_progress
        try:
            for thread in threads:
                start_thread(thread)
            self._note_progress()  # what has happened since the answer was made
            self._answer(number, *answer)
            while not self._over:
                self._serve_request()
        except Exception as e:  # any error: nobody would notice the end of this thread
            self.end(said(e))
        finally:
            try:
                self._clean_up(threads)
            finally:
                self.ended.set()  # even after a failure: the next session waits for this

    def _clean_up(self, threads: list[threading.Thread]) -> None:
        self.end("the owner has failed")
        try:
            self._requests.end()  # before threads end, which may wait for tiles of the step undone here
        except BaseException:
            self._ownership.in_doubt = True
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            self._ownership.committer.background.on_progress = lambda: None

    def end(self, why: str) -> None:
        """End the session by shutting its connections down. Idempotent."""
        with self._changed:
            if self._over:
                return
            self.why, self._over = why, True
            self._changed.notify_all()
        self._session.close()
        if step := self._step:
            with step.changed:
                step.changed.notify_all()

    def _serve_request(self) -> None:
        request, arrays = self._session.control.receive_arrays(REQUEST)
        with self._changed:
            self._answering = request.n
        self._check_key()
        try:
            answer, results = self._requests.execute(request, arrays)
        except Closed:
            self._answer(request.n, Done(), [])
            self._await_end()
            return self.end(self.why)
        except CSDError as e:
            self._print_line(f"{op_of(request)} failed: {e}")
            self._answer(request.n, failed(e), [])
            if self._requests.is_broken:
                self._await_end()
                self.end("states were not written as a whole")
            return None
        except Exception as e:
            self._ownership.in_doubt = True
            self._answer(request.n, failed(e), [])
            raise CSDRankError(said(e)) from e
        self._answer(request.n, answer, results)

    def _await_end(self) -> None:
        """Wait until the trainer has the last answer and ends the connections.

        Else it might see their end before the answer.
        """
        with contextlib.suppress(ConnectionClosed):
            self._session.control.receive_arrays(REQUEST, CLOSE_SECONDS)

    def _check_key(self) -> None:
        """Raise CSDRankError between steps if the trainer's key has lost its role."""
        if self._session.revoked and self._step is None:
            raise CSDRankError("its key is no longer accepted")

    def _answer(self, number: int, answer: Answer, arrays: list[Any]) -> None:
        with self._control_lock:
            with self._changed:
                self._answering = None
            if not isinstance(answer, Failed):
                answer = msgspec.structs.replace(answer, **self._ownership.commit_fields())
            self._session.control.send_arrays(msgspec.structs.replace(answer, n=number), *arrays)

    # ---- threads -----------------------------------------------------------------------

    def _note_begun(self, step: OwnerStep | None) -> None:
        with self._changed:
            self._step = step
            self._changed.notify_all()

    def _receive(self, stream: int) -> None:
        """Receive gradients as long as the session lasts."""
        connection = self._session.up[stream]
        try:
            while True:
                message, nbytes = connection.receive(GRADIENTS, None, HEAD_BYTES)
                if message.tile % len(self._session.up) != stream:
                    refuse(f"tile {message.tile} on stream {stream}")
                step = self._step
                if step is None or message.begin < step.begin:
                    self._check_old(message, nbytes)
                    connection.discard()
                elif message.begin > step.begin:
                    refuse(f"gradients of step {message.begin}, which has not begun")
                else:
                    step.receive(connection, message, nbytes)
                    self._tell_failure(step)
        except Exception as e:  # any error: nobody would notice the end of this thread
            self.end(said(e))

    def _check_old(self, message: TileGradients, nbytes: int) -> None:
        if message.begin > self._requests.begins or nbytes > self._requests.most_bytes:
            refuse("gradients of a step that has not begun")

    def _send(self, device: int) -> None:
        """Send the parameters of a device's tiles as long as the session lasts."""
        down = self._session.down

        def send(begin: int, tile: int, views: list[memoryview]) -> None:
            down[tile % len(down)].send(Parameters(tile=tile, begin=begin), *views)

        step: OwnerStep | None = None
        try:
            while step := self._next_step(step):
                while not (step.is_over or self._over):
                    step.send_next(device, send)
                self._tell_failure(step)
        except Exception as e:  # any error: nobody would notice the end of this thread
            self.end(said(e))

    def _next_step(self, last: OwnerStep | None) -> OwnerStep | None:
        """Wait for the step after `last`, and return it; None: the session is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._step not in (None, last))
            return None if self._over else self._step

    def _tell_failure(self, step: OwnerStep) -> None:
        if step.failure:
            self._add_news(StepFailed(begin=step.begin, failed=failure_of(step.failure)))

    def _note_progress(self) -> None:
        """Send news of commits. Called on a committing thread."""
        self._add_news(CommitNews(**self._ownership.commit_fields()))

    def _add_news(self, news: Down) -> None:
        with self._changed:
            self._news.append(news)
            self._changed.notify_all()

    def _tell(self) -> None:
        """Send news, and signs of life, as long as the session lasts."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._news or self._over, self._interval)
                    if self._over:
                        return
                    news, working = [*self._news], self._answering
                    self._news.clear()
                if working is None:
                    self._check_key()
                for connection in self._session.down if not news else ():
                    connection.send(Alive())
                for item in news:
                    self._session.down[0].send(item)
                if not news and working is not None:
                    with self._control_lock:
                        if self._answering == working:
                            self._session.control.send(Working(n=working))
        except Exception as e:  # any error: nobody would notice the end of this thread
            self.end(said(e))


def failed(e: Exception) -> Failed:
    """Return the answer to a request that has failed."""
    about = failure_of(e if isinstance(e, CSDError) else CSDRankError(said(e)))
    return Failed(**msgspec.structs.asdict(about))


@contextlib.contextmanager
def _working(session: Session, number: int, interval: float, may_send: threading.Lock) -> Iterator[None]:
    """Send signs of life while a request for a session is executed, which may read all states.

    `may_send`: held elsewhere while nothing may be sent.
    """
    done = threading.Event()

    def tell() -> None:
        with contextlib.suppress(CSDError, OSError):
            while not done.wait(interval):
                with may_send:
                    session.control.send(Working(n=number))

    thread = threading.Thread(target=tell, name="csd_optim session", daemon=True)
    start_thread(thread)
    try:
        yield
    finally:
        done.set()
        thread.join()


class Owner:
    """Serves the trainers of one training at a time. A granted HELLO of another training ends the present one."""

    def __init__(self, ownership: Ownership, timeout: float, print_line: Callable[[str], None]) -> None:
        """`ownership`: for a single trainer; other trainers get their own beside it."""
        self._timeout = timeout
        self._name = secrets.token_hex(8)  # identifies the owner, whatever its address
        # Lines contain trainers' names and operations, which may be any text.
        self._print_line: Callable[[str], None] = lambda line: print_line(printable(line, LINE))
        self._parts: dict[int, Ownership] = {0: ownership}  # by trainer
        self.sessions: dict[int, OwnerSession] = {}  # by trainer
        self._asking: set[Session] = set()  # sessions whose HELLO is being granted
        self._asked: set[int] = set()  # the training's trainers that have asked for a session
        self._token = ""  # the training of the three fields above
        self._count = 0
        self._lock = threading.Lock()  # guards the six fields above, and `_closed`
        self._changing = threading.Lock()  # taken before `_lock`, and held while another training ends
        self._closed = False

    def serve(self, session: Session) -> None:
        """Serve a session to its end: for Listener. Only one session at a time uses an engine."""
        number = 0
        try:
            hello, _ = session.control.receive_arrays(HELLO, HELLO_SECONDS, HELLO_BYTES)
            number = hello.n
            may_send = threading.Lock()
            with _working(session, number, self._timeout / 4, may_send):
                own, answer, count = self._grant(session, hello, may_send)
        except Exception as e:
            self._print_line(f"a request for a session is refused: {said(e)}")
            with contextlib.suppress(CSDError, OSError):
                session.control.send(msgspec.structs.replace(failed(e), n=number))
            session.close()
            return
        begun = time.monotonic()
        own.run(answer, number)
        self._print_line(f"session {count} is over after {time.monotonic() - begun:.3g} s: {own.why}")

    def _grant(self, session: Session, hello: Hello, may_send: threading.Lock) -> tuple[OwnerSession, Granted, int]:
        if not session.peer.role.may(Role.TRAINER):
            raise CSDRankError(f"your key is accepted as {session.peer.role.value}, and may not train")
        check_hello(hello)
        if not session.up:
            refuse("it has no streams")
        if hello.mode == "overwrite" and not session.peer.role.may(Role.ADMIN):
            raise CSDRankError(
                "overwrite=True erases states, which needs the key of an admin: your key is accepted as "
                f"{session.peer.role.value}"
            )
        try:
            part = self._part_of(hello, session)
            return self._open(part, session, hello, may_send)
        finally:
            with self._lock:
                self._asking.discard(session)
                if not (self._asking or self.sessions) and hello.token == self._token:
                    self._token = ""  # nothing was granted: the previous training may continue

    def _open(
        self, part: Ownership, session: Session, hello: Hello, may_send: threading.Lock
    ) -> tuple[OwnerSession, Granted, int]:
        with part.opening:
            with self._lock:
                self._check_current(hello)
            self._end({hello.trainer}, "another session has taken over")
            if hello.mode == "new":
                part.check_new(self._asked)
            choose = partial(self._choose, part, session, hello.n, may_send)
            part.open(hello.mode, hello.tile_elems or None, bytes.fromhex(hello.store), choose)
            check_attach(hello, part)
            answer = part.welcome()
            with self._lock:
                self._check_current(hello)
                self._count += 1
                of = f" (trainer {hello.trainer} of {hello.trainers})" if hello.trainers > 1 else ""
                self._print_line(f"session {self._count}: {hello.who[:TEXT]}{of}, {hello.mode}, step {answer[0].step}")
                own = OwnerSession(part, session, self._timeout, self._print_line)
                self.sessions[hello.trainer] = own
                return own, answer, self._count

    def _check_current(self, hello: Hello) -> None:
        """Raise CSDRankError if another training has taken over. Called with `_lock` held."""
        if self._closed or hello.token != self._token:
            raise CSDRankError("another session has taken over")

    def _part_of(self, hello: Hello, session: Session) -> Ownership:
        """Return this trainer's ownership, after ending the previous training.

        Raises what Ownership.check() raises, and CSDRankError; then nothing has changed.
        """
        with self._changing:
            with self._lock:
                if self._closed:
                    raise CSDRankError("the optimizer ranks are closing")
                parts = [*self._parts.values()]
                same = parts if parts[0].trainers == hello.trainers else []
                part = next((p for p in same if p.trainer == hello.trainer), None)
                part = part or parts[0].of(hello.trainer, hello.trainers, hello.here)
                asked = {hello.trainer, *(self._asked if hello.token == self._token else ())}
                if len(asked) > hello.here:
                    refuse(f"{len(asked)} trainers of {hello.here}")
                part.check(hello.mode, hello.model)
                if not same and any(p.has_states for p in parts):  # before the training with these states is ended
                    raise CSDStoreError(
                        f"the optimizer ranks have states of {parts[0].trainers} trainers, and these are "
                        f"{hello.trainers}: start as many as before"
                    )
                check_attach(hello, part)
                ending: set[int] = set()
                if hello.token != self._token:
                    if hello.mode == "attach" and self._token:
                        raise CSDRankError("another session has taken over")
                    ending, asking, self._asking = {*self.sessions}, self._asking, set()
                    for other in asking:  # another session may be waiting for its trainer's choice
                        other.close()
                    self._token = hello.token
                self._asking.add(session)
                self._asked, part.here = asked, hello.here
                self._parts = {p.trainer: p for p in (*same, part)}
            self._end(ending, "another session has taken over")
            if not same:
                _close(parts)
            return part

    def _choose(
        self, part: Ownership, session: Session, number: int, may_send: threading.Lock, store: RanksStore
    ) -> int | None:
        """Ask the trainers, which compare their stores among themselves, for the round that all resume."""
        others = [] if store.steps else part.others_here()
        found = Found(n=number, found=summary_of(store), others=others, owner=self._name)
        with may_send:  # nothing is sent while the choice is received: see Connection
            session.control.send(found)
            choice, _ = session.control.receive_arrays(CHOOSE, None, HELLO_BYTES)  # the slowest trainer decides
        chosen: int | None = choice.round
        return chosen

    def _end(self, trainers: set[int], why: str) -> None:
        """End the sessions of these trainers, and wait for their end."""
        with self._lock:
            ending = [self.sessions.pop(k) for k in trainers & self.sessions.keys()]
        for session in ending:
            session.end(why)
        for session in ending:
            session.ended.wait()

    def close(self) -> None:
        """End all sessions, and make everything durable. Raises CSDOSError."""
        with self._lock:
            self._closed = True
            for session in self._asking:
                session.close()
        self._end({*self.sessions}, "the optimizer rank has ended")
        with self._changing:
            _close([*self._parts.values()])


def _close(parts: Sequence[Ownership]) -> None:
    """Close all engines, and make everything durable. Raises CSDOSError."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.callback(part.close_when_granted)
