"""Which process has which block of a parameter, and how blocks travel: in buckets, of which several are in flight.

A parameter is identified by its number, counted over all groups. Each trainer declares which block of each parameter it
pushes and pulls. Owners divide the rows (dimension 0) as CSDAdam's ranks do under DDP. A trainer and an owner exchange
the intersection of their blocks, split by rows so that no bucket is much larger than the target size. Both sides
compute the same buckets from the same numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..distributed.buckets import IN_FLIGHT, TARGET_BUCKETS, bucket_bytes, pack, view_in
from ..distributed.ranks import Ranks
from ..distributed.sharding import FSDP1Shard, Partition, rows_of
from ..errors import CSDRankError, CSDRuntimeError
from .wire import BULK, Session


class Block(NamedTuple):
    """A block of a tensor: its first index and its size in each dimension."""

    first: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersection(self, other: Block) -> Block:
        """Return the intersection of both, which may be empty."""
        first = tuple(map(max, self.first, other.first))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.first, self.sizes, other.first, other.sizes, strict=True)]
        return Block(first, tuple(max(0, end - f) for f, end in zip(first, ends, strict=True)))

    def of(self, t: torch.Tensor, within: Block) -> torch.Tensor:
        """Return a view of this block in `t`, where `t` contains the block `within`."""
        for dim, (first, start, n) in enumerate(zip(self.first, within.first, self.sizes, strict=True)):
            t = t.narrow(dim, first - start, n)
        return t


def whole(shape: Sequence[int]) -> Block:
    return Block((0,) * len(shape), tuple(shape))


def block_of(part: Partition, shape: Sequence[int]) -> Block:
    """Return the block of a parameter of this shape that `part` stands for."""
    first, sizes = getattr(part, "first", None), getattr(part, "sizes", None)
    return whole(shape) if first is None or sizes is None else Block(tuple(first), tuple(sizes))


class FlatShard(FSDP1Shard):
    """A rank's shard of an FSDP1 flat parameter. To owners the whole is the concatenation of all ranks' shards.

    It is the flattened parameters with padding at the end. With `use_orig_params` there is one such tensor per original
    parameter, without padding, and a rank's shard of it may be empty.
    """

    def __init__(self, p: torch.Tensor, ranks: Ranks, lengths: Sequence[int]) -> None:
        """`lengths`: number of elements on each rank. Raises CSDRuntimeError for a parameter under NO_SHARD."""
        if p.dim() != 1:
            raise CSDRuntimeError(
                f"optimizer ranks (serve://) do not serve parameters that FSDP1 does not shard, such as one of shape "
                f"{tuple(p.shape)}: take DistributedDataParallel instead of NO_SHARD"
            )
        super().__init__(ranks)
        self.param: torch.Tensor = p
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.shape: torch.Size = torch.Size([sum(lengths)])
        self.first: tuple[int] = (sum(lengths[: ranks.rank]),)
        self.sizes: tuple[int] = (lengths[ranks.rank],)


def owned(shape: Sequence[int], owners: int, k: int) -> Block:
    """Return the block that owner k keeps. Every owner keeps all of a zero-dimensional parameter."""
    if not shape:
        return whole(shape)
    first, rows = rows_of(shape[0], owners, k)
    return Block((first, *[0] * (len(shape) - 1)), (rows, *shape[1:]))


class Part(NamedTuple):
    """The block of a tensor that a trainer exchanges with all owners."""

    key: int  # identifies the tensor on both sides
    shape: tuple[int, ...]  # of the whole tensor
    block: Block
    dtype: torch.dtype  # on the wire


class Piece(NamedTuple):
    key: int
    block: Block
    offset: int  # in its bucket, bytes
    dtype: torch.dtype  # on the wire


Bucket = list[Piece]


def buckets_with_owner(
    parts: Iterable[Part], owners: int, k: int, target_buckets: int = TARGET_BUCKETS
) -> list[Bucket]:
    """Return the buckets that travel between a trainer with these parts and owner k, split by rows.

    `target_buckets`: number of buckets to aim for at least; a small model has fewer.
    """
    blocks = [(part, block) for part in parts if (block := part.block.intersection(owned(part.shape, owners, k))).numel]
    sizes = [
        (rows := block.sizes[0] if block.sizes else 1, block.numel // rows * p.dtype.itemsize) for p, block in blocks
    ]
    max_bytes = bucket_bytes(sum(rows * row_bytes for rows, row_bytes in sizes), target_buckets)

    def piece(i: int, first: int, n: int, offset: int) -> Piece:
        part, block = blocks[i]
        cut = Block((block.first[0] + first, *block.first[1:]), (n, *block.sizes[1:])) if block.sizes else block
        return Piece(part.key, cut, offset, part.dtype)

    return [[piece(*cut) for cut in cuts] for cuts in pack(sizes, max_bytes)]


def buffer_bytes(bucket: Bucket) -> int:
    """Return the size of a bucket's buffer, bytes."""
    return bucket[-1].offset + bucket[-1].block.numel * bucket[-1].dtype.itemsize if bucket else 0


