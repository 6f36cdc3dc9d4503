"""The all-gather of updated parameters: each rank sends its shares to all others while later tiles are being updated.

Shares travel in buckets. A bucket holds pieces of parameters, each piece with the elements [first, first + n) of every
rank's share, as far as a share has so many. A bucket leaves when this rank's tiles with its pieces have their new
parameters. All ranks send all buckets in the same order in every step, whatever happens on a rank, so that no rank
waits for a bucket that never comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from ..accelerator import is_on_accelerator
from ..distributed.buckets import ALIGN, IN_FLIGHT, aligned, bucket_bytes, pack, view_in
from ..distributed.ranks import Ranks
from ..distributed.sharding import Partition
from ..params.grad_source import GradSource
from ..params.strides import flat, numel, same_order


class Shared(Protocol):
    """A parameter whose updates the ranks share, such as a ParamState."""

    @property
    def param(self) -> torch.Tensor: ...
    @property
    def part(self) -> Partition: ...
    @property
    def index(self) -> int: ...
    @property
    def local(self) -> torch.Tensor:
        """The part of the parameter that this rank updates."""


class Arrived(Protocol):
    def __call__(self, tiles: np.ndarray[Any, Any], *, wait: bool) -> bool:
        """Return whether the new parameters of these tiles (uint32) are in their tensors. `wait`: block until then."""


class Located(Protocol):
    """The location of parameters, as in Pieces. A "tile" is the number of any unit in which parameters arrive."""

    def of(self, param: int, /) -> np.ndarray[Any, Any]: ...


@dataclass
class _Piece:
    param_state: Shared
    first: int | None  # first element in the share, in the order of flat(); None: all of a share that is not dense
    n: int  # elements, in the largest share; not used for a share that is not dense
    offset: int  # bytes, in the bucket
    bytes: int


@dataclass
class _Bucket:
    ranks: Ranks  # the ranks that exchange it
    pieces: list[_Piece]
    has_vote: bool = False  # each row ends with its rank's vote: see ParamAllGather.vote()
    tiles: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.uint32))
    send_copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (buffer, parameter)
    receive_copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (parameter, buffer)
    buffer: torch.Tensor = field(init=False)  # begins with one row of `bytes` per rank

    @property
    def rows(self) -> list[int]:
        """The indices of the parameters in the bucket, each once."""
        return [*dict.fromkeys(piece.param_state.index for piece in self.pieces)]

    @property
    def bytes(self) -> int:
        return aligned(self.pieces[-1].offset + self.pieces[-1].bytes) + ALIGN * self.has_vote

    @property
    def by_rank(self) -> torch.Tensor:
        """The content: uint8, of shape (ranks, bytes)."""
        return self.buffer[: self.ranks.size * self.bytes].view(self.ranks.size, -1)


class ParamAllGather:
    """The all-gather of `param_states`, reused for every step in which the same parameters take part.

    `param_states` has the same order on all ranks. The object refers to the current memory of the parameters. Without
    parameters all methods do nothing.
    """

    def __init__(
        self, ranks: Ranks | None = None, param_states: Sequence[Shared] = (), pieces: Located | None = None
    ) -> None:
        """`pieces`: the tiles in which parameters arrive; None if only resend() will be called."""
        self.ranks: Ranks | None = ranks
        self.buckets: list[_Bucket] = []
        for device, replicas in {(state.local.device, state.part.replicas): None for state in param_states}:
            assert replicas
            of_them = [state for state in param_states if state.part.replicas is replicas]
            self.buckets += _fill_buckets([state for state in of_them if state.local.device == device], replicas)
        for bucket in self.buckets:
            bucket.has_vote = len(self.buckets) == 1 and bucket.ranks is ranks
        for k, bucket in enumerate(self.buckets):
            if pieces:
                bucket.tiles = np.unique(np.concatenate([_tiles_of(p, pieces) for p in bucket.pieces]))
            self._bind(bucket, self.buckets[k - IN_FLIGHT] if k >= IN_FLIGHT else None)
        self.received_bytes: int = sum(b.bytes * (b.ranks.size - 1) for b in self.buckets)
        self._to_send: deque[_Bucket] = deque()
        self._in_flight: deque[tuple[_Bucket, list[Any]]] = deque()
        self._arrived: Arrived | None = None  # this and what follows: see begin()
        self._sources: Mapping[int, GradSource] = MappingProxyType({})
        self._received: Callable[[list[int]], None] | None = None
        self._awaits_vote = False

    def _bind(self, bucket: _Bucket, before: _Bucket | None) -> None:
        """Give a bucket a buffer, and views of the buffer. `before`: an earlier bucket whose buffer is reused."""
        ranks, size, n = bucket.ranks, bucket.ranks.size, bucket.bytes
        device = bucket.pieces[0].param_state.local.device
        if device.type not in ranks.device_types:
            device = ranks.device
        if before is not None and before.buffer.device == device and before.buffer.numel() >= size * n:
            bucket.buffer = before.buffer
        else:
            bucket.buffer = torch.empty(size * n, dtype=torch.uint8, device=device)
        for piece in bucket.pieces:
            for rank in range(size):
                # Not counted as writes: the step counts one for each parameter, when parameters begin to change.
                share = piece.param_state.part.of_rank(piece.param_state.param, rank).data
                if piece.first is not None:
                    share = flat(share)[piece.first : piece.first + piece.n]
                if not share.numel():
                    continue
                staged = view_in(bucket.buffer, rank * n + piece.offset, share.dtype, share.shape)
                if rank == ranks.rank:
                    bucket.send_copies.append((staged, share))
                else:
                    bucket.receive_copies.append((share, staged))

    @property
    def is_lost(self) -> bool:
        """Whether a rank is lost, so that nothing can be exchanged any more."""
        return bool(self.ranks and self.ranks.lost)

    @property
    def can_vote(self) -> bool:
        """Whether a vote of all ranks can travel with the parameters: in a single bucket, in host memory."""
        return any(b.has_vote and b.ranks is self.ranks and b.buffer.is_cpu for b in self.buckets)

    @property
    def groups(self) -> list[Ranks]:
        """The process groups of the exchange, each once, in the same order on all ranks."""
        return [*dict.fromkeys(bucket.ranks for bucket in self.buckets)]

    def travel_by(self, carriers: Mapping[Ranks, Ranks]) -> None:
        """From now on exchange over other process groups of the same ranks. `carriers`: new group by old group."""
        for k, bucket in enumerate(self.buckets):
            if bucket.ranks not in carriers:
                continue
            bucket.ranks = carriers[bucket.ranks]
            bucket.send_copies.clear()
            bucket.receive_copies.clear()
            self._bind(bucket, self.buckets[k - IN_FLIGHT] if k >= IN_FLIGHT else None)

    def begin(
        self,
        arrived: Arrived | None = None,
        sources: Mapping[int, GradSource] = MappingProxyType({}),
        *,
        descending: bool = False,
        received: Callable[[list[int]], None] | None = None,
        awaits_vote: bool = False,
    ) -> None:
        """Begin a step. `arrived`: given unless advance() will not be called.

        `sources`: by index, parameters whose new values lie in a copy, and are copied back before they are sent.
        `descending`: the last bucket leaves first, since the last tile flows first; the same on all ranks. `received`:
        called for each bucket that has arrived, with the indices of its parameters. `awaits_vote`: nothing is sent
        before vote().
        """
        self._received, self._awaits_vote = received, awaits_vote
        self._to_send = deque(reversed(self.buckets) if descending else self.buckets)
        self._arrived, self._sources = arrived, sources
        self._in_flight.clear()

    def advance(self, *, wait: bool) -> None:
        """Send the buckets that are ready; with `wait` all buckets, each as soon as it is ready.

        Before a vote(), only get ready what it sends, and only with `wait`.
        """
        while self._to_send and (wait or not self._awaits_vote):
            assert self._arrived
            tiles = self._to_send[0].tiles
            receives = wait and bool(self._received and self._in_flight)
            if len(tiles) and not self._arrived(tiles, wait=wait and not receives):
                if not wait:
                    return
                self._receive_next()  # before the wait for tiles, which may take longer
                continue
            for piece in self._to_send[0].pieces:
                if source := self._sources.get(piece.param_state.index):
                    source.copy_back()
            if self._awaits_vote:
                return
            self._send_next()

    def vote(self, failed: bool) -> bool:
        """Send all parameters, with this rank's vote: it has `failed`. Returns whether any rank has; a collective.

        Only if `can_vote`, and once the step is complete or has failed here.
        """
        (bucket,) = self._to_send
        votes = bucket.by_rank[:, -1]
        votes[bucket.ranks.rank] = failed
        self._awaits_vote = False
        try:
            self.finish()
        except BaseException:  # such as a copy that fails: the others have this rank's vote, and will not vote again
            bucket.ranks.lost = True
            raise
        return bool(votes.any())

    def finish(self) -> None:
        """Send the remaining buckets with their present content, and return when all buckets have arrived.

        A no-op before a vote().
        """
        if self._awaits_vote:
            return
        try:
            while self._to_send:
                self._send_next()
            while self._in_flight:
                self._receive_next()
        finally:  # nothing of this step is sent in a later one, and its gradients can be freed
            self._to_send.clear()
            self._in_flight.clear()
            self._arrived, self._sources, self._received = None, MappingProxyType({}), None

    def resend(self) -> None:
        """Send the restored shares once more, after all ranks have undone the step. A no-op if a rank is lost."""
        if not (self.is_lost or any(bucket.ranks.lost for bucket in self.buckets)):
            self.begin()
            self.finish()

    def _send_next(self) -> None:
        if len(self._in_flight) == IN_FLIGHT:
            self._receive_next()
        bucket = self._to_send.popleft()
        _copy(bucket.send_copies)
        self._in_flight.append((bucket, bucket.ranks.exchange(bucket.by_rank)))

    def _receive_next(self) -> None:
        bucket, collectives = self._in_flight.popleft()
        bucket.ranks.wait(collectives)
        _copy(bucket.receive_copies)
        if self._received:
            self._received(bucket.rows)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:  # a copy to the host has to be complete on return
        to, sources = zip(*pairs, strict=True)
        torch._foreach_copy_(list(to), list(sources), non_blocking=is_on_accelerator(to[0]))


def _fill_buckets(param_states: Sequence[Shared], ranks: Ranks) -> list[_Bucket]:
    """Cut the shares that `ranks` have of the parameters of one device into buckets.

    The result is the same on every rank, because it depends only on what all ranks know.
    """
    of_all_ranks = bucket_bytes(sum(state.part.local(state.param).nbytes for state in param_states))
    sizes, dense = [], []
    for state in param_states:
        largest = state.part.of_rank(state.param, 0)
        dense.append(same_order(largest.stride(), torch.empty_like(largest, device="meta").stride(), largest.shape))
        rows = numel(largest) if dense[-1] else min(1, largest.numel())
        sizes.append((rows, largest.nbytes // max(1, rows)))
    return [
        _Bucket(
            ranks,
            [_Piece(param_states[i], first if dense[i] else None, n, at, n * sizes[i][1]) for i, first, n, at in cuts],
        )
        for cuts in pack(sizes, max(1 << 12, of_all_ranks // ranks.size))
    ]


def _tiles_of(piece: _Piece, pieces: Located) -> np.ndarray[Any, Any]:
    """Return the tiles (over all extents) with the elements of a piece of this rank's share."""
    mine = pieces.of(piece.param_state.index)
    if piece.first is not None:
        first = mine["param_first"]
        mine = mine[(first < piece.first + piece.n) & (first + mine["elems"] > piece.first)]
    tiles: np.ndarray[Any, Any] = mine["tile"]
    return tiles
