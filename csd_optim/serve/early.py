"""Pushes a trainer's gradients before its step(): one DDP bucket after another, while backward goes on.

A bucket is split into rounds; the rows of one parameter in a round are a `Strip`. With the route slices a trainer
pushes its share of each gradient, averaged over all trainers. begin_reduce_scatter() copies the round out of DDP's
bucket, because DDP reuses that memory. With the route star a trainer pushes all of its own gradient directly from the
bucket, which DDP does not write to until the next backward; by then step() has waited for all sends, or the new
gradients replace these.

One thread reduces rounds and another one pushes them, so backward does not wait for owners. The exception is a further
backward before the step: it waits while reduced data for the owners would exceed the trainer's share of all gradients.
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

from ..accelerator import on, record_event
from ..distributed.buckets import TARGET_BUCKETS, aligned, pack
from ..distributed.ranks import Ranks
from ..distributed.sharding import rows_of
from ..errors import CSDRankError, CSDRuntimeError
from .blocks import Block, Part, Piece, buckets_with_owner, buffer_bytes, owned, piece_view, send_buckets, whole
from .wire import PUSH, PUSHED, Session

ROUND_BYTES = 16 << 20  # maximum size of a round: all trainers' shares together
MIN_ROUND_BYTES = 256 << 10  # lower bound of a round's size for small models, which would otherwise be a single round
ROUNDS = 3  # rounds reduced at the same time: with more of them, pushes would get too little of the trainer's link
SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtype in which 16-bit gradients are summed

GRAD_CHANGED = (
    "DDP's communication hook csd_optim.push has sent it to the optimizer ranks in backward, and `.grad` is not the "
    "mean over all trainers. Clip by the optimizer's max_grad_norm=, let GradScaler unscale in its step(), or use "
    "serve://...?route=kept. Before a backward without DDP, call the optimizer's own zero_grad() "
    "(docs/optimizer-ranks.md)"
)


class OutgoingGrad(NamedTuple):
    """A gradient in DDP's bucket that goes to the owners."""

    part: Part  # that this trainer pushes
    param: torch.Tensor
    grad: torch.Tensor  # of the parameter's shape


class Strip(NamedTuple):
    """Rows [first, first + rows) of each trainer's share of a gradient; a smaller share has fewer of them."""

    key: int  # the parameter's number
    shape: tuple[int, ...]
    wire_dtype: torch.dtype  # on the wire to owners
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
    """The part of a strip that a trainer pushes."""

    strip: Strip
    block: Block  # within the parameter
    values: torch.Tensor


def rounds_of(outgoing: Iterable[OutgoingGrad], trainers: int, round_bytes: int) -> list[list[Strip]]:
    """Split gradients into rounds of strips, identically on all trainers. `round_bytes`: of all trainers' shares."""
    parts = [(part, grad) for part, _, grad in outgoing]
    sizes = [
        (
            rows_of(part.shape[0], trainers, 0)[1] if part.shape else 1,
            trainers * grad.element_size() * math.prod(part.shape[1:]),
        )
        for part, grad in parts
    ]

    def strip(i: int, first: int, n: int, _: int) -> Strip:
        part, grad = parts[i]
        return Strip(part.key, part.shape, part.dtype, grad, first, n)

    return [[strip(*cut) for cut in cuts] for cuts in pack(sizes, round_bytes, align=1)]


def own_pushes(strips: Sequence[Strip]) -> list[Push]:
    """Return pushes of a trainer's own gradients, without reduction or copy."""
    pushes = []
    for strip in strips:
        block = strip.block(1, 0)
        pushes.append(Push(strip, block, block.of(strip.grad, whole(strip.grad.shape))))
    return pushes


