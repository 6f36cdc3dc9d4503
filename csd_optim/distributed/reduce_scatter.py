"""The reduce-scatter of gradients in backward (ZeRO-2): each rank gets only its rows of the mean gradients.

DDP hands over one bucket at a time. A bucket is sent in rounds, each a single all-to-all, concurrently with backward. A
round is copied out of the bucket, because DDP reuses the bucket's memory; the rows of one gradient in a round are a
`Strip`. There is no thread: a round is summed when ROUNDS later ones wait, or at the end of backward.

Each rank divides its gradients by the number of ranks, as DDP does. Sums are taken in rank order; 16-bit gradients are
summed in fp32 and rounded once. So the bits do not depend on timing, and with two ranks they equal DDP's.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..accelerator import on
from ..grad_modes import no_autograd, version_of
from .buckets import aligned, pack, view_in
from .ranks import Ranks
from .sharding import rows_of

ROUND_BYTES = 16 << 20  # maximum size of a round: all bytes that a rank sends
ROUNDS = 3  # rounds under way at the same time
SUM_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # dtypes for sums of 16-bit gradients

GRAD_CHANGED = (
    "DDP's communication hook csd_optim.push has reduced it in backward, and step() uses this rank's rows of the mean, "
    "of which `.grad` holds nothing. Clip by the optimizer's max_grad_norm=, and let GradScaler unscale in its step(). "
    "Before a backward without DDP, call the optimizer's own zero_grad() (docs/distributed.md)"
)


class _GradIdentity:
    """The identity of a `.grad` at the end of backward, by which later writes and replacements are detected."""

    def __init__(self, grad: torch.Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = _version_key(grad)

    def is_unchanged(self, grad: torch.Tensor) -> bool:
        return self._grad is not None and self._grad() is grad and self._version == _version_key(grad)


def _version_key(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Return a key that changes with each counted in-place operation, and when `.data` is replaced."""
    return None if grad is None else (version_of(grad), grad.data_ptr())


@dataclass
class _Reduced:
    """A gradient that was reduced in backward."""

    param: torch.Tensor  # keeps its id unique
    rows: torch.Tensor  # this rank's rows of the mean, in separate memory; final once `strips` is 0
    strips: int = 0  # number of strips that are not in `rows` yet
    identity: _GradIdentity | None = None  # `.grad` at the end of backward; None until then


class Strip(NamedTuple):
    """Rows [first, first + n) of each rank's rows of a gradient; the last ranks may have fewer rows, or none."""

    grad: torch.Tensor
    reduced: _Reduced
    first: int
    n: int

    def of_rank(self, ranks: int, k: int) -> torch.Tensor:
        begin, rows = rows_of(len(self.grad), ranks, k)
        first = min(self.first, rows)
        return self.grad.narrow(0, begin + first, min(self.n, rows - first))

    @property
    def target(self) -> torch.Tensor:
        own = self.reduced.rows
        first = min(self.first, len(own))
        return own.narrow(0, first, min(self.n, len(own) - first))


def rounds_of(grads: Sequence[tuple[torch.Tensor, _Reduced]], ranks: int) -> list[list[Strip]]:
    """Cut gradients, each with its result, into rounds of strips: the same on all ranks."""
    sizes = [
        (rows_of(len(grad), ranks, 0)[1], ranks * grad.element_size() * math.prod(grad.shape[1:])) for grad, _ in grads
    ]
    return [[Strip(*grads[cut.item], cut.first, cut.rows) for cut in cuts] for cuts in pack(sizes, ROUND_BYTES, 1)]


