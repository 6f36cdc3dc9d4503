"""Gradients of a trainer that leave before its step(): bucket by bucket, as DDP has them, while backward goes on.

A bucket is cut into rounds, and what there is of a parameter in a round is a `Strip`. slices() takes what it needs of a
round out of DDP's bucket, which is somebody else's memory again afterwards, and says what this trainer pushes: the mean
over all trainers of its share. With the route star it pushes all of its own gradient, straight from the bucket, which
DDP leaves alone until the next backward; by then step() has seen to it that all has left, or what leaves anew takes its
place. One thread reduces and another one pushes, round after round: backward waits for no owner, unless it is one more
before a step, and what trainers keep for owners would be more than their shares of all gradients.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ..accelerator import on, recorded
from ..distributed.buckets import FEWEST
from ..distributed.ranks import Ranks
from ..distributed.sharding import rows_of
from ..errors import CSDRankError, CSDRuntimeError
from ..store.layout import round_up
from .blocks import ALIGN, Block, Part, Piece, end_of, owned, room_of, send_buckets, whole, with_owner
from .wire import PUSH, PUSHED, Session

ROUND_BYTES = 16 << 20  # of all trainers' shares
LEAST_BYTES = 256 << 10  # the same of models so small that all would be in one round
ROUNDS = 3  # that trainers reduce at the same time: of more, they keep those from their link that are pushed
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # in which halves are summed

CHANGED = (
    "it left in backward, as push is DDP's communication hook, and `.grad` has been this trainer's own since then, not "
    "the mean over all: clip by the optimizer's max_grad_norm=, and let GradScaler unscale in its step(); or take "
    "serve://...?route=kept; before gradients that are made without DDP call the optimizer's own zero_grad() "
    "(docs/optimizer-ranks.md)"
)


class Leaving(NamedTuple):
    """A gradient in DDP's bucket that goes to the owners."""

    part: Part  # of this trainer
    param: torch.Tensor
    grad: torch.Tensor  # of the parameter's shape


class Strip(NamedTuple):
    """Some rows of each trainer's share of a gradient: as many of the k-th as it has there."""

    key: int  # of the parameter
    shape: tuple[int, ...]
    wire: torch.dtype  # in which it goes to owners
    grad: torch.Tensor
    first: int
    rows: int

    def block(self, trainers: int, k: int) -> Block:
        share = owned(self.shape, trainers, k)
        if not self.shape:
            return share
        first = min(self.first, share.sizes[0])
        rows = min(self.rows, share.sizes[0] - first)
        return Block((share.first[0] + first, *share.first[1:]), (rows, *share.sizes[1:]))


class Push(NamedTuple):
    """What a trainer pushes of a strip."""

    strip: Strip
    block: Block  # of the parameter
    values: torch.Tensor