def begin_reduce_scatter(strips: Sequence[Strip], ranks: Ranks | None) -> Callable[[], list[Push]]:
    """Begin a reduce-scatter of these strips; the returned function waits for it and returns this trainer's pushes.

    Each trainer divides its gradients by the number of trainers, as DDP does. The sum is taken in rank order; 16-bit
    gradients are summed in fp32 and rounded once. So the bits do not depend on timing, and equal DDP's with two
    trainers.

    The returned function may be called on another thread. On an accelerator that thread has another current stream: it
    must first make that stream wait for the work queued here, and wait for its own work before it drops the function,
    which owns the buffers.
    """
    size, rank = (ranks.size, ranks.rank) if ranks else (1, 0)
    layouts = [_layout(strips, size, k) for k in range(size)]
    bytes_of = [aligned(buffer_bytes(layout)) for layout in layouts]
    device = strips[0].grad.device
    if ranks and device.type not in ranks.device_types:
        device = ranks.device
    sent = torch.empty(sum(bytes_of), dtype=torch.uint8, device=device)
    for layout, buffer in zip(layouts, torch.split(sent, bytes_of), strict=True):
        for piece in layout:
            grad = strips[piece.key].grad
            piece_view(buffer, piece).copy_(piece.block.of(grad, whole(grad.shape)))
            if size > 1:
                piece_view(buffer, piece).mul_(1 / size)
    received, under_way = sent, []
    if ranks:
        received = sent.new_empty(size * bytes_of[rank])
        under_way = [ranks.all_to_all(received, [bytes_of[rank]] * size, sent, bytes_of)]

    def pushes() -> list[Push]:
        if ranks:
            ranks.wait(under_way)
        buffers = torch.split(received, [bytes_of[rank]] * size)
        return [
            Push(strips[piece.key], piece.block, sum_in_order(piece_view(buffer, piece) for buffer in buffers))
            for piece in layouts[rank]
        ]

    return pushes


def _layout(strips: Sequence[Strip], trainers: int, k: int) -> list[Piece]:
    """Return the layout of trainer k's rows of these strips in a buffer. A piece's key is the strip's index."""
    pieces: list[Piece] = []
    for i, strip in enumerate(strips):
        block = strip.block(trainers, k)
        if block.numel:
            pieces.append(Piece(i, block, aligned(buffer_bytes(pieces)), strip.grad.dtype))
    return pieces