class _Round:
    """A reduce-scatter under way of strips on one device."""

    def __init__(self, strips: Sequence[Strip], ranks: Ranks, free: list[torch.Tensor]) -> None:
        """`free`: host memory of finished rounds, uint8, to reuse; finish() adds this round's."""
        self.strips: Sequence[Strip] = strips
        self._ranks, self._free, size = ranks, free, ranks.size
        of_ranks = [[strip.of_rank(size, k) for strip in strips] for k in range(size)]
        sizes = [sum(aligned(rows.nbytes) for rows in of_rank) for of_rank in of_ranks]
        device = strips[0].grad.device
        # The buffers belong to the current stream, so finish() uses the same stream.
        self.stream: Any = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        if device.type not in ranks.device_types:
            device = ranks.device
        self._sizes = [sizes[ranks.rank]] * size
        nbytes = sum(sizes) + sum(self._sizes)
        buffer = free.pop() if free and device.type == "cpu" else None
        if buffer is None or len(buffer) < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._buffer = buffer
        sent, self._received = torch.split(buffer[:nbytes], [sum(sizes), sum(self._sizes)])
        for to_rank, of_rank in zip(torch.split(sent, sizes), of_ranks, strict=True):
            for rows, values in zip(of_rank, _views(to_rank, of_rank), strict=True):
                if rows.device == values.device:
                    torch.mul(rows, 1 / size, out=values)
                else:
                    values.copy_(rows).mul_(1 / size)
        self._work = ranks.all_to_all(self._received, self._sizes, sent, sizes)

    def finish(self) -> list[torch.Tensor]:
        """Wait for the round, and fill this rank's rows of the means. Returns the filled rows, without empty tensors.

        Call it with `stream` as the current stream. Raises CSDRankError if ranks are gone.
        """
        self._ranks.wait([self._work])
        targets = [strip.target for strip in self.strips]
        by_rank = [_views(buffer, targets) for buffer in torch.split(self._received, self._sizes)]
        for target, values in zip(targets, zip(*by_rank, strict=True), strict=True):
            target.copy_(sum_in_order(values))
        if self._buffer.device.type == "cpu":  # an accelerator's allocator reuses memory itself, per stream
            self._free.append(self._buffer)
        return [target for target in targets if target.numel()]


