"""RemoteEngine: a trainer's counterpart of the engine of devices when the states are with owners."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..engine.open_devices import OpenDevices
from ..engine.states import States
from ..errors import CSDBusyError, CSDError, CSDRankError, CSDRuntimeError, CSDValueError, CSDWarning
from ..errors import users_stacklevel as stacklevel
from ..signals import interruptible
from .answers import MAX_COUNT, number_in, owners_in, raise_if_error, raise_if_over
from .blocks import Block, Bucket, Part, ViewOf, buckets_with_owner, receive_buckets, send_buckets
from .early import EarlyPushes
from .request import Request
from .wire import (
    CONNECT_TIMEOUT,
    COUNTER,
    END_TIMEOUT,
    LONG_TIMEOUT,
    POLL_SECONDS,
    REASON_TIMEOUT,
    REQUEST_BYTES,
    Address,
    Lost,
    Session,
    answer_key,
    connect,
    gloo_group,
    is_loopback,
    lost,
    parse,
    ready_key,
    request_key,
    saved_key,
)

_addresses_in_use: set[tuple[str, int]] = set()  # to which optimizers of this process are connected


class RemoteEngine(Engine):
    """An engine without devices. All methods except `close()` are collectives of the trainers.

    The constructor raises CSDUnavailableError if no owner answers, CSDBusyError if another optimizer of this process
    uses the same owners, CSDRankError, and the owners' own error if they refuse the request.
    """

    def __init__(self, address: Address, ranks: Ranks | None, request: Request) -> None:
        self._no_devices = OpenDevices([])
        super().__init__(States(self._no_devices))
        self.address: Address = address
        self._ranks = ranks
        self._session: Session | None = None
        self._snapshots = 0  # number of snapshots requested
        self.early: EarlyPushes | None = None  # set once gradients leave in backward
        self._announced: list[Any] = []  # sends of the last announced step that are in flight
        place = address.host, address.port
        with all_ranks_or_none(ranks):
            if place in _addresses_in_use:
                raise CSDBusyError(
                    16,
                    f"another optimizer of this process has its states at {address}: each takes owners of its own, "
                    "`csd-optim serve` on another port",
                )
        _addresses_in_use.add(place)
        try:
            self._join_session(request)
        except BaseException:
            self.abandon()
            raise

    # ---- what the optimizer asks any engine ----------------------------------------

    @property
    def durable(self) -> bool:
        return True

    @property
    def closed(self) -> bool:
        return self._session is None

    @property
    def idle(self) -> bool:
        return True

    def wait(self) -> None:
        self.call({"op": "synchronize"})

    def abandon(self) -> None:
        """Drop the session without a message. The owners notice when the connection ends."""
        _addresses_in_use.discard((self.address.host, self.address.port))
        session, early = self._session, self.early
        self._session = self.early = None
        if session and early:
            session.abort()  # cancels gradients that are still leaving
        if session:
            session.close()
        if early:
            early.stop(REASON_TIMEOUT)

    def close(self) -> None:
        """End the session without waiting; the owners then make everything durable. Not a collective."""
        session = self._session
        if session is None or self.pid != os.getpid():
            return
        if self.is_leader:
            with contextlib.suppress(CSDError):
                session.send_message(
                    {"op": "close"}, *map(session.owner, range(session.owners)), timeout=REASON_TIMEOUT
                )
        self.abandon()

    # ---- a session -------------------------------------------------------------------

    @property
    def owners(self) -> int:
        """Number of owners."""
        assert self._session
        return self._session.owners

    @property
    def is_leader(self) -> bool:
        """Whether this is trainer 0, which sends the messages on behalf of all trainers."""
        return self._ranks is None or self._ranks.rank == 0

    def _join_session(self, request: Request) -> None:
        address, ranks = self.address, self._ranks
        rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
        number = owners = 0
        with all_ranks_or_none(ranks):
            store = connect(address.host, address.port, min(address.timeout, CONNECT_TIMEOUT))
            store.set_timeout(timedelta(seconds=address.timeout))
            if rank == 0:
                number, owners = self._request_session(store, request)
        if ranks:
            number, owners = ranks.gather(number, owners)[0]
        with all_ranks_or_none(ranks):
            store.set(ready_key(number, rank), "1")
            loopback = "::1" if ":" in address.host else "127.0.0.1"
            host = loopback if is_loopback(address.host) else ""
            group = gloo_group(store, f"session{number}", rank, size + owners, host, address.timeout)
        self._session = Session(group, number, size, owners, address.timeout)

    def _request_session(self, store: Any, request: Request) -> tuple[int, int]:
        """Request a session. Returns its number and the number of owners; raises the owners' error if they refuse."""
        data = json.dumps(request.message())
        if len(data) > REQUEST_BYTES:
            raise CSDValueError(f"the description of the model has {len(data)} bytes; {REQUEST_BYTES} are the limit")
        try:
            number = store.add(COUNTER, 1)
            store.set(request_key(number), data)
            answer = parse(store.get(answer_key(number)))
        except RuntimeError as e:
            if isinstance(e, CSDError):
                raise
            raise CSDRankError(f"the optimizer ranks at {self.address} have not answered: {e}") from e
        return number, owners_in(answer)

    def call(
        self,
        message: dict[str, Any],
        *,
        blocks: Sequence[Block] | None = None,
        sends: Sequence[tuple[Sequence[Part], ViewOf]] = (),
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Have the owners execute an operation, and return their reply.

        `timeout`: seconds to wait for it. `blocks`: this trainer's blocks of new parameters, in order. `sends`:
        tensors that this trainer sends after the message. Raises the owners' error if they fail, and then nothing has
        changed; CSDRankError if the session is over.
        """
        self.check_open()
        with self.exchange() as session:
            everybody = [session.owner(k) for k in range(session.owners)]
            if self.is_leader:
                session.send_message(message, *everybody)
            if blocks is not None:
                session.send_message({"blocks": blocks}, *everybody)
            for parts, view_of in sends:
                send_buckets(session, self.buckets_with_owners(parts), view_of)
            reply = raise_if_over(session.receive_message(session.owner(0), timeout))
        return self._apply_reply(reply)

    def _apply_reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        raise_if_error(reply)
        notes = reply.get("warnings")
        for text in notes if self.is_leader and isinstance(notes, list) else ():
            warnings.warn(str(text), CSDWarning, stacklevel())
        self.states.committed_step = number_in(reply, "committed_step", 0, MAX_COUNT, self.states.committed_step)
        return reply

    def announce(self, message: dict[str, Any]) -> None:
        """Send the owners a guess of the next step (trainer 0 only), without waiting. They do not reply."""
        session = self._session
        if session and self.is_leader:
            with contextlib.suppress(CSDRankError):  # the step will raise it
                self._wait_announced(session)
                owners = (session.owner(k) for k in range(session.owners))
                self._announced = session.begin_send_message(message, *owners)

    def _wait_announced(self, session: Session) -> None:
        while self._announced:
            session.wait(self._announced.pop())

    def make_step(
        self,
        message: dict[str, Any],
        send: Callable[[Session], None],
        sources: Mapping[int, list[Bucket]],
        view_of: ViewOf,
        arrived: Callable[[int, Bucket], None],
    ) -> dict[str, Any]:
        """Have the owners make a step, and return their reply: see flow.py.

        `send` sends the step's tensors, on a thread of its own. At the same time parameters are received, also if the
        step fails; `sources`, `view_of` and `arrived` are as for receive_buckets(). Raises as call() does.
        """
        self.check_open()
        with self.exchange() as session:
            self._wait_announced(session)
            if self.is_leader:
                session.send_message(message, *(session.owner(k) for k in range(session.owners)))
            replying = _BackgroundCall(
                session, lambda: raise_if_over(session.receive_message(session.owner(0), LONG_TIMEOUT))
            )
            sending = _BackgroundCall(session, lambda: send(session))
            try:
                receive_buckets(session, sources, view_of, arrived=arrived)
                sending.result()
                reply: dict[str, Any] = replying.result(session.timeout)
            except Lost as e:
                replying.join(REASON_TIMEOUT)
                for failure in (replying.failure, sending.failure):
                    if failure and not isinstance(failure, Lost):
                        raise failure from e
                raise
            finally:
                if replying.failure or sending.failure or not (replying.is_done and sending.is_done):
                    session.abort()
                    # Gradients must not be written to while they are sent. And if the program ends while a thread
                    # waits in gloo, the interpreter ends the thread there, and that ends the process with SIGABRT.
                    sending.end(END_TIMEOUT)
                    replying.end(END_TIMEOUT)
        return self._apply_reply(reply)

    def save(self, path: Path, *, wait: bool) -> Future[Path]:
        """Have the owners make a snapshot. Returns a future of its path on their machines."""
        session, saved = self._session, Future[Path]()
        self._snapshots += 1
        self.call({"op": "save", "path": str(path), "wait": wait, "snapshot": self._snapshots}, timeout=LONG_TIMEOUT)
        assert session is not None
        if wait:
            saved.set_result(path)
            return saved
        keys = [saved_key(session.number, self._snapshots, k) for k in range(session.owners)]

        def watch() -> None:
            try:
                store = connect(self.address.host, self.address.port, CONNECT_TIMEOUT)
                with lost("the optimizer ranks are gone"):
                    while not store.check(keys):
                        time.sleep(POLL_SECONDS)
                    replies = [parse(store.get(key)) for key in keys]
                for reply in replies:
                    raise_if_error(reply)
                saved.set_result(path)
            except Exception as e:
                saved.set_exception(e)

        threading.Thread(target=watch, daemon=True, name="csd_optim save").start()
        return saved

    def fetch(
        self,
        sources: Mapping[int, list[Bucket]],
        view_of: ViewOf,
        arrived: Callable[[int, Bucket], None] = lambda _, __: None,
    ) -> None:
        """Receive the tensors that follow a reply; arguments as for receive_buckets()."""
        with self.exchange() as session:
            receive_buckets(session, sources, view_of, arrived=arrived)

    def begin_early(self, nbytes: int, *, star: bool) -> None:
        """Let gradients (`nbytes` in total) leave in backward from now on. The owners must listen for them already."""
        assert self._session
        self.early = EarlyPushes(self._session, self._ranks, nbytes, star=star)

    def buckets_with_owners(self, parts: Sequence[Part]) -> dict[int, list[Bucket]]:
        """Return the buckets that travel between this trainer and each owner, by the owner's rank."""
        self.check_open()
        session = self._session
        assert session
        return {session.owner(k): buckets_with_owner(parts, session.owners, k) for k in range(session.owners)}

    @contextlib.contextmanager
    def exchange(self) -> Iterator[Session]:
        """Use the session. Any exception inside ends it, because it is unknown how much was already sent."""
        session = self._session
        assert session is not None
        try:
            with interruptible(session.abort):
                yield session
        except CSDValueError:  # the message is too long; nothing was sent
            raise
        except CSDRankError as e:
            self._raise_session_over(e)
        except BaseException:  # Ctrl-C, say
            session.abort()
            self.abandon()
            raise

    def _raise_session_over(self, e: CSDRankError) -> Any:
        self.abandon()
        raise CSDRankError(
            f"the session with the optimizer ranks at {self.address} is over: {e}. They keep what was committed: start "
            "the training again with resume=True; if `csd-optim serve` has ended, start that first"
        ) from e

    def check_open(self) -> None:
        if self.closed:
            raise CSDRuntimeError("this optimizer is closed, or its session with the optimizer ranks is over")
        self._no_devices.check_process()


class _BackgroundCall:
    """A function that runs on a thread of its own. If it fails, it ends the session for the calling thread, too."""

    def __init__(self, session: Session, work: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()

        def run() -> None:
            try:
                self._future.set_result(work())
            except BaseException as e:
                self._future.set_exception(e)
                session.abort()

        self._thread = threading.Thread(target=run, daemon=True, name="csd_optim step")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    @property
    def failure(self) -> BaseException | None:
        """The exception of the function; None while it runs or if it has succeeded."""
        return self._future.exception() if self.is_done else None

    def join(self, timeout: float | None) -> None:
        """Wait until the function has ended, or `timeout` seconds have passed."""
        wait([self._future], timeout)

    def end(self, timeout: float) -> None:
        """Wait until the thread has ended, too, which may still end the session after the function has failed."""
        self._thread.join(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result. Raises the function's exception, CSDRankError after `timeout` seconds."""
        self.join(timeout)
        if not self.is_done:
            raise CSDRankError(f"the optimizer ranks have not answered: Timed out after {timeout:g} s")
        return self._future.result()
