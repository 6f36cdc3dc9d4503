"""The route *star*: each trainer sends its own gradients to the owners of their rows, which add them up in its order.

With Top-K entries travel: of each run of RUN elements of an owner's rows, in the order of its memory, those that
step/sparse.py selects. How many words that takes follows from the share, so that both sides know it.
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
from ..step.prepare import GradOptions
from ..step.sparse import SparsePiece
from .blocks import Part, owned, whole

RUN = 1 << 20  # elements


def _blocks(n: int) -> int:
    return -(-n >> BLOCK_BITS)


def words_of(n: int, ratio: float) -> int:
    """Of each run of `n` elements: as pack() lays out the entries of one that is full."""
    run = min(n, RUN)
    return topk_count(ratio, run) + WORD_ENTRIES * _blocks(run) + 1


def entries_part(key: int, shape: Sequence[int], owners: int, ratio: float) -> Part:
    """How the entries of a parameter of this shape travel: to each owner some rows, as many as the first one needs."""
    n = owned(shape, owners, 0).numel
    words = -(-n // RUN) * words_of(n, ratio)
    rows = max(1, -(-4 * words // BUCKET_BYTES))
    travels = owners * rows, -(-words // rows)
    return Part(key, travels, whole(travels), torch.int32)


class Source(NamedTuple):
    """A gradient of a trainer."""

    key: int  # of its parameter
    param: torch.Tensor
    stride: tuple[int, ...]  # of the parameter, as owners know it
    grad: torch.Tensor
    group: int
    step: int  # of the parameter, from 1


class Entries(NamedTuple):
    """What is sent of a gradient with Top-K."""

    part: Part
    values: torch.Tensor  # int32, of the part
    share: float
    dtype: torch.dtype  # of the gradient's values among them


# ---- trainers ------------------------------------------------------------------------------


class Selection:
    """What one trainer selects from its gradients in a session, and what it owes of them: bf16, on their device."""

    def __init__(self, owners: int) -> None:
        self._owners = owners
        self._residuals: dict[int, dict[int, torch.Tensor]] = {}  # by parameter and owner
        self._fed_back: dict[int, dict[int, torch.Tensor]] = {}  # what they are after the step that select() begins
        self._owing: list[SparsePiece] = []
        self._all_sent: list[int] = []

    def is_used(self, topk: float | None, groups: Groups) -> bool:
        """Do gradients go as entries, some of them?"""
        return topk is not None or bool(self._residuals) or any(group.get("topk") for group in groups)

    def select(
        self, sources: Sequence[Source], groups: Groups, options: GradOptions, scale: float
    ) -> dict[int, Entries]:
        """What goes as entries in a step, by number of the parameter. `scale`: the gradients', without the clipping.

        To be followed by end(); if it is not, the step was not made, and nothing has changed.
        Raises CSDValueError if a `topk` is none.
        """
        self._owing.clear()
        self._all_sent.clear()
        self._fed_back.clear()
        if not sources:
            return {}
        scale = float(np.float32(scale))
        shares = ratios(
            [source.param for source in sources],
            np.array([options.error_feedback and source.key in self._residuals for source in sources]),
            [source.group for source in sources],
            groups,
            np.array([source.step for source in sources]),
            options.topk,
            options.topk_warmup,
        )
        out = {}
        for source, share in zip(sources, shares.tolist(), strict=True):
            if share:
                dtype = entry_dtype(source.grad.dtype, options.grad_dtype)
                topk = TopK(share, dtype, None, scale, source.step)
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
            # In the order that the owner's memory has.
            rows = flat(ordered(block.of(grad, whole(shape)), torch.empty_like(block.of(like, whole(shape))).stride()))
            residual = self._residual(index, k, rows) if feeds_back else None
            first = block.first[0] * block.numel // block.sizes[0] if shape else 0  # of the parameter's
            of_run = words_of(len(rows), topk.ratio)
            for number, begin in enumerate(range(0, len(rows), RUN)):
                here = slice(begin, begin + RUN)
                piece = SparsePiece(topk, rows[here], None if residual is None else residual[here], first + begin)
                n = len(piece.grad)
                packed = pack([listed(*piece.select(), piece.k, 0, n)], 1, n)[0]
                words[number * of_run :][: len(packed)].copy_(packed)
                if piece.owes:
                    self._owing.append(piece)
        if feeds_back and topk.ratio == 1 and inverse_of(topk.scale):
            self._all_sent.append(index)
        return Entries(part, out, topk.ratio, topk.dtype)

    def _residual(self, index: int, k: int, rows: torch.Tensor) -> torch.Tensor:
        before = self._residuals.get(index, {}).get(k)
        residual = torch.zeros_like(rows, dtype=torch.bfloat16) if before is None else before.to(rows.device)
        self._fed_back.setdefault(index, {})[k] = residual
        return residual

    def end(self, *, feeds_back: bool) -> None:
        """The step is made: what was not sent is owed."""
        for piece in self._owing:
            piece.feed_back()
        self._residuals |= self._fed_back
        self._fed_back.clear()
        for index in self._all_sent if feeds_back else [*self._residuals]:
            self._residuals.pop(index, None)


# ---- owners --------------------------------------------------------------------------------


class Contributions:
    """An owner's memory for the gradients of trainers, which stay apart until a step adds them up."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, int], torch.Tensor] = {}  # by trainer and parameter

    def clear(self) -> None:
        self._rooms.clear()

    def room(self, trainer: int, index: int, like: torch.Tensor) -> torch.Tensor:
        """For what a trainer sends of a parameter: memory as `like`, on the meta device, has it; the same until that
        is another."""
        room = self._rooms.get((trainer, index))
        if room is None or (room.shape, room.dtype, room.stride()) != (like.shape, like.dtype, like.stride()):
            self._rooms.pop((trainer, index), None)
            room = self._rooms[trainer, index] = torch.empty_like(like, device="cpu")
        return room

    def summand(self, trainer: int, index: int, n: int, entries: torch.dtype | None, ratio: float) -> Summand:
        """What a trainer has sent of `n` elements of a parameter. Raises CSDRankError if that is of another kind."""
        room = self._rooms.get((trainer, index))
        if room is None or (room.dtype is torch.int32) is not bool(ratio):
            raise CSDRankError(f"gradient {index} of trainer {trainer} is not what was to be sent")
        if not ratio:
            return Summand(room)
        summand = Summand(room.view(-1), entries, words_of(n, ratio), min(n, RUN))
        check_entries(summand, n)
        return summand


def check_entries(summand: Summand, n: int) -> None:
    """Raises CSDRankError where entries of `n` elements would run beyond their words: somebody else has made them."""
    runs = -(-n // RUN)
    words = summand.values.numpy().view(np.uint32)[: runs * summand.run_words].reshape(runs, summand.run_words)
    blocks = np.array([_blocks(min(RUN, n - first)) for first in range(0, n, RUN)])
    at = np.zeros(runs, np.int64)
    for block in range(_blocks(min(n, RUN))):
        has = blocks > block
        at[has] += (words[has, at[has]].astype(np.int64) + WORD_ENTRIES) // WORD_ENTRIES * WORD_ENTRIES
        if (at >= summand.run_words).any():  # the last word is none of them
            raise CSDRankError("a trainer has sent more entries than there is room for")
