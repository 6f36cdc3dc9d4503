"""Tracks which gradients have arrived at an owner, and receives those that trainers push before they request a step.

Gradients of one trainer arrive in the order in which it sends them, so those of a later backward overwrite earlier ones
that no step has used. A step names the backward of each gradient, and waits until all trainers' parts of exactly that
backward have arrived.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..distributed.buckets import IN_FLIGHT
from ..errors import CSDRankError
from .blocks import Block, Bucket, IncomingBucket, Part, begin_receive, buckets_with_owner
from .values import dtype_named
from .wire import LONG_TIMEOUT, PUSH, PUSHED, Session

if TYPE_CHECKING:
    from .owner import Owner


SENT_IN_STEP = 0  # in place of a backward's number: the gradient was sent after the step's message


class Arrival(NamedTuple):
    """A block of a gradient that has arrived from a trainer."""

    param: int  # the parameter's number
    backward: int
    block: Block
    dtype: torch.dtype  # on the wire


class _Push(NamedTuple):
    """A bucket that is being received, and the function that copies it to its place."""

    incoming: IncomingBucket
    finish: Callable[[IncomingBucket], None]


class Arrivals:
    """The gradients that have arrived in one session.

    `listen()` starts two threads per trainer; they end when the trainer disconnects or the session ends.
    """

    def __init__(self, owner: Owner, session: Session) -> None:
        self._owner, self._session = owner, session
        # [trainer][parameter]: the blocks that have arrived of the latest backward, and (backward, number of elements).
        self._arrived: list[dict[int, list[Arrival]]] = [{} for _ in range(session.trainers)]
        self._elements: list[dict[int, tuple[int, int]]] = [{} for _ in range(session.trainers)]
        # Strings, not exceptions: a traceback would keep frames, and with them open connections, alive.
        self.failure: str = ""  # why the session cannot go on: invalid data has arrived
        self._disconnected: dict[int, str] = {}  # trainers that have disconnected, and why
        self._dropped: dict[int, int] = {}  # by parameter: gradients of backwards up to this one are discarded
        self.is_listening: bool = False  # listen() was called

    def listen(self) -> None:
        """Accept gradients before their step from now on. Idempotent."""
        for trainer in range(self._session.trainers) if not self.is_listening else ():
            pushes: queue.SimpleQueue[_Push | str] = queue.SimpleQueue()  # the last item: why the trainer is gone
            in_flight = threading.Semaphore(IN_FLIGHT)
            for work in (self._receive_announcements, self._finish_pushes):
                arguments = trainer, pushes, in_flight
                threading.Thread(target=work, args=arguments, daemon=True, name="csd_optim arrivals").start()
        self.is_listening = True

    def _receive_announcements(
        self, trainer: int, pushes: queue.SimpleQueue[_Push | str], in_flight: threading.Semaphore
    ) -> None:
        """Read the announcements of pushes, and begin to receive the next ones while earlier ones still arrive."""
        session, why = self._session, ""
        try:
            while not why:
                message = session.receive_message(trainer, LONG_TIMEOUT, tag=PUSH)
                try:
                    for finish, bucket in self._buckets_of_push(trainer, message):
                        in_flight.acquire()
                        pushes.put(_Push(begin_receive(session, trainer, bucket, PUSHED), finish))
                except Exception as e:
                    why = f"what trainer {trainer} has pushed: {e}"
                    self._fail(why)
        except CSDRankError as e:
            why = str(e)
        pushes.put(why)

    def _finish_pushes(
        self, trainer: int, pushes: queue.SimpleQueue[_Push | str], in_flight: threading.Semaphore
    ) -> None:
        while not isinstance(push := pushes.get(), str):
            try:
                push.finish(push.incoming)
            except Exception as e:
                self._fail(f"what trainer {trainer} has pushed: {e}")
            in_flight.release()
            del push  # frees its buffer, also while waiting for the next one
        # A disconnect alone does not end the session: the trainer may have sent all that a step needs.
        with self._owner.changed:
            self._disconnected[trainer] = push
            self._owner.changed.notify_all()

    def _fail(self, why: str) -> None:
        with self._owner.changed:
            self.failure = self.failure or why
            self._owner.changed.notify_all()

    def _buckets_of_push(
        self, trainer: int, message: dict[str, Any]
    ) -> Iterator[tuple[Callable[[IncomingBucket], None], Bucket]]:
        """Return the buckets of a push, each with the function that copies it to its place."""
        owner, session = self._owner, self._session
        backward, parts = self._parse_announcement(message)

        def is_dropped(index: int) -> bool:
            return backward <= self._dropped.get(index, 0)

        with owner.while_current(session):
            wanted = [part for part in parts if not is_dropped(part.key)]
            if message.get("apart"):
                into = owner.summand_buffers(session, trainer, {part.key: part.dtype for part in wanted})
            else:
                into = owner.grad_buffers(session, [part.key for part in wanted])
        in_place = owner.views(into, {part.key: part.shape for part in parts})

        def view_of(key: int, block: Block) -> torch.Tensor:
            return torch.empty(block.sizes, device="meta") if is_dropped(key) else in_place(key, block)

        def arrived(_: int, bucket: Bucket) -> None:
            for piece in bucket:
                if not is_dropped(piece.key):
                    self.record(trainer, Arrival(piece.key, backward, piece.block, piece.dtype))

        def finish(incoming: IncomingBucket) -> None:
            incoming.finish(session, view_of, lambda: owner.while_current(session), arrived)

        return ((finish, bucket) for bucket in buckets_with_owner(parts, owner.owners, owner.rank, target_buckets=1))

    def record(self, trainer: int, arrival: Arrival) -> None:
        """Record that this block has arrived and is in its place. The caller holds `changed`."""
        earlier, elements = self._arrived[trainer].setdefault(arrival.param, []), self._elements[trainer]
        if earlier and earlier[0].backward != arrival.backward:
            earlier.clear()
        before = elements[arrival.param][1] if earlier else 0
        earlier.append(arrival)
        elements[arrival.param] = arrival.backward, before + arrival.block.numel
        if self._owner.flow:
            self._owner.flow.record_arrival(arrival)
        self._owner.changed.notify_all()

    def discard(self, indices: Sequence[int], backward: int) -> None:
        """Discard gradients of these parameters from backwards up to this one, also those that have yet to arrive.

        Their gradients follow a step's message, and a late push must not overwrite them. The caller holds `changed`.
        """
        self._dropped |= dict.fromkeys(indices, backward)
        for by_param in self._arrived:
            for index in indices:
                by_param.pop(index, None)

    def all_arrivals(self) -> Iterator[Arrival]:
        """Iterate over all arrivals. The caller holds `changed`."""
        return (arrival for by_param in self._arrived for arrivals in by_param.values() for arrival in arrivals)

    def _parse_announcement(self, message: dict[str, Any]) -> tuple[int, list[Part]]:
        """Parse the announcement of a push: its backward and parts. Raises CSDRankError if it is malformed."""
        params = self._owner.params
        try:
            backward, parts = message["backward"], []
            for index, first, rows, dtype in message["parts"]:
                if not all(type(n) is int and n >= 0 for n in (backward, index, first, rows)):
                    raise ValueError("a number is not an integer, or negative")
                shape = tuple(params[index].shape)
                if first + rows > (shape[0] if shape else 1):
                    raise ValueError(f"rows {first} to {first + rows} of shape {shape}")
                tail = len(shape) - 1
                block = Block((first, *[0] * tail), (rows, *shape[1:])) if shape else Block((), ())
                parts.append(Part(index, shape, block, dtype_named(dtype)))
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise CSDRankError(f"it cannot be read: {type(e).__name__}: {e}") from e
        if len({part.key for part in parts}) != len(parts):
            raise CSDRankError("a parameter is there twice")
        return backward, parts

    def wait(self, pushed: Mapping[int, int], expected: Sequence[Mapping[int, int]]) -> None:
        """Wait until all gradients of the backwards in `pushed` (parameter: backward) have arrived.

        `expected[trainer]`: number of elements per parameter. Raises CSDRankError if they do not arrive in time or the
        session is over.
        """

        def first_missing() -> tuple[int, int] | None:
            for trainer, (wanted, arrived) in enumerate(zip(expected, self._elements, strict=True)):
                for index, elements in wanted.items():
                    if elements and arrived.get(index) != (pushed[index], elements):
                        return index, trainer
            return None

        session, changed = self._session, self._owner.changed
        with changed:
            while missing := first_missing():
                self._owner.check_current(session)
                index, trainer = missing
                if failure := self.failure or self._disconnected.get(trainer):
                    raise CSDRankError(failure)
                if not changed.wait(session.timeout):
                    raise CSDRankError(
                        f"gradient {index} of trainer {trainer} has not come: Timed out after {session.timeout:g} s"
                    )
