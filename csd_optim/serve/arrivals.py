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

from ..errors import CSDRankError
from .blocks import IN_FLIGHT, Block, Bucket, IncomingBucket, Part, begin_receive, buckets_with_owner
from .values import dtype_named
from .wire import LONG_TIMEOUT, PUSH, PUSHED, Session

if TYPE_CHECKING:
    from .owner import Owner


FOLLOWS = 0  # in place of a backward's number: the gradient was sent after the step's message


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
        self._come: list[dict[int, list[Arrival]]] = [{} for _ in range(session.trainers)]
        self._elements: list[dict[int, tuple[int, int]]] = [{} for _ in range(session.trainers)]
        # Strings, not exceptions: a traceback would keep frames, and with them open connections, alive.
        self.failure: str = ""  # why the session cannot go on: invalid data has arrived
        self._gone: dict[int, str] = {}  # trainers that have disconnected, and why
        self._dropped: dict[int, int] = {}  # by parameter: gradients of backwards up to this one are discarded
        self.listens: bool = False  # listen() was called

    def listen(self) -> None:
        """Accept gradients before their step from now on. Idempotent."""
        for trainer in range(self._session.trainers) if not self.listens else ():
            coming: queue.SimpleQueue[_Push | str] = queue.SimpleQueue()
            room = threading.Semaphore(IN_FLIGHT)
            for work in (self._hear, self._take):
                arguments = trainer, coming, room
                threading.Thread(target=work, args=arguments, daemon=True, name="csd_optim arrivals").start()
        self.listens = True

    def _hear(self, trainer: int, coming: queue.SimpleQueue[_Push | str], room: threading.Semaphore) -> None:
        """Read the announcements of pushes, and begin to receive the next ones while earlier ones still arrive."""
        session, why = self._session, ""
        try:
            while not why:
                message = session.receive_message(trainer, LONG_TIMEOUT, tag=PUSH)
                try:
                    for finish, bucket in self._read(trainer, message):
                        room.acquire()
                        coming.put(_Push(begin_receive(session, trainer, bucket, PUSHED), finish))
                except Exception as e:
                    why = f"what trainer {trainer} has pushed: {e}"
                    self._fail(why)
        except CSDRankError as e:
            why = str(e)
        coming.put(why)

    def _take(self, trainer: int, coming: queue.SimpleQueue[_Push | str], room: threading.Semaphore) -> None:
        while not isinstance(push := coming.get(), str):
            try:
                push.finish(push.incoming)
            except Exception as e:
                self._fail(f"what trainer {trainer} has pushed: {e}")
            room.release()
            del push  # frees its buffer, also while waiting for the next one
        # A disconnect alone does not end the session: the trainer may have sent all that a step needs.
        with self._owner.changed:
            self._gone[trainer] = push
            self._owner.changed.notify_all()

    def _fail(self, why: str) -> None:
        with self._owner.changed:
            self.failure = self.failure or why
            self._owner.changed.notify_all()

    def _read(self, trainer: int, message: dict[str, Any]) -> Iterator[tuple[Callable[[IncomingBucket], None], Bucket]]:
        """Return the buckets of a push, each with the function that copies it to its place."""
        owner, session = self._owner, self._session
        backward, parts = self._parts(message)

        def is_dropped(index: int) -> bool:
            return backward <= self._dropped.get(index, 0)

        with owner.counts(session):
            there = [part for part in parts if not is_dropped(part.key)]
            if message.get("apart"):
                into = owner.rooms_apart(session, trainer, {part.key: part.dtype for part in there})
            else:
                into = owner.room_for(session, [part.key for part in there])
        in_place = owner.views(into, {part.key: part.shape for part in parts})

        def view_of(key: int, block: Block) -> torch.Tensor:
            return torch.empty(block.sizes, device="meta") if is_dropped(key) else in_place(key, block)

        def arrived(_: int, bucket: Bucket) -> None:
            for piece in bucket:
                if not is_dropped(piece.key):
                    self.note(trainer, Arrival(piece.key, backward, piece.block, piece.dtype))

        def finish(incoming: IncomingBucket) -> None:
            incoming.finish(session, view_of, lambda: owner.counts(session), arrived)

        return ((finish, bucket) for bucket in buckets_with_owner(parts, owner.owners, owner.rank, target_buckets=1))

    def note(self, trainer: int, arrival: Arrival) -> None:
        """Record that this block has arrived and is in its place. The caller holds `changed`."""
        come, elements = self._come[trainer].setdefault(arrival.param, []), self._elements[trainer]
        if come and come[0].backward != arrival.backward:
            come.clear()
        before = elements[arrival.param][1] if come else 0
        come.append(arrival)
        elements[arrival.param] = arrival.backward, before + arrival.block.numel
        if self._owner.flow:
            self._owner.flow.note(arrival)
        self._owner.changed.notify_all()

    def forget(self, indices: Sequence[int], backward: int) -> None:
        """Discard gradients of these parameters from backwards up to this one, also those that have yet to arrive.

        Their gradients follow a step's message, and a late push must not overwrite them. The caller holds `changed`.
        """
        self._dropped |= dict.fromkeys(indices, backward)
        for come in self._come:
            for index in indices:
                come.pop(index, None)

    def there(self) -> Iterator[Arrival]:
        """Iterate over all arrivals. The caller holds `changed`."""
        return (arrival for come in self._come for of_one in come.values() for arrival in of_one)

    def _parts(self, message: dict[str, Any]) -> tuple[int, list[Part]]:
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

        def lacking() -> tuple[int, int] | None:
            for trainer, (elements_of, come) in enumerate(zip(expected, self._elements, strict=True)):
                for index, elements in elements_of.items():
                    if elements and come.get(index) != (pushed[index], elements):
                        return index, trainer
            return None

        session, changed = self._session, self._owner.changed
        with changed:
            while what := lacking():
                self._owner.check_counts(session)
                index, trainer = what
                if failure := self.failure or self._gone.get(trainer):
                    raise CSDRankError(failure)
                if not changed.wait(session.timeout):
                    raise CSDRankError(
                        f"gradient {index} of trainer {trainer} has not come: Timed out after {session.timeout:g} s"
                    )