ViewOf = Callable[[int, Block], torch.Tensor]  # returns a view of this block of the tensor with this key


Guard = Callable[[], AbstractContextManager[None]]  # entered while tensors are read or written; may raise CSDRankError


def send_buckets(
    session: Session,
    to: Mapping[int, list[Bucket]],
    view_of: ViewOf,
    guard: Guard = nullcontext,
    tag: int = BULK,
    ready: Callable[[Bucket], None] = lambda _: None,
    under_way: deque[Any] | None = None,
) -> None:
    """Send each rank in `to` its buckets. Raises CSDRankError.

    `ready` blocks until a bucket's tensors can be read. `under_way` holds sends of earlier calls, and those of this
    call that are still in flight when it returns; without it this waits for all sends.
    """
    sends = deque() if under_way is None else under_way
    for rank, bucket in round_robin(to):
        while len(sends) >= IN_FLIGHT * len(to):
            session.wait(sends.popleft())
        ready(bucket)
        buffer = torch.empty(buffer_bytes(bucket), dtype=torch.uint8, device="cpu")
        with guard():
            for piece in bucket:
                piece_view(buffer, piece).copy_(view_of(piece.key, piece.block))
        sends.append(session.send(buffer, rank, tag))
    while sends and under_way is None:
        session.wait(sends.popleft())


def receive_buckets(
    session: Session,
    sources: Mapping[int, list[Bucket]],
    view_of: ViewOf,
    guard: Guard = nullcontext,
    tag: int = BULK,
    arrived: Callable[[int, Bucket], None] = lambda _, __: None,
) -> None:
    """Receive what send_buckets() sends. Raises CSDRankError.

    `arrived` is called with a rank and its bucket, inside the guard, when the bucket's data is in its tensors.
    """
    under_way: deque[IncomingBucket] = deque()
    for rank, bucket in round_robin(sources):
        if len(under_way) >= IN_FLIGHT * len(sources):
            under_way.popleft().finish(session, view_of, guard, arrived)
        under_way.append(begin_receive(session, rank, bucket, tag))
    while under_way:
        under_way.popleft().finish(session, view_of, guard, arrived)


class IncomingBucket(NamedTuple):
    """A bucket that is being received into its buffer."""

    work: Any
    buffer: torch.Tensor
    rank: int  # the sender
    bucket: Bucket

    def finish(self, session: Session, view_of: ViewOf, guard: Guard, arrived: Callable[[int, Bucket], None]) -> None:
        """Wait for the bucket and copy it into its tensors; arguments as for receive_buckets()."""
        session.wait(self.work)
        with guard():
            for piece in self.bucket:
                view_of(piece.key, piece.block).copy_(piece_view(self.buffer, piece))
            arrived(self.rank, self.bucket)


def begin_receive(session: Session, rank: int, bucket: Bucket, tag: int) -> IncomingBucket:
    buffer = torch.empty(buffer_bytes(bucket), dtype=torch.uint8, device="cpu")
    return IncomingBucket(session.receive(buffer, rank, tag), buffer, rank, bucket)


def piece_view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return the view of a bucket's buffer (uint8, 1-D) that holds this piece, with the piece's dtype and sizes."""
    return view_in(buffer, piece.offset, piece.dtype, piece.block.sizes)


def round_robin(lists: Mapping[int, list[Bucket]]) -> Iterable[tuple[int, Bucket]]:
    for k in range(max(map(len, lists.values()), default=0)):
        for rank, buckets in lists.items():
            if k < len(buckets):
                yield rank, buckets[k]


def check_cover(names: Sequence[str], shapes: Sequence[Sequence[int]], blocks: Sequence[Sequence[Block]]) -> None:
    """Check that the trainers together have all of each parameter. `blocks`: [trainer][parameter].

    Raises CSDRankError if they do not, or if a block exceeds its parameter.
    """
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        distinct = {of_trainer[i] for of_trainer in blocks if of_trainer[i].numel}
        for block in distinct:
            if (
                len(block.sizes) != len(shape)
                or block.intersection(whole(shape)) != block
                or min(block.sizes, default=0) < 0
            ):
                raise CSDRankError(f"a trainer has a block of {name} that is not within its shape {tuple(shape)}")
        if (have := sum(block.numel for block in distinct)) != math.prod(shape):
            raise CSDRankError(
                f"the trainers of a session have {have} elements of {name}, which has {math.prod(shape)}: all of them "
                "train one model, each with a part of its own, or as replicas"
            )