def _views(buffer: torch.Tensor, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a buffer (uint8, 1-D), one after another, with these tensors' shapes and dtypes."""
    views, offset = [], 0
    for t in like:
        views.append(view_in(buffer, offset, t.dtype, t.shape))
        offset += aligned(t.nbytes)
    return views


def sum_in_order(values: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one dtype, in the first one's memory order.

    16-bit tensors are summed in fp32, without rounding the result. Other sums overwrite the first tensor.
    """
    first, *others = values
    total = first.to(SUM_DTYPES.get(first.dtype, first.dtype))
    for value in others:
        total.add_(value)
    return total


class ReducedGrads(Container[int]):
    """The gradients that were reduced in backward, by id of the parameter, until replaced, or until clear().

    A step that uses rows keeps them alive longer. Takes no lock, and is never called concurrently.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        # Called with a parameter whose rows are final. The current stream is the one that has filled the rows.
        self.on_final: Callable[[torch.Tensor], None] | None = None
        self._reduced: dict[int, _Reduced] = {}
        self._divided: Container[int] = ()
        self._free: list[torch.Tensor] = []  # memory of at most ROUNDS rounds, as new memory costs page faults
        # Of the backward under way, with torch's number of it:
        self._task = -1
        self._rounds: deque[_Round] = deque()
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []  # rows of the mean, and their norm in their dtype
        self._left: list[tuple[_Reduced, torch.Tensor]] = []  # the result, and this rank's gradient in the bucket

    def __contains__(self, key: object) -> bool:
        return key in self._reduced

    @property
    def rows(self) -> dict[int, torch.Tensor]:
        """This rank's rows of the mean gradient, by id of the parameter, for all parameters with a `.grad`."""
        return {key: reduced.rows for key, reduced in self._reduced.items() if reduced.param.grad is not None}

    def rows_of(self, p: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's rows of a parameter's mean gradient; None if missing or not final yet."""
        reduced = self._reduced.get(id(p))
        return reduced.rows if reduced and not reduced.strips else None

    @property
    def under_way(self) -> int:
        """The number of rounds that have begun but are not summed yet."""
        return len(self._rounds)

    def clear(self) -> None:
        """Forget all gradients, because the program has cleared them.

        Later gradients without the hook are used as they are.
        """
        self._reduced.clear()

    def why_changed(self, p: torch.Tensor, *, unscaled: bool) -> str | None:
        """Return why step() cannot take a parameter's reduced gradient, as text to follow its name; None if it can.

        `unscaled`: GradScaler has unscaled `.grad`.
        """
        reduced = self._reduced.get(id(p))
        if reduced is None or p.grad is None:
            return None
        if reduced.identity is None:
            return "is not there: the backward that computes it has not finished"
        if p.grad.is_inference():
            return (
                "was made in torch.inference_mode(), where torch does not count what is written to it, and the step "
                "would not notice: call backward() outside of that mode"
            )
        if unscaled or not reduced.identity.is_unchanged(p.grad):
            return f"was changed, which the step would not notice: {GRAD_CHANGED}"
        return None

    @no_autograd()
    def handle_bucket(self, bucket: Any, divided: Callable[[], Container[int]]) -> Any:
        """Reduce a bucket, as DDP's communication hook: a collective. Returns the future that DDP expects.

        `divided` returns the ids of parameters whose rows are divided among ranks: their `.grad` stays this rank's own
        gradient. Other gradients are averaged as DDP does it. Raises CSDRankError if ranks are gone.
        """
        if self._ranks is None:
            return mean_of(None, bucket.buffer())
        if (task := torch._C._current_graph_task_id()) != self._task:
            self._task = task
            self._drop_rounds()
        if bucket.index() == 0:
            self._divided = divided()
        size, rank = self._ranks.size, self._ranks.rank
        grads: list[tuple[torch.Tensor, _Reduced]] = []
        others = []
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if id(p) not in self._divided or grad.dtype is not p.dtype or not grad.numel():
                others.append(grad)  # also of complex parameters, in real numbers
                continue
            own_rows = p.detach().narrow(0, *rows_of(len(p), size, rank))
            reduced = self._reduced[id(p)] = _Reduced(p, torch.empty_like(own_rows))
            grad = _in_order_of(p, grad)
            grads.append((grad, reduced))
            self._left.append((reduced, grad))
        rounds = rounds_of(grads, size)
        for strip in chain.from_iterable(rounds):
            strip.reduced.strips += 1
        for strips in rounds:
            if len(self._rounds) == ROUNDS:
                self._finish_round()
            self._rounds.append(_Round(strips, self._ranks, self._free))
        future = mean_of(self._ranks, bucket.buffer(), others if grads else None)
        if bucket.is_last():
            self._end_backward(self._ranks)
        return future

    def _drop_rounds(self) -> None:
        """Forget the remains of a backward that did not reach its end."""
        while self._rounds:
            round = self._rounds.popleft()
            with on(round.stream):
                round.finish()
        self._filled, self._left = [], []

    def _finish_round(self) -> None:
        round = self._rounds.popleft()
        with on(round.stream):
            for rows in round.finish():
                # Fast in the rows' own dtype, but overflows early: infinity does not mean that the rows are infinite.
                self._filled.append((rows, torch.linalg.vector_norm(rows)))
            for strip in round.strips:
                strip.reduced.strips -= 1
                if not strip.reduced.strips and self.on_final:
                    self.on_final(strip.reduced.param)

    def _end_backward(self, ranks: Ranks) -> None:
        """Finish a backward: wait for all rounds. If a mean is not finite on any rank, mark all gradients on all ranks.

        So each rank's GradScaler, which examines `.grad`, finds the overflow. All gradients are marked because DDP does
        not copy gradients of unused parameters to `.grad`.
        """
        while self._rounds:
            self._finish_round()
        (filled, self._filled), (left, self._left) = (self._filled, []), (self._left, [])
        finite = all(bool(norm.isfinite()) or bool(rows.isfinite().all()) for rows, norm in filled)
        if not all(vote for (vote,) in ranks.gather(finite)):
            for _, grad in left:
                grad[(0,) * grad.dim()] = math.nan

        def set_identities() -> None:
            for reduced, _ in left:
                reduced.identity = _GradIdentity(reduced.param.grad)

        # DDP writes `.grad` in a callback that runs after the callback queued here, which therefore queues
        # set_identities().
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # no backward is running: this rank has run out of data (Join)
            engine.queue_callback(lambda: engine.queue_callback(set_identities))


def _in_order_of(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in DDP's bucket with the strides of its parameter.

    DDP keeps the memory order of a dense `p` in the bucket, but GradBucket.gradients() returns all gradients as if in
    row order.
    """
    is_dense = torch.empty_like(p, device="meta").stride() == p.stride()
    return grad.as_strided(p.shape, p.stride()) if is_dense else grad


def mean_of(ranks: Ranks | None, buffer: torch.Tensor, views: Sequence[torch.Tensor] | None = None) -> Any:
    """Return a future of `buffer` averaged over the ranks as DDP does it. `views`: average only these parts."""
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