def sum_in_order(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `values`, in their dtype and in memory of its own; a single value is returned as it is."""
    first, *others = values
    # A view would keep the whole receive buffer alive until this slice is pushed.
    total = first.to(SUM_DTYPES.get(first.dtype, first.dtype), copy=bool(others))
    for value in others:
        total.add_(value)
    return total.to(first.dtype)


class _Thread:
    """A background thread that executes one job after another."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # reentrant: the garbage collector may call stop() inside submit()
        self._stopped = False
        self._streams: dict[torch.device, Any] = {}  # used by this thread only: see accelerator.on()
        self._thread = threading.Thread(target=self._run, daemon=True, name="csd_optim push")
        self._thread.start()

    def _run(self) -> None:
        while job := self._jobs.get():
            job()
            del job

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. Raises CSDRankError after stop(), when it would never be executed."""
        with self._lock:
            if self._stopped:
                raise CSDRankError("gradients were not pushed: the session is over")
            self._jobs.put(job)

    def stop(self) -> None:
        """Let the thread end after the jobs that are queued by now."""
        with self._lock:
            self._stopped = True
            self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended, or `timeout` seconds have passed."""
        if self._thread is not threading.current_thread():  # the garbage collector may call this on any thread
            self._thread.join(timeout)

    def own_stream(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Make a stream of this thread current, so that its work does not queue behind the rest of backward.

        Call this on the thread itself.
        """
        if device.type != "cpu" and device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return on(self._streams.get(device))


class _Pusher:
    """Reduces rounds and pushes them to the owners of a session.

    `summed_by_owners`: owners sum, so nothing is reduced here.
    """

    def __init__(self, session: Session, *, summed_by_owners: bool) -> None:
        self._session, self._summed_by_owners = session, summed_by_owners
        self._reduce_thread, self._push_thread = _Thread(), _Thread()
        self._round_permits = threading.Semaphore(ROUNDS)
        self._counted: set[int] = set()  # parameters whose shares are in _max_pending_bytes
        self._max_pending_bytes = 0  # this trainer's share of all parameters that have had a gradient
        self._pending_bytes = 0  # of this trainer's shares in rounds that are being reduced or wait to be pushed
        self._pending_decreased = threading.Condition()  # guards _pending_bytes; notified when it has decreased
        self._announcements: deque[Any] = deque()  # announcements of pushes that are in flight
        self._sends: deque[Any] = deque()  # buckets of pushes that are in flight
        self.failure: CSDRankError | None = None  # why nothing can be pushed any more

    def stop(self) -> None:
        self._push_thread.submit(self._announcements.clear)  # sends in flight would keep connections open
        self._push_thread.submit(self._sends.clear)
        self._reduce_thread.stop()
        self._push_thread.stop()

    def join(self, timeout: float) -> None:
        self._reduce_thread.join(timeout)
        self._push_thread.join(timeout)

    def flush(self) -> None:
        """Wait until everything is pushed. Raises CSDRankError if that failed."""
        done: Future[None] = Future()

        def job() -> None:
            with self._recording_failure():
                self._wait(self._announcements, 0)
                self._wait(self._sends, 0)
            done.set_result(None)

        self._push_thread.submit(job)
        done.result()
        if self.failure:
            raise self.failure

    def reduce_and_push(self, backward: int, strips: Sequence[Strip], ranks: Ranks | None) -> Future[dict[int, float]]:
        """Reduce these strips over the ranks, and push the result.

        Returns a future of the sum of squares of the pushed values, by parameter: NaN where a value is not finite, 0
        where owners sum the gradients. When it is set, all trainers have reduced this round; pushes may still be in
        flight. It is set on return for gradients in host memory that are not reduced.
        """
        reduced: Future[dict[int, float]] = Future()
        own: list[Push] = []  # set by reduce()
        device = strips[0].grad.device
        far = device.type != "cpu"
        share_bytes = 0 if self._summed_by_owners else self._wait_until_fits(strips, ranks)
        pushes = partial(own_pushes, strips) if self._summed_by_owners else begin_reduce_scatter(strips, ranks)
        grads_ready = record_event(torch.accelerator.current_stream(device)) if far else None
        if not self._summed_by_owners:
            self._round_permits.acquire()

        def reduce() -> None:
            try:
                with self._reduce_thread.own_stream(device):
                    if grads_ready is not None:
                        torch.accelerator.current_stream(device).wait_event(grads_ready)
                    own.extend(pushes())
                    reduced.set_result({push.strip.key: self._sum_of_squares(push.values) for push in own})
            except Exception as e:
                reduced.set_exception(e)
            if not self._summed_by_owners:
                self._round_permits.release()

        def push() -> None:
            failed = reduced.exception()  # waits for reduce() and, through the squares, for its queued device work
            with self._recording_failure(), self._push_thread.own_stream(device):
                if not failed and own and not self.failure:
                    self._push(backward, own)
            own.clear()
            with self._pending_decreased:
                self._pending_bytes -= share_bytes
                self._pending_decreased.notify()

        with self._pending_decreased:
            self._pending_bytes += share_bytes
        if self._summed_by_owners and not far:
            reduce()
        else:
            self._reduce_thread.submit(reduce)
        self._push_thread.submit(push)
        return reduced

    def _wait_until_fits(self, strips: Sequence[Strip], ranks: Ranks | None) -> int:
        """Wait until this trainer's share of these strips may be pending. Returns its size, bytes.

        The limit is its share of all parameters, so this waits only while shares of an earlier backward remain.
        """
        size, rank = (ranks.size, ranks.rank) if ranks else (1, 0)
        for strip in strips:
            if strip.key not in self._counted:
                self._counted.add(strip.key)
                self._max_pending_bytes += owned(strip.shape, size, rank).numel * strip.grad.element_size()
        share = sum(strip.block(size, rank).numel * strip.grad.element_size() for strip in strips)
        with self._pending_decreased:
            self._pending_decreased.wait_for(lambda: self._pending_bytes + share <= self._max_pending_bytes)
        return share

    def _sum_of_squares(self, values: torch.Tensor) -> float:
        if self._summed_by_owners:  # owners sum them, and compute the norm of the sum
            return 0.0 if _is_finite(values) else math.nan
        return _sum_of_squares(values)

    @contextlib.contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """Record the first exception raised inside: nothing can be pushed after it."""
        try:
            yield
        except CSDRankError as e:
            self.failure = self.failure or e
        except Exception as e:
            self.failure = self.failure or CSDRankError(f"gradients were not pushed: {type(e).__name__}: {e}")

    def _wait(self, sends: deque[Any], left: int) -> None:
        """Wait until at most `left` of these sends are in flight."""
        while len(sends) > left:
            self._session.wait(sends.popleft())

    def _push(self, backward: int, pushes: list[Push]) -> None:
        """Send pushes to their owners.

        Returns before all data is sent, so that the next push can follow without a round trip between them.
        """
        session = self._session
        parts = [Part(strip.key, strip.shape, block, strip.wire_dtype) for strip, block, _ in pushes]
        values = {strip.key: (values, block) for strip, block, values in pushes}
        to = {
            session.owner(k): buckets_with_owner(parts, session.owners, k, target_buckets=1)
            for k in range(session.owners)
        }
        to = {rank: buckets for rank, buckets in to.items() if buckets}
        announcement = {
            "backward": backward,
            "apart": self._summed_by_owners,
            "parts": [part_message(part) for part in parts],
        }
        self._announcements += session.begin_send_message(announcement, *to, tag=PUSH)

        def view_of(key: int, block: Block) -> torch.Tensor:
            value, within = values[key]
            return block.of(value, within)

        send_buckets(session, to, view_of, tag=PUSHED, under_way=self._sends)
        self._wait(self._announcements, 2 * len(self._sends))


def _sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of squares, or NaN if a value is not finite.

    It waits for the device work queued before, after which the memory that this work has read may be reused.
    """
    values = values.to(SUM_DTYPES.get(values.dtype, values.dtype))  # torch's vector_norm of 16 bits into fp32 is slow
    square = float(torch.linalg.vector_norm(values)) ** 2
    # The norm of large finite values may be infinite, so that alone does not mean an overflow.
    return square if math.isfinite(square) or _is_finite(values) else math.nan


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite. It waits for device work, as _sum_of_squares() does."""
    if bool(torch.linalg.vector_norm(values).isfinite()):  # fast in the values' own dtype, but it may overflow
        return True
    low, high = torch.aminmax(torch.view_as_real(values) if values.is_complex() else values)
    return bool(low.isfinite() & high.isfinite())


def part_message(part: Part) -> list[Any]:
    """Describe a part, rows of a parameter, for arrivals.py: number, first row, number of rows and dtype."""
    first, rows = (part.block.first[0], part.block.sizes[0]) if part.shape else (0, 1)
    return [part.key, first, rows, str(part.dtype).removeprefix("torch.")]


class _GradIdentity:
    """The identity of a `.grad` at the end of backward, by which later writes and replacements are detected."""

    def __init__(self, grad: torch.Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = _version_key(grad)

    def is_unchanged(self, grad: torch.Tensor) -> bool:
        return self._grad is not None and self._grad() is grad and self._version == _version_key(grad)


def _version_key(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Return a key that changes with each counted in-place operation, and when `.data` is replaced."""
    return None if grad is None else (grad._version, grad.data_ptr())


@dataclass
class _PushedGrad:
    """A gradient that was pushed in backward."""

    backward: int
    square: float = 0.0  # sum of squares of what this trainer has pushed of it
    identity: _GradIdentity | None = None  # `.grad` at the end of backward; None until then


class EarlyPushes:
    """The gradients that leave in the backwards of one session.

    `handle_bucket` and `flush` are collectives of the trainers.
    """

    def __init__(self, session: Session, ranks: Ranks | None, nbytes: int, *, star: bool) -> None:
        """`nbytes`: size of all gradients; `star`: each trainer pushes its own gradients, and owners sum them."""
        self._ranks = ranks
        self._reduce_ranks = None if star else ranks
        self._shares = 1 if star else session.trainers  # that each gradient is divided into
        self._round_bytes = min(ROUND_BYTES, max(MIN_ROUND_BYTES, nbytes // TARGET_BUCKETS))
        self._pusher = _Pusher(session, summed_by_owners=star)
        self._backward = 0  # number of backwards that have begun
        self._pushed: dict[int, _PushedGrad] = {}
        self._under_way: list[Future[dict[int, float]]] = []
        self._outgoing: list[OutgoingGrad] = []

    def stop(self, timeout: float) -> None:
        """Stop the threads, and wait for them for at most `timeout` seconds each.

        The interpreter must not exit while a thread waits in gloo. Call this only after the session has ended.
        """
        self._pusher.stop()
        self._pusher.join(timeout)

    @property
    def backwards(self) -> int:
        """Number of backwards that have begun."""
        return self._backward

    def handle_bucket(self, bucket: Any, part_of: Callable[[torch.Tensor, torch.Tensor], Part | None]) -> Any:
        """Handle a bucket as DDP's communication hook. Returns the future that DDP expects.

        `part_of(param, grad)` returns the part that this trainer pushes, or None for a gradient that is all-reduced as
        DDP does it. Raises CSDRankError if the other trainers are gone.
        """
        if bucket.index() == 0:
            self._backward += 1
            self._under_way, self._outgoing = [], []
        outgoing, others = [], []
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            part = part_of(p, grad)
            if part is None:
                others.append(grad)
            else:
                outgoing.append(OutgoingGrad(part, p, grad))
        for part, _, _ in outgoing:
            self._pushed[part.key] = _PushedGrad(self._backward)
        self._outgoing += outgoing
        for strips in rounds_of(outgoing, self._shares, self._round_bytes):
            self._under_way.append(self._pusher.reduce_and_push(self._backward, strips, self._reduce_ranks))
        future = mean_of(self._ranks, bucket.buffer(), others if outgoing else None)
        if bucket.is_last():
            self._end_backward()
        return future

    def _end_backward(self) -> None:
        """Finish a backward: wait until all trainers have reduced all rounds. Pushes may still be in flight."""
        finite = True
        for reduced in self._under_way:
            for index, square in reduced.result().items():
                finite = finite and not math.isnan(square)
                self._pushed[index].square += square
        outgoing, self._under_way, self._outgoing = self._outgoing, [], []
        if not all_finite(self._ranks, finite):
            self.flush()  # with the route star, pushes read the memory that mark_overflow() writes
            mark_overflow(grad for _, _, grad in outgoing)

        def set_identities() -> None:
            for part, p, _ in outgoing:
                self._pushed[part.key].identity = _GradIdentity(p.grad)

        # DDP writes `.grad` in a callback that runs after the one queued here, which therefore queues set_identities().
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # no backward is running: this rank has run out of data (Join)
            engine.queue_callback(lambda: engine.queue_callback(set_identities))

    def clear(self) -> None:
        """Forget all pushed gradients, because they were cleared: gradients made later are sent in the step."""
        self._pushed.clear()

    def flush(self) -> None:
        """Wait until all gradients are sent. Raises CSDRankError if that failed."""
        self._pusher.flush()

    def backward_of(self, index: int, name: str, grad: torch.Tensor, *, joined: bool, unscaled: bool) -> int:
        """Return the backward in which this gradient was pushed; 0 if it was not.

        `joined`: it is another trainer's gradient (Join); `unscaled`: GradScaler has unscaled it. Raises
        CSDRuntimeError if the gradient has changed since then.
        """
        pushed = self._pushed.get(index)
        if pushed is None:
            return 0
        if joined:
            return pushed.backward
        if pushed.identity is None:
            raise CSDRuntimeError(f"the backward that computed the gradient of {name} has not finished")
        if unscaled or not pushed.identity.is_unchanged(grad):
            raise CSDRuntimeError(
                f"the gradient of {name} was changed, which the step would not notice: {GRAD_CHANGED}"
            )
        return pushed.backward

    def sum_of_squares(self, index: int) -> float:
        """Return the sum of squares of what this trainer has pushed of a gradient."""
        return self._pushed[index].square


def all_finite(ranks: Ranks | None, finite: bool) -> bool:
    """Return whether `finite` is true on all trainers. A collective."""
    return all(vote for (vote,) in ranks.gather(finite)) if ranks else finite


def mark_overflow(grads: Iterable[torch.Tensor]) -> None:
    """Write a NaN into each gradient, so that every trainer's GradScaler, which checks its own, finds the overflow.

    All of them are marked because DDP does not copy the gradients of unused parameters to `.grad`.
    """
    for grad in grads:
        grad[(0,) * grad.dim()] = math.nan


def mean_of(ranks: Ranks | None, buffer: torch.Tensor, views: Sequence[torch.Tensor] | None = None) -> Any:
    """Return a future of `buffer` averaged over the ranks as DDP does it; with `views`, only these parts of it are."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if ranks is None or (views is not None and not views):
        future.set_result(buffer)
        return future
    values = buffer if views is None else torch.cat([view.reshape(-1) for view in views])
    values.mul_(1 / ranks.size)
    reduced = ranks.all_reduce(values).get_future()
    if views is None:
        return reduced.then(lambda done: done.value()[0])

    def put_back(done: Any) -> torch.Tensor:
        done.wait()
        for view, mean in zip(views, torch.split(values, [view.numel() for view in views]), strict=True):
            view.copy_(mean.view(view.shape))
        return buffer

    return reduced.then(put_back)
