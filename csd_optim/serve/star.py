"""The route *star*: each trainer sends its own gradients to the owners of their rows, which sum them in rank order.

With Top-K, entries (values with indices) travel instead. An owner's rows are divided into runs of RUN elements in the
order of its memory, and step/sparse.py selects the entries of each run. The number of words per run follows from the
Top-K ratio, so both sides know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..bindings import topk_count
from ..compression.policy import entry_dtype, ratios
from ..compression.selection import BLOCK_BITS, WORD_ENTRIES, TopK, inverse_of, listed, pack
from ..distributed.buckets import BUCKET_BYTES
from ..errors import CSDRankError
from ..params.groups import Groups
from ..params.strides import flat, ordered
from ..params.summed import Summand
from ..step.sparse import SparsePiece
from ..step.spec import GradOptions
from .blocks import Part, owned, whole

RUN = 1 << 20  # elements


def _blocks(n: int) -> int:
    return -(-n >> BLOCK_BITS)


def words_of(n: int, ratio: float) -> int:
    """Return the number of int32 words per run of `n` elements' entries, as pack() lays out a full run."""
    run = min(n, RUN)
    return topk_count(ratio, run) + WORD_ENTRIES * _blocks(run) + 1


def entries_part(key: int, shape: Sequence[int], owners: int, ratio: float) -> Part:
    """Return the part as which the entries of a parameter of this shape travel: a 2-D int32 tensor.

    Each owner gets the same number of its rows, as many as owner 0 needs, whose part of the parameter is the largest.
    """
    n = owned(shape, owners, 0).numel
    words = -(-n // RUN) * words_of(n, ratio)
    rows = max(1, -(-4 * words // BUCKET_BYTES))
    entries_shape = owners * rows, -(-words // rows)
    return Part(key, entries_shape, whole(entries_shape), torch.int32)


class Source(NamedTuple):
    """A gradient from which a trainer may select entries."""

    key: int  # the parameter's number
    param: torch.Tensor
    stride: tuple[int, ...]  # of the parameter, as owners know it
    grad: torch.Tensor
    group: int
    step: int  # the parameter's step, from 1


class Entries(NamedTuple):
    """The Top-K entries that are sent of a gradient."""

    part: Part
    values: torch.Tensor  # packed entries, int32, of the part's shape
    ratio: float  # of Top-K
    dtype: torch.dtype  # of the gradient values in the entries


# ---- trainers ------------------------------------------------------------------------------


class Selection:
    """Top-K selection of one trainer in a session, with its residuals (bf16, on the gradients' device)."""

    def __init__(self, owners: int) -> None:
        self._owners = owners
        self._residuals: dict[int, dict[int, torch.Tensor]] = {}  # by parameter and owner
        self._new_residuals: dict[int, dict[int, torch.Tensor]] = {}  # residuals that become valid with end()
        self._feedback_pieces: list[SparsePiece] = []  # pieces whose residuals end() updates
        self._sent_in_full: list[int] = []  # parameters that leave no residual in this step

    def is_used(self, topk: float | None, groups: Groups) -> bool:
        """Return whether some gradients travel as entries."""
        return topk is not None or bool(self._residuals) or any(group.get("topk") for group in groups)

    def select(
        self, sources: Sequence[Source], groups: Groups, options: GradOptions, scale: float
    ) -> dict[int, Entries]:
        """Return the entries to send in a step, by parameter number. `scale`: the gradients' factor before clipping.

        Call end() once the step is made; without it the residuals stay as they were. Raises CSDValueError for an
        invalid `topk`.
        """
        self._feedback_pieces.clear()
        self._sent_in_full.clear()
        self._new_residuals.clear()
        if not sources:
            return {}
        scale = float(np.float32(scale))
        ratio_of = ratios(
            [source.param for source in sources],
            np.array([options.error_feedback and source.key in self._residuals for source in sources]),
            [source.group for source in sources],
            groups,
            np.array([source.step for source in sources]),
            options.topk,
            options.topk_warmup,
        )
        out = {}
        for source, ratio in zip(sources, ratio_of.tolist(), strict=True):
            if ratio:
                dtype = entry_dtype(source.grad.dtype, options.grad_dtype)
                topk = TopK(ratio, dtype, None, scale, source.step)
                out[source.key] = self._entries(source, topk, feeds_back=options.error_feedback)
        return out

    def _entries(self, source: Source, topk: TopK, *, feeds_back: bool) -> Entries:
        index, grad, shape = source.key, source.grad, tuple(source.grad.shape)
        like = torch.empty_strided(shape, source.stride, device="meta")
        part = entries_part(index, shape, self._owners, topk.ratio)
        out = torch.zeros(part.shape, dtype=part.dtype, device="cpu")
        for k, words in enumerate(out.view(self._owners, -1)):
            block = owned(shape, self._owners, k)
            if not block.numel:
                continue
            # Elements in the order of the owner's memory.
            rows = flat(ordered(block.of(grad, whole(shape)), torch.empty_like(block.of(like, whole(shape))).stride()))
            residual = self._residual(index, k, rows) if feeds_back else None
            first = block.first[0] * block.numel // block.sizes[0] if shape else 0  # element of the parameter
            run_words = words_of(len(rows), topk.ratio)
            for number, begin in enumerate(range(0, len(rows), RUN)):
                run = slice(begin, begin + RUN)
                piece = SparsePiece(topk, rows[run], None if residual is None else residual[run], first + begin)
                n = len(piece.grad)
                packed = pack([listed(*piece.select(), piece.k, 0, n)], 1, n)[0]
                words[number * run_words :][: len(packed)].copy_(packed)
                if piece.updates_residual:
                    self._feedback_pieces.append(piece)
        if feeds_back and topk.ratio == 1 and inverse_of(topk.scale):
            self._sent_in_full.append(index)
        return Entries(part, out, topk.ratio, topk.dtype)

    def _residual(self, index: int, k: int, rows: torch.Tensor) -> torch.Tensor:
        before = self._residuals.get(index, {}).get(k)
        residual = torch.zeros_like(rows, dtype=torch.bfloat16) if before is None else before.to(rows.device)
        self._new_residuals.setdefault(index, {})[k] = residual
        return residual

    def end(self, *, feeds_back: bool) -> None:
        """Record that the step was made: what was not sent becomes the residual."""
        for piece in self._feedback_pieces:
            piece.feed_back()
        self._residuals |= self._new_residuals
        self._new_residuals.clear()
        for index in self._sent_in_full if feeds_back else [*self._residuals]:
            self._residuals.pop(index, None)


# ---- owners --------------------------------------------------------------------------------


class Contributions:
    """An owner's buffers for gradients, one per trainer and parameter, until a step sums them."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # by trainer and parameter

    def clear(self) -> None:
        self._buffers.clear()

    def buffer(self, trainer: int, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer for a trainer's gradient of a parameter, with shape, dtype and strides of `like` (meta).

        The buffer stays the same as long as these do.
        """
        buffer = self._buffers.get((trainer, index))
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (like.shape, like.dtype, like.stride()):
            self._buffers.pop((trainer, index), None)
            buffer = self._buffers[trainer, index] = torch.empty_like(like, device="cpu")
        return buffer

    def summand(self, trainer: int, index: int, n: int, entries: torch.dtype | None, ratio: float) -> Summand:
        """Return what a trainer has sent of a parameter's `n` elements, for the sum. `ratio`: of Top-K; 0: dense.

        Raises CSDRankError if entries have arrived where dense values were expected, or the reverse.
        """
        buffer = self._buffers.get((trainer, index))
        if buffer is None or (buffer.dtype is torch.int32) is not bool(ratio):
            raise CSDRankError(f"gradient {index} of trainer {trainer} is not what was to be sent")
        if not ratio:
            return Summand(buffer)
        summand = Summand(buffer.view(-1), entries, words_of(n, ratio), min(n, RUN))
        check_entries(summand, n)
        return summand


def check_entries(summand: Summand, n: int) -> None:
    """Check entries of `n` elements, which come from the network. Raises CSDRankError if they exceed their words."""
    runs = -(-n // RUN)
    words = summand.values.numpy().view(np.uint32)[: runs * summand.run_words].reshape(runs, summand.run_words)
    blocks = np.array([_blocks(min(RUN, n - first)) for first in range(0, n, RUN)])
    position = np.zeros(runs, np.int64)
    for block in range(_blocks(min(n, RUN))):
        has = blocks > block
        position[has] += (words[has, position[has]].astype(np.int64) + WORD_ENTRIES) // WORD_ENTRIES * WORD_ENTRIES
        if (position >= summand.run_words).any():  # the last word of a run is not an entry
            raise CSDRankError("a trainer has sent more entries than there is room for")
