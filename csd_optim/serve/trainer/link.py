"""A trainer's link to an owner: requests and their answers, and frames on threads of their own.

The next request takes a lost link up again, if owner and trainer are at the same step: see attach().
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import CSDError, CSDRankError, CSDRuntimeError
from ...threads import SharedCondition
from ..messages import raise_failure, refuse, said
from ..requests import (
    ANSWER,
    DOWN,
    HEAD_BYTES,
    CommitNews,
    Down,
    Failed,
    Found,
    Parameters,
    Request,
    StepFailed,
    TileGradients,
    Working,
    request_of,
)
from ..wire.connection import Connection
from ..wire.schema import msgspec
from ..wire.session import Session
from .tiles_in_flight import TilesInFlight

Views = list[memoryview]
# Before these a worn link is replaced, unless the owner's session has something that would be lost: in brackets, from
# the first of these on to the second.
RENEWS = ("write", "begin", "read", "writing", "loading")
HOLDS = {"write": True, "begin": True, "writing": True, "loading": True, "save": True}
HOLDS |= {"finish": False, "written": False, "loaded": False, "saved": False}


class Reply(NamedTuple):
    """An answer."""

    fields: Any  # a struct of requests.py: the one that belongs to the request
    arrays: list[memoryview]


class Travelling(NamedTuple):
    """How the tiles of a step are sent and received."""

    tiles: TilesInFlight
    outgoing: Callable[[int], tuple[Views, int]]  # tile → buffers to send, words of entries in them
    returning: Callable[[int], Views]  # tile → memory for its new parameters


class Link:
    """The link of one trainer to one owner. Any thread may send a request, one at a time."""

    def __init__(
        self,
        connect: Callable[[], Session],
        hello: Mapping[str, Any],
        streams: int,
        timeout: float,
        changed: SharedCondition | None = None,
    ) -> None:
        """`hello`: the fields of each HELLO. `timeout`: the link is lost after so many seconds without a sign of life.

        `changed`: shared with the trainer's other links; None if this is the only one.
        """
        self._connect, self._timeout = connect, timeout
        self._hello = hello
        self.pid: int = os.getpid()
        self.changed: SharedCondition = changed or SharedCondition()
        self.may_leave: list[threading.Condition] = [self.changed.condition() for _ in range(streams)]
        self.committed_step: int = 0
        self._commits = (0, 0)  # numbers of commits at the owner: begun, and ended
        self.on_committed: Callable[[], None] = lambda: None  # called on any thread after news of commits
        # To take the link up again: a function that returns the fields of a HELLO, and one that takes the answer. Set
        # once the states are known.
        self.reattach: tuple[Callable[[], dict[str, Any]], Callable[[Reply], None]] | None = None
        self._session: Session | None = None
        self._asking: Session | None = None  # a session that was asked for, and is not granted yet
        self._threads: list[threading.Thread] = []
        self._travelling: Travelling | None = None
        self._lock = threading.RLock()  # held for a request and its answer
        self._requests = 0
        self._why_lost: CSDError | None = None
        self._closed = False
        self._given_up = False  # after Ctrl-C: do not take the link up again
        self._holds = False  # the owner's session has a part of a step, of writes, or of a snapshot

    # ---- open and close ------------------------------------------------------------

    def open(self, **fields: Any) -> Reply:
        """Connect, and ask for a session.

        Raises the error that the owner answers, or CSDUnavailableError if no owner does.

        If the answer is Found, several trainers resume: call choose() next.
        """
        with self._lock:
            self._drop(None)
            self._asking = self._connect()
            with self._closing() as session:
                answer = self._exchange(session, request_of("hello", {**self._hello, **fields}), [])
                if not isinstance(answer.fields, Found):
                    self._begin(session, answer)
                return answer

    def choose(self, round: int | None) -> None:
        """Have the owner resume this round, which all ranks have; None: no round. Call granted() next."""
        with self._lock, self._closing() as session:
            self._say(session, request_of("choose", {"round": round}), [], anew=False)

    def granted(self) -> Reply:
        """Return the answer to choose(). Raises the error that the owner answers."""
        with self._lock, self._closing() as session:
            answer = self._hear(session, request_of("choose", {"round": None}))
            self._begin(session, answer)
            return answer

    @contextlib.contextmanager
    def _closing(self) -> Iterator[Session]:
        """Yield the session that is not granted yet; close the session if the body raises."""
        assert self._asking
        try:
            yield self._asking
        except BaseException:
            self.stop_asking()
            raise

    def stop_asking(self) -> None:
        """Close a session that is not granted yet; any thread may do so."""
        session, self._asking = self._asking, None
        if session is not None:
            session.close()

    def _begin(self, session: Session, answer: Reply) -> None:
        """Begin a session that was granted."""
        self._session, self._asking, self._why_lost, self._holds = session, None, None, False
        self.committed_step, self._commits = 0, (0, 0)
        self.note_committed(answer.fields)
        for stream, (up, down) in enumerate(zip(session.up, session.down, strict=True)):
            for work, connection in ((self._receive, down), (self._send, up)):
                thread = threading.Thread(target=work, args=(session, connection, stream), daemon=True)
                thread.name = f"csd_optim {work.__name__.strip('_')}s {stream}"
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """End the connections and their threads. Idempotent; a no-op in a forked child, which has no threads."""
        if self.pid == os.getpid():
            self._closed = True
            with self._lock:
                self._drop(CSDRuntimeError("this optimizer is closed"))

    def _drop(self, why: CSDError | None) -> None:
        """Close the session, and return when its threads have ended."""
        session, self._session = self._session, None
        self.stop_asking()
        if session is not None:
            if why:
                self._lost(session, why)
            session.close()
        threads, self._threads = self._threads, []
        self._notify_all()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _lost(self, session: Session, why: CSDError) -> None:
        """End a session on any thread. `why`: the error that requests and tiles then raise."""
        with self.changed:
            if self._why_lost is None:
                self._why_lost = why
            travelling = self._travelling
            self._notify_all()
        if travelling:
            travelling.tiles.fail(why)
        session.close()

    def _notify_all(self) -> None:
        with self.changed:
            for condition in (self.changed, *self.may_leave):
                condition.notify_all()

    def lose(self, why: CSDError) -> None:
        """Give up the session: the next request asks for another one."""
        with self._lock:
            if self._session:
                self._lost(self._session, why)

    def give_up(self) -> None:
        """Give up the session until go_on(), as the owner is silent after Ctrl-C."""
        self._given_up = True
        if session := self._session:
            self._lost(session, CSDRankError("the optimizer ranks were silent, and Ctrl-C has ended the wait"))

    def go_on(self) -> None:
        """Let requests take the link up again."""
        self._given_up = False

    @property
    def is_lost(self) -> bool:
        return self._session is None or self._why_lost is not None

    def attach(self) -> None:
        """Take the link up again if it is lost. Raises CSDRankError or CSDUnavailableError if that is impossible."""
        with self._lock:
            if self._closed:
                raise CSDRuntimeError("this optimizer is closed")
            if not self.is_lost:
                return
            if self.reattach is None or self._given_up:
                raise self._why_lost or CSDRankError("there is no session")
            fields, take = self.reattach
            answer = self.open(mode="attach", **fields())
            if isinstance(answer.fields, Found):
                refuse("a choice between steps")
            try:
                take(answer)
            except BaseException:
                if self._closed:
                    self._drop(None)
                raise

    # ---- requests ------------------------------------------------------------------

    def request(self, op: str, *arrays: Any, **fields: Any) -> Reply:
        """Send a request and return its answer. Raises the owner's error; CSDRankError if the link is lost."""
        if self.pid != os.getpid():
            raise CSDRuntimeError("the link to the optimizer ranks belongs to another process")
        with self._lock:
            self.attach()
            assert self._session
            if op in RENEWS and not self._holds and self._session.is_worn and self.reattach:
                self._renew()
            self._holds = HOLDS.get(op, self._holds)
            return self._exchange(self._session, request_of(op, fields), [*arrays])

    def _renew(self) -> None:
        """Replace a worn link. Nothing is under way: a step that begins has sent nothing yet."""
        travelling = self._travelling
        self.travel(None)  # the end of the old connections is no failure of its tiles
        self._drop(None)
        self.attach()
        self.travel(travelling)

    def _exchange(self, session: Session, request: Request, arrays: list[Any]) -> Reply:
        self._say(session, request, arrays)
        return self._hear(session, request)

    def _say(self, session: Session, request: Request, arrays: list[Any], *, anew: bool = True) -> None:
        """Send a request: a new one, or (unless `anew`) more of the last one."""
        self._requests += anew
        with self._losing(session):
            session.control.send_arrays(msgspec.structs.replace(request, n=self._requests), *arrays)

    def _hear(self, session: Session, request: Request) -> Reply:
        """Return the answer to the last request. Raises the owner's error."""
        with self._losing(session):
            while True:
                answer, arrays = session.control.receive_arrays(ANSWER, self._timeout)
                if answer.n != self._requests:
                    refuse("the answer to another request")
                if not isinstance(answer, Working):
                    break
            if not isinstance(answer, (*request.answer, Failed)):
                refuse(f"{type(answer).__name__} is no answer to this request")
        if isinstance(answer, Failed):
            raise_failure(answer)
        return Reply(answer, arrays)

    @contextlib.contextmanager
    def _losing(self, session: Session) -> Iterator[None]:
        """Give up the session if the body raises, even an interrupt: a late answer could be taken for the next one."""
        try:
            yield
        except BaseException as e:
            lost = e if isinstance(e, CSDRankError) else CSDRankError(f"the optimizer ranks are gone: {said(e)}")
            self._lost(session, lost)
            if isinstance(e, (CSDRankError, OSError)):
                raise lost from e
            raise

    def note_committed(self, fields: Any) -> None:
        """Take note of the committed step in an answer or news. News may come before an older answer is read."""
        committed, begun, ended = fields.committed, fields.begun_commits, fields.ended_commits
        with self.changed:
            if ended > self._commits[1]:
                self.committed_step = committed  # may be lower, after a load of an earlier step's state dict
            elif ended == self._commits[1]:
                self.committed_step = max(committed, self.committed_step)
            self._commits = max(begun, self._commits[0]), max(ended, self._commits[1])
            self.on_committed()
            self.changed.notify_all()

    @property
    def commits_at_rest(self) -> bool:
        """Whether no commit is known to be under way at the owner."""
        begun, ended = self._commits
        return begun == ended

    # ---- tiles ---------------------------------------------------------------------

    def travel(self, travelling: Travelling | None) -> None:
        """Begin to send and receive the tiles of a step; None when the step is over."""
        with self.changed:
            self._travelling = travelling
            lost = self._why_lost
        if travelling and lost:
            travelling.tiles.fail(lost)

    def _send(self, session: Session, connection: Connection, stream: int) -> None:
        """Send tiles as long as the session lasts; on a thread."""
        found: tuple[Travelling, int] | None = None

        def find() -> bool:
            nonlocal found
            travelling = self._travelling
            tile = travelling.tiles.next_to_leave(stream) if travelling else None
            found = (travelling, tile) if travelling and tile is not None else None
            return found is not None or self._session is not session or self._why_lost is not None

        while True:
            with self.changed:
                self.may_leave[stream].wait_for(find)
            if found is None:
                return
            travelling, tile = found
            try:
                views, words = travelling.outgoing(tile)
                connection.send(TileGradients(tile=tile, begin=travelling.tiles.begin, entries=words), *views)
            except Exception as e:  # any error: nobody would notice the end of this thread
                travelling.tiles.abort_transfer()
                return self._lost(session, _as_rank_error(e))
            travelling.tiles.note_sent(tile)

    def _receive(self, session: Session, connection: Connection, stream: int) -> None:
        """Receive parameters and news as long as the session lasts; on a thread."""
        try:
            while True:
                message, nbytes = connection.receive(DOWN, self._timeout, HEAD_BYTES)
                if isinstance(message, Parameters):
                    self._take_params(connection, message, nbytes)
                elif nbytes:
                    refuse(f"{nbytes} bytes after news")
                else:
                    self._take_news(message)
        except Exception as e:
            self._lost(session, _as_rank_error(e))

    def _take_params(self, connection: Connection, message: Parameters, nbytes: int) -> None:
        travelling, tile = self._travelling, message.tile
        if travelling is None or message.begin != travelling.tiles.begin or not travelling.tiles.begin_return(tile):
            return connection.discard()  # for a step that is over
        try:
            views = travelling.returning(tile)
            if nbytes != sum(map(len, views)):
                refuse(f"{nbytes} bytes of parameters in tile {tile}")
            connection.fill(views)
        except BaseException:
            travelling.tiles.abort_transfer()
            raise
        travelling.tiles.note_back(tile)

    def _take_news(self, news: Down) -> None:
        if isinstance(news, CommitNews):
            self.note_committed(news)
        if isinstance(news, StepFailed):
            travelling = self._travelling
            if travelling and travelling.tiles.begin == news.begin:
                try:
                    raise_failure(news.failed)
                except CSDError as e:
                    travelling.tiles.fail(e)


def _as_rank_error(e: Exception) -> CSDRankError:
    return e if isinstance(e, CSDRankError) else CSDRankError(f"the optimizer ranks are gone: {said(e)}")