def rounds_of(leaving: Iterable[Leaving], trainers: int, round_bytes: int) -> list[list[Strip]]:
    """The same on all trainers."""
    out: list[list[Strip]] = []
    room = 0
    for part, _, grad in leaving:
        rows = rows_of(part.shape[0], trainers, 0)[1] if part.shape else 1
        row_bytes = trainers * grad.element_size() * math.prod(part.shape[1:])
        first = 0
        while first < rows:
            if room < row_bytes:
                out.append([])
                room = round_bytes
            n = min(max(1, room // row_bytes), rows - first)
            out[-1].append(Strip(part.key, part.shape, part.dtype, grad, first, n))
            room -= n * row_bytes
            first += n
    return out


def own(strips: Sequence[Strip]) -> list[Push]:
    """A trainer pushes its own gradients as they are."""
    pushes = []
    for strip in strips:
        block = strip.block(1, 0)
        pushes.append(Push(strip, block, block.of(strip.grad, whole(strip.grad.shape))))
    return pushes


def slices(strips: Sequence[Strip], ranks: Ranks | None) -> Callable[[], list[Push]]:
    """Each trainer gets from all others what they have of its share, and pushes the mean.

    Every trainer divides its own by their number, as DDP does; halves are summed in fp32 and rounded once, in the order
    of ranks: the same bits whoever is late, and DDP's if there are two.

    What it returns may be called on another thread. On an accelerator, whose current streams are others, that is to
    wait for what is queued here, and then for what it has queued there before it lets go of it.
    """
    size, rank = (ranks.size, ranks.rank) if ranks else (1, 0)
    layouts = [_layout(strips, size, k) for k in range(size)]
    bytes_of = [round_up(end_of(layout), ALIGN) for layout in layouts]
    device = strips[0].grad.device
    if ranks and device.type not in ranks.device_types:
        device = ranks.device
    sent = torch.empty(sum(bytes_of), dtype=torch.uint8, device=device)
    for layout, room in zip(layouts, torch.split(sent, bytes_of), strict=True):
        for piece in layout:
            grad = strips[piece.key].grad
            room_of(room, piece).copy_(piece.block.of(grad, whole(grad.shape)))
            if size > 1:
                room_of(room, piece).mul_(1 / size)
    received, under_way = sent, []
    if ranks:
        received = sent.new_empty(size * bytes_of[rank])
        under_way = [ranks.all_to_all(received, [bytes_of[rank]] * size, sent, bytes_of)]

    def pushes() -> list[Push]:
        if ranks:
            ranks.wait(under_way)
        rooms = torch.split(received, [bytes_of[rank]] * size)
        return [
            Push(strips[piece.key], piece.block, in_order(room_of(room, piece) for room in rooms))
            for piece in layouts[rank]
        ]

    return pushes


def _layout(strips: Sequence[Strip], trainers: int, k: int) -> list[Piece]:
    """Where what trainer k gets of these strips lies in a buffer. Keys: their numbers."""
    pieces: list[Piece] = []
    for i, strip in enumerate(strips):
        block = strip.block(trainers, k)
        if block.numel:
            pieces.append(Piece(i, block, round_up(end_of(pieces), ALIGN), strip.grad.dtype))
    return pieces


def in_order(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Their sum, in the dtype that they have, and in memory of its own; of one value that itself."""
    first, *others = values
    # A view of what has come would keep all of it until this is pushed.
    total = first.to(WIDE.get(first.dtype, first.dtype), copy=bool(others))
    for value in others:
        total.add_(value)
    return total.to(first.dtype)


class _Thread:
    """Does one job after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # the collector may come, too
        self._stopped = False
        self._streams: dict[torch.device, Any] = {}  # its own: see accelerator.on()
        self._thread = threading.Thread(target=self._run, daemon=True, name="csd_optim push")
        self._thread.start()

    def _run(self) -> None:
        while job := self._jobs.get():
            job()
            del job

    def do(self, job: Callable[[], None]) -> None:
        """Raises CSDRankError after stop(): nobody is to wait for what will never be done."""
        with self._lock:
            if self._stopped:
                raise CSDRankError("gradients were not pushed: the session is over")
            self._jobs.put(job)

    def stop(self) -> None:
        """It ends when it has done what it was given before."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Returns when it has ended, or after so many seconds."""
        if self._thread is not threading.current_thread():  # on which the collector may be
            self._thread.join(timeout)

    def beside(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """On this thread: what is done within is not behind what the program queues, as backward goes on there."""
        if device.type != "cpu" and device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return on(self._streams.get(device))


class _Pushing:
    """To the owners of a session, one round after another."""

    def __init__(self, session: Session, *, apart: bool) -> None:
        self._session, self._apart = session, apart
        self._reduces, self._pushes = _Thread(), _Thread()
        self._window = threading.Semaphore(ROUNDS)
        self._shares: dict[int, int] = {}  # bytes of this trainer's share of each parameter
        self._kept = 0  # bytes of what is reduced, or will be, and not pushed yet
        self._fewer = threading.Condition()  # are kept
        self._said: deque[Any] = deque()  # of pushes, still being sent: what is said of them
        self._sent: deque[Any] = deque()  # and their buckets
        self.failure: CSDRankError | None = None  # why nothing can be pushed any more

    def stop(self) -> None:
        self._pushes.do(self._said.clear)  # which would keep connections open
        self._pushes.do(self._sent.clear)
        self._reduces.stop()
        self._pushes.stop()

    def join(self, timeout: float) -> None:
        self._reduces.join(timeout)
        self._pushes.join(timeout)

    def flush(self) -> None:
        """Returns when all is pushed. Raises CSDRankError if it could not be."""
        done: Future[None] = Future()

        def job() -> None:
            with self._failing():
                self._wait(self._said, 0)
                self._wait(self._sent, 0)
            done.set_result(None)

        self._pushes.do(job)
        done.result()
        if self.failure:
            raise self.failure

    def put(self, backward: int, strips: Sequence[Strip], ranks: Ranks | None) -> Future[dict[int, float]]:
        """Pushes these, reduced over the ranks. Returns what has the sum of squares of what is pushed, by parameter;
        NaN where a value is not finite. Of what others are to sum it has 0 instead.

        When that is there, all trainers have reduced this round; it may still be under way to the owners. Of gradients
        in host memory that nobody reduces it is there at once.
        """
        reduced: Future[dict[int, float]] = Future()
        here: list[Push] = []
        device = strips[0].grad.device
        far = device.type != "cpu"
        kept = 0 if self._apart else self._wait_for_room(strips, ranks)
        pushes = partial(own, strips) if self._apart else slices(strips, ranks)
        made = recorded(torch.accelerator.current_stream(device)) if far else None
        if not self._apart:
            self._window.acquire()

        def reduce() -> None:
            try:
                with self._reduces.beside(device):
                    if made is not None:
                        torch.accelerator.current_stream(device).wait_event(made)
                    here.extend(pushes())
                    reduced.set_result({push.strip.key: self._square(push.values) for push in here})
            except Exception as e:
                reduced.set_exception(e)
            if not self._apart:
                self._window.release()

        def push() -> None:
            failed = reduced.exception()  # which waits for it, and for what it has queued
            with self._failing(), self._pushes.beside(device):
                if not failed and here and not self.failure:
                    self._push(backward, here)
            here.clear()
            with self._fewer:
                self._kept -= kept
                self._fewer.notify()

        with self._fewer:
            self._kept += kept
        if self._apart and not far:
            reduce()
        else:
            self._reduces.do(reduce)
        self._pushes.do(push)
        return reduced

    def _wait_for_room(self, strips: Sequence[Strip], ranks: Ranks | None) -> int:
        """Returns the bytes of this trainer's share of these, when no more is kept with them than of all parameters
        once: at once, unless what an earlier backward has left is still there."""
        size, rank = (ranks.size, ranks.rank) if ranks else (1, 0)
        for strip in strips:
            self._shares[strip.key] = owned(strip.shape, size, rank).numel * strip.grad.element_size()
        most = sum(self._shares.values())
        share = sum(strip.block(size, rank).numel * strip.grad.element_size() for strip in strips)
        with self._fewer:
            self._fewer.wait_for(lambda: self._kept + share <= most)
        return share

    def _square(self, values: torch.Tensor) -> float:
        if self._apart:  # others sum them, and know their norm
            return 0.0 if _is_finite(values) else math.nan
        return _square(values)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What is raised within is why nothing can be pushed any more."""
        try:
            yield
        except CSDRankError as e:
            self.failure = self.failure or e
        except Exception as e:
            self.failure = self.failure or CSDRankError(f"gradients were not pushed: {type(e).__name__}: {e}")

    def _wait(self, sends: deque[Any], left: int) -> None:
        """Returns when no more than `left` of them are under way."""
        while len(sends) > left:
            self._session.wait(sends.popleft())

    def _push(self, backward: int, pushes: list[Push]) -> None:
        """Returns when others can follow: owners take one after another, and nothing should be awaited in between."""
        session = self._session
        parts = [Part(strip.key, strip.shape, block, strip.wire) for strip, block, _ in pushes]
        values = {strip.key: (values, block) for strip, block, values in pushes}
        to = {session.owner(k): with_owner(parts, session.owners, k, fewest=1) for k in range(session.owners)}
        to = {rank: buckets for rank, buckets in to.items() if buckets}
        said = {"backward": backward, "apart": self._apart, "parts": [part_message(part) for part in parts]}
        self._said += session.begin_saying(said, *to, tag=PUSH)

        def view_of(key: int, block: Block) -> torch.Tensor:
            there, within = values[key]
            return block.of(there, within)

        send_buckets(session, to, view_of, tag=PUSHED, under_way=self._sent)
        self._wait(self._said, 2 * len(self._sent))


def _square(values: torch.Tensor) -> float:
    """Waits for what was queued before: then the memory of others that this has read may go."""
    values = values.to(WIDE.get(values.dtype, values.dtype))  # the norm of halves in fp32 is slow in torch
    square = float(torch.linalg.vector_norm(values)) ** 2
    # The norm of large values may overflow, which makes none of them an overflow.
    return square if math.isfinite(square) or _is_finite(values) else math.nan


def _is_finite(values: torch.Tensor) -> bool:
    """Are all of them? It waits, too."""
    if bool(torch.linalg.vector_norm(values).isfinite()):  # fast in their own dtype, in which it may overflow
        return True
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    return bool(low.isfinite() & high.isfinite())


def part_message(part: Part) -> list[Any]:
    """Some rows of a parameter, for arrivals.py: number, first row, rows and dtype."""
    first, rows = (part.block.first[0], part.block.sizes[0]) if part.shape else (0, 1)
    return [part.key, first, rows, str(part.dtype).removeprefix("torch.")]


class _Written:
    """What `.grad` is at the end of backward, to be told from what somebody writes to it or puts in its place."""

    def __init__(self, grad: torch.Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._values = _values_of(grad)

    def is_still(self, grad: torch.Tensor) -> bool:
        return self._grad is not None and self._grad() is grad and self._values == _values_of(grad)


def _values_of(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Another one after each operation that writes to it, and when its `.data` is exchanged."""
    return None if grad is None else (grad._version, grad.data_ptr())


@dataclass
class _Left:
    """A gradient that has left."""

    backward: int
    square: float = 0.0  # of what this trainer has pushed of it
    written: _Written | None = None  # of `.grad` at the end of backward; None: before that


class Early:
    """What leaves in the backwards of one session. `take` and `settle` are collectives of the trainers."""

    def __init__(self, session: Session, ranks: Ranks | None, nbytes: int, *, star: bool) -> None:
        """`nbytes`: of all gradients; `star`: each trainer pushes its own ones, for the owners to sum."""
        self._ranks = ranks
        self._reducing = None if star else ranks
        self._shares = 1 if star else session.trainers
        self._round_bytes = min(ROUND_BYTES, max(LEAST_BYTES, nbytes // FEWEST))
        self._pushing = _Pushing(session, apart=star)
        self._backward = 0  # counts those that have begun
        self._left: dict[int, _Left] = {}
        self._under_way: list[Future[dict[int, float]]] = []
        self._of_backward: list[Leaving] = []

    def stop(self, timeout: float) -> None:
        """Returns when nothing leaves any more, or after so many seconds: the interpreter must not end while a thread
        waits for what it sends. To be called when the session has ended."""
        self._pushing.stop()
        self._pushing.join(timeout)

    @property
    def backwards(self) -> int:
        """How many have begun."""
        return self._backward

    def take(self, bucket: Any, travels: Callable[[torch.Tensor, torch.Tensor], Part | None]) -> Any:
        """What a communication hook of DDP does with a bucket, and returns.

        `travels`: what this trainer pushes of a parameter with a gradient; None: that is reduced as DDP does it.
        Raises CSDRankError if the other trainers are gone.
        """
        if bucket.index() == 0:
            self._backward += 1
            self._under_way, self._of_backward = [], []
        leaving, others = [], []
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            part = travels(p, grad)
            if part is None:
                others.append(grad)
            else:
                leaving.append(Leaving(part, p, grad))
        for part, _, _ in leaving:
            self._left[part.key] = _Left(self._backward)
        self._of_backward += leaving
        for strips in rounds_of(leaving, self._shares, self._round_bytes):
            self._under_way.append(self._pushing.put(self._backward, strips, self._reducing))
        future = mean_of(self._ranks, bucket.buffer(), others if leaving else None)
        if bucket.is_last():
            self._end()
        return future

    def _end(self) -> None:
        """All trainers have reduced all; what has left may be under way to the owners."""
        finite = True
        for reduced in self._under_way:
            for index, square in reduced.result().items():
                finite = finite and not math.isnan(square)
                self._left[index].square += square
        there, self._under_way, self._of_backward = self._of_backward, [], []
        if not all_finite(self._ranks, finite):
            self.settle()  # with the route star these are what leaves
            tell_overflow(grad for _, _, grad in there)

        def note() -> None:
            for part, p, _ in there:
                self._left[part.key].written = _Written(p.grad)

        # DDP gives `.grad` its values in a callback of its own, which follows the one that is queued here.
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # this rank is out of data (Join), and there is no backward
            engine.queue_callback(lambda: engine.queue_callback(note))

    def forget(self) -> None:
        """Gradients are no more: what is there at the next step has not left."""
        self._left.clear()

    def settle(self) -> None:
        """Returns when all has left. Raises CSDRankError if it could not."""
        self._pushing.flush()

    def left(self, index: int, name: str, grad: torch.Tensor, *, joined: bool, unscaled: bool) -> int:
        """The backward in which this gradient has left; 0 if it has not.

        `joined`: the gradient is another trainer's; `unscaled`: by GradScaler. Raises CSDRuntimeError if it is not what
        left then.
        """
        left = self._left.get(index)
        if left is None:
            return 0
        if joined:
            return left.backward
        if left.written is None:
            raise CSDRuntimeError(f"the backward that the gradient of {name} is of has not come to its end")
        if unscaled or not left.written.is_still(grad):
            raise CSDRuntimeError(f"the gradient of {name} was changed, which the step would not notice: {CHANGED}")
        return left.backward

    def square(self, index: int) -> float:
        """The sum of squares of what this trainer has pushed of a gradient."""
        return self._left[index].square


def all_finite(ranks: Ranks | None, finite: bool) -> bool:
    """Are the gradients of all trainers? A collective."""
    return all(there for (there,) in ranks.gather(finite)) if ranks else finite


def tell_overflow(grads: Iterable[torch.Tensor]) -> None:
    """Puts a NaN into each gradient: GradScaler of each trainer looks at its own.

    DDP leaves `.grad` of those alone that nobody has used.
    """
    for grad in grads:
        grad[(0,) * grad.dim()] = math.nan


def mean_of(ranks: Ranks | None, buffer: torch.Tensor, views: Sequence[torch.Tensor] | None = None) -> Any:
    """A future of `buffer`, with the mean over the ranks as DDP makes it; with `views` only in these parts of it."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if ranks is None or (views is not None and not views):
        future.set_result(buffer)
        return future
    there = buffer if views is None else torch.cat([view.reshape(-1) for view in views])
    there.mul_(1 / ranks.size)
    begun = ranks.all_reduce(there).get_future()
    if views is None:
        return begun.then(lambda done: done.value()[0])

    def put_back(done: Any) -> torch.Tensor:
        done.wait()
        for view, values in zip(views, torch.split(there, [view.numel() for view in views]), strict=True):
            view.copy_(values.view(view.shape))
        return buffer

    return begun.then(put_back)
