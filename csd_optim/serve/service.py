"""The main loop of an owner: it waits for sessions, executes the requests of their trainers, and outlives all of them.

All owners act together. Before each operation they vote: either all of them have everything that it needs, or none
executes it. An owner that has noticed the end of the session says so in that vote. A new session ends the current one,
unless its request is refused.

Waiting for trainers happens on a thread of the session, because a gloo operation cannot be cancelled. A session that is
over leaves its thread behind until the trainers are gone; what the thread still receives is discarded (Owner.current).
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..distributed.ranks import Ranks, all_ranks_or_none
from ..errors import CSDError, CSDRankError, CSDValueError
from .answers import error_message
from .blocks import Block, Bucket
from .flow import Flow
from .owner import NotUndone, Owner, read_blocks
from .request import Group, Request, check_request, read_group, read_request
from .wire import (
    COUNTER,
    JOIN_TIMEOUT,
    LONG_TIMEOUT,
    POLL_SECONDS,
    REASON_TIMEOUT,
    Session,
    answer_key,
    gloo_group,
    lost,
    parse,
    ready_key,
    request_key,
    saved_key,
)

REPORT_SECONDS = 10.0  # seconds between two lines about progress
POLLED_AT_ONCE = 100  # number of sessions
OPS = ("open", "listen", "guess", "step", "pull", "join", "load", "state", "save", "synchronize", "close")
CONTINUE, OVER, STOP = range(3)  # votes


class _Stop(Exception):
    """An owner was asked to stop."""


@dataclass
class _Operation:
    """An operation that trainers have requested, with everything that it needs."""

    message: dict[str, Any]
    received: dict[int, torch.Tensor] = field(default_factory=dict)  # parameters
    states: list[torch.Tensor] = field(default_factory=list)
    blocks: list[list[Block]] = field(default_factory=list)  # of each trainer
    groups: list[Group] = field(default_factory=list)

    @property
    def op(self) -> str:
        return str(self.message["op"])


class Service:
    """The loop of one owner over its sessions.

    `connect` makes another client of owner 0's TCPStore. `host`: this owner's address for gloo, "" for any. `timeout`:
    seconds that a trainer may be silent within a step. `print_line` is called with each line for the terminal.
    """

    def __init__(
        self,
        owner: Owner,
        ranks: Ranks | None,
        connect: Callable[[], Any],
        *,
        host: str,
        timeout: float,
        print_line: Callable[[str], None],
    ) -> None:
        self._owner, self._ranks, self._connect = owner, ranks, connect
        self._host, self._timeout = host, timeout
        self._print_line = print_line if owner.rank == 0 else lambda _: None
        self._store = connect()
        # The owners' own keys in the store have a random prefix, so that trainers' keys cannot collide with them.
        token = secrets.token_hex(8)
        token = ranks.gather_objects(token)[0] if ranks else token
        self._current_key, self._stop_key = f"{token}/current", f"{token}/stop"
        self._last_answered = 0  # number of the last session that owner 0 has granted or refused
        self._last_polled = 0  # numbers up to this one were polled for requests, in the present round over all of them
        self._last_served = 0  # number of the last session that all owners have begun
        self._polled_at = 0.0  # time.monotonic()
        self.stopping = False  # set by a signal handler

    def run(self) -> None:
        """Serve sessions until an owner is asked to stop, then make everything durable and close the optimizer.

        Raises CSDRankError if another owner is gone, CSDOSError if the last step cannot be made durable.
        """
        with contextlib.suppress(_Stop):
            while True:
                failure: BaseException | None = None
                number = 0
                try:
                    number = self._next_session()
                except _Stop as e:
                    failure = e
                if self._vote(number, failure):
                    self._serve(number)
        self._print_line("asked to stop")
        self._owner.end_session()
        self._owner.close()

    # ---- which session ---------------------------------------------------------------------

    def _poll_session(self) -> int:
        """Return the number of the current session, which owner 0 grants. Raises _Stop if any owner is to stop."""
        self._polled_at = time.monotonic()
        with lost("the first optimizer rank is gone"):
            if self.stopping and self._ranks:
                self._store.set(self._stop_key, "1")
            # Strangers can find the key and set it, so an owner without others does not look there.
            if self.stopping or (self._ranks and self._store.check([self._stop_key])):
                raise _Stop
            if self._owner.rank == 0:
                last = self._number_at(COUNTER)
                first = max(self._last_answered, self._last_polled) + 1
                end = min(last + 1, first + POLLED_AT_ONCE)  # anybody can set the counter: poll no more before a stop
                for number in range(first, end):
                    if self._store.check([request_key(number)]):  # trainers take a number first, then set the request
                        self._grant(number)
                self._last_polled = 0 if end > last else end - 1
            return self._number_at(self._current_key)

    def _number_at(self, key: str) -> int:
        """Return the number at a key of the store that anybody can write to; 0 if there is none."""
        text = self._store.get(key) if self._store.check([key]) else b""
        return int(text) if text.isdigit() and len(text) < 19 else 0

    def _grant(self, number: int) -> None:
        self._last_answered = number
        try:
            self._owner.check(self._read_request(number))
        except CSDError as e:
            self._print_line(f"session {number} is refused: {e}")
            self._store.set(answer_key(number), json.dumps(error_message(e)))
            self._store.delete_key(request_key(number))
        else:
            self._store.set(self._current_key, str(number))

    def _read_request(self, number: int) -> Request:
        """Read the request for a session. Raises CSDRankError, CSDValueError if it is missing or malformed."""
        if not self._store.check([request_key(number)]):
            raise CSDRankError("the request of the session is gone")
        request = read_request(parse(self._store.get(request_key(number))), [*self._owner.optimizers])
        check_request(request, self._owner.optimizers[request.optimizer]._rule)
        return request

    def _next_session(self) -> int:
        while (number := self._poll_session()) == self._last_served:
            time.sleep(POLL_SECONDS)
        return number

    def _vote(self, number: int, failure: BaseException | None) -> bool:
        """Return whether all owners continue with this session. A collective.

        `failure`: why this owner does not. Raises _Stop on all owners if one is to stop, CSDRankError if one is gone.
        """
        vote = STOP if isinstance(failure, _Stop) else OVER if failure else CONTINUE
        votes = self._ranks.gather(vote, number) if self._ranks else [(vote, number)]
        if any(vote == STOP for vote, _ in votes):
            raise _Stop
        return all((vote, its_number) == (CONTINUE, votes[0][1]) for vote, its_number in votes)

    # ---- a session -------------------------------------------------------------------------

    def _serve(self, number: int) -> None:
        """Serve a session to its end, on which all owners agree."""
        self._last_served = number
        begun, steps = time.monotonic(), 0
        session: Session | None = None
        failure: BaseException | None = None
        operation: _Operation | None = None
        try:
            request = self._read_request(number)
            session = self._join(request, number)
            self._owner.begin_session(session)
        except (CSDRankError, CSDValueError, _Stop) as e:  # also if the request was changed since it was granted
            failure = e
        while self._vote(number, failure):
            assert session
            if operation is None and self._owner.rank == 0:
                self._store.delete_key(request_key(number))  # all owners have read it
            if operation:
                failure = self._execute(session, request, operation)
                if operation.op == "step":
                    steps += 1
                if operation.op == "open" or time.monotonic() - begun > REPORT_SECONDS:
                    self._report_progress(request, number, (time.monotonic() - begun) / steps if steps else 0.0)
                    begun, steps = time.monotonic(), 0
            operation = None
            if failure is None:
                try:
                    operation = self._await(self._receive_operation(session), number)
                except (CSDRankError, _Stop) as e:
                    failure = e
        why = str(failure or "another owner has lost its trainers")
        self._print_line(f"session {number} is over: {why}")
        if session:
            _run_in_thread(partial(self._close_session, session, why))
        try:
            self._owner.end_session()
        except CSDError as e:
            if self._ranks and self._ranks.lost:
                raise
            self._print_line(f"the last step is not durable yet: {e}")

    def _join(self, request: Request, number: int) -> Session:
        """Form the process group of trainers and owners. Raises CSDRankError if a member does not join, _Stop."""
        if self._owner.rank == 0:
            self._store.set(answer_key(number), json.dumps({"owners": self._owner.owners}))
        keys = [ready_key(number, trainer) for trainer in range(request.trainers)]
        until = time.monotonic() + JOIN_TIMEOUT
        while not self._store.check(keys):
            self._check_current(number)
            if time.monotonic() > until:
                raise CSDRankError("its trainers did not connect")
            time.sleep(POLL_SECONDS)

        def join() -> Session:
            rank, size = request.trainers + self._owner.rank, request.trainers + self._owner.owners
            group = gloo_group(self._connect(), f"session{number}", rank, size, self._host, self._timeout)
            return Session(group, number, request.trainers, self._owner.owners, self._timeout)

        session: Session = self._await(_run_in_thread(join), number)
        return session

    def _check_current(self, number: int) -> None:
        if self._poll_session() != number:
            raise CSDRankError("another session has taken over")
        if (arrivals := self._owner.arrivals) and arrivals.failure:
            raise CSDRankError(arrivals.failure)

    def _await(self, future: Future[Any], number: int) -> Any:
        """Return the result of a thread of the session. Raises CSDRankError if the session is over, _Stop."""
        while True:
            is_done = wait([future], POLL_SECONDS).done
            # Also if everything is done at once: else nobody could stop or supersede a training with quick steps.
            if not is_done or time.monotonic() > self._polled_at + POLL_SECONDS:
                self._check_current(number)
            if is_done:
                return future.result()

    def _receive_operation(self, session: Session) -> Future[_Operation]:
        """Receive the next message and the tensors that follow it, on a thread."""

        def receive() -> _Operation:
            operation = _Operation(session.receive_message(0, LONG_TIMEOUT))
            message, owner = operation.message, self._owner
            if message.get("op") not in OPS:
                raise CSDRankError("a message asks for an unknown operation")
            if owner.current is not session:
                raise CSDRankError("another session has taken over")
            if operation.op == "close":
                raise CSDRankError("its trainers have closed it")
            if operation.op in ("open", "join"):
                operation.groups = [read_group(group) for group in message.get("groups", ())]
                operation.blocks = [
                    read_blocks(session.receive_message(trainer)) for trainer in range(session.trainers)
                ]
            if operation.op != "open":
                operation.received, operation.states = owner.receive(session, message)
            return operation

        return _run_in_thread(receive)

    def _close_session(self, session: Session, why: str) -> None:
        """Tell the trainers that are still connected why the session is over, and close it."""
        if self._owner.rank == 0:
            for trainer in range(session.trainers):
                with contextlib.suppress(CSDError):
                    session.send_message({"over": why}, trainer, timeout=REASON_TIMEOUT)
        session.close()

    def _execute(self, session: Session, request: Request, operation: _Operation) -> BaseException | None:
        """Execute an operation after the vote. Returns why the session is over, if it is."""
        if operation.op == "step":
            return self._step(session, operation)
        if operation.op == "guess":
            return self._guess(operation)
        owner, failure = self._owner, None
        send: Callable[[], None] | None = None
        try:
            with all_ranks_or_none(self._ranks):
                owner.undo_incomplete_step()
            with all_ranks_or_none(self._ranks):
                reply, send = self._call_owner(session, request, operation)
        except Exception as e:
            reply, failure = self._failure_reply(operation.op, e)

        def answer() -> None:
            if owner.rank == 0:
                session.send_message(reply, *range(session.trainers))
            if send:
                send()

        return self._await_failure(_run_in_thread(answer), session.number) or failure

    def _failure_reply(self, op: str, e: Exception) -> tuple[dict[str, Any], Exception | None]:
        """Return the reply to a failed `op`, and why the session is over, if it is. Raises `e` if an owner is gone."""
        if self._ranks and self._ranks.lost:
            raise e
        self._print_line(f"{op} failed: {e}")
        optimizer = self._owner.optimizer
        is_mixed = optimizer is not None and optimizer._steps.undoing is not None  # trainers may have the mix, too
        if not isinstance(e, CSDError) or is_mixed:  # only the store can be trusted
            self._owner.in_doubt = True
        continues = isinstance(e, CSDError) and not isinstance(e, NotUndone) and op != "open" and not is_mixed
        return error_message(e), None if continues else e

    def _step(self, session: Session, operation: _Operation) -> BaseException | None:
        """Make a step: see flow.py. Returns why the session is over, if it is."""
        owner, message = self._owner, operation.message
        # All transfers of a step complete even if the step fails, so that no process waits for them in vain.
        receiving = _run_in_thread(lambda: owner.receive_gradients(session, message))
        begun = Future[Flow | None]()  # set when the step has begun; None if it failed before
        sending = _run_in_thread(lambda: owner.send(session, message["params"], partial(_await_params, begun)))
        failure: BaseException | None = None
        reply: dict[str, Any] = {}
        try:
            owner.begin_step(message, operation.received)
            begun.set_result(owner.flow)
            with owner.timing_transfers():
                failure = self._await_failure(receiving, session.number)
            with all_ranks_or_none(self._ranks):
                if failure:
                    raise failure
            reply = owner.end_step(message)
        except Exception as e:
            if e is not failure:
                reply, failure = self._failure_reply(operation.op, e)
        finally:
            failure = self._undo_step() or failure
            if not begun.done():
                begun.set_result(None)

        def answer() -> None:
            receiving.result()
            sending.result()
            if owner.rank == 0:
                session.send_message(reply, *range(session.trainers))

        with owner.timing_transfers():
            return failure or self._await_failure(_run_in_thread(answer), session.number)

    def _guess(self, operation: _Operation) -> BaseException | None:
        """Begin an announced step. Trainers get no reply; if it fails, the real step is made from scratch.

        Returns why the session is over, if it is.
        """
        try:
            self._owner.guess(operation.message)
        except Exception as e:
            not_undone = self._undo_step()
            failure = self._failure_reply(operation.op, e)[1]
            return not_undone or failure
        return None

    def _undo_step(self) -> NotUndone | None:
        """Undo a step that is not complete. Returns the error if that fails; the session is over then."""
        try:
            self._owner.undo_incomplete_step()
        except NotUndone as e:
            return e
        return None

    def _await_failure(self, future: Future[Any], number: int) -> BaseException | None:
        """Wait for a thread of the session. Returns why the session is over, if it is."""
        try:
            self._await(future, number)
        except (CSDRankError, _Stop) as e:
            return e
        return None

    def _call_owner(
        self, session: Session, request: Request, operation: _Operation
    ) -> tuple[dict[str, Any], Callable[[], None] | None]:
        """Execute an operation other than a step. Returns the reply, and a function that sends the tensors after it."""
        owner, message = self._owner, operation.message
        if operation.op == "open":
            return owner.open(request, operation.blocks), None
        if operation.op == "join":
            owner.join(operation.groups, operation.blocks)
        elif operation.op == "listen":
            owner.listen(session)
        elif operation.op == "pull":
            return {}, lambda: owner.send(session, message["params"])
        elif operation.op == "state":
            state_list, tensors = owner.states()
            return {"states": state_list}, lambda: owner.send_states(session, message["to"], tensors, state_list)
        elif operation.op == "load":
            owner.load(message, operation.received, operation.states)
        elif operation.op == "save":
            saving = owner.optimizer.save(message["path"], wait=message["wait"])
            key = saved_key(session.number, message["snapshot"], owner.rank)
            saving.add_done_callback(partial(self._publish_saved, key))
        else:
            owner.optimizer.synchronize()
        return {"committed_step": owner.optimizer.committed_step}, None

    def _publish_saved(self, key: str, saving: Future[Any]) -> None:
        """Publish the outcome of a snapshot in the TCPStore, where trainers poll for it. Called on any thread."""
        failure = saving.exception()
        with contextlib.suppress(RuntimeError):  # owner 0, which hosts the store, is gone
            self._store.set(key, json.dumps(error_message(failure) if failure else {}))

    def _report_progress(self, request: Request, number: int, seconds: float) -> None:
        opt = self._owner.optimizer
        if opt is None:
            return
        if seconds:
            return self._print_line(
                f"session {number}: step {opt.committed_step} is durable, {seconds:.3g} s from one to the next"
            )
        elements = sum(math.prod(p.shape) for p in request.params)
        self._print_line(
            f"session {number}: {request.trainers} trainer{'s' * (request.trainers > 1)} ({request.who}), "
            f"{request.optimizer}, {elements} elements in {len(request.params)} parameters, step {opt.committed_step}"
        )


def _await_params(begun: Future[Flow | None], bucket: Bucket) -> None:
    """Wait until a bucket of a step's parameters can be sent."""
    if flow := begun.result():
        flow.await_params(bucket)


def _run_in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Run `function` on a daemon thread. Any exception becomes a CSDRankError: a malformed message ends the session."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as e:  # a new exception: the traceback of `e` would keep frames and open connections alive
            future.set_exception(CSDRankError(str(e) if isinstance(e, CSDRankError) else f"{type(e).__name__}: {e}"))

    threading.Thread(target=run, daemon=True, name="csd_optim session").start()
    return future
