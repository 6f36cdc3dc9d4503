"""Who has which block of a parameter, and how blocks travel: in buckets, several under way.

A parameter is known by its number, counted over all groups. Each trainer says which block of each parameter it pushes
and pulls; owners divide rows (of dimension 0) as the ranks of DDP do. What two of them have in common travels, split by
rows, so that no bucket is much larger than it has to be. Both sides work that out from the same numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from ..distributed.buckets import FEWEST, bucket_bytes
from ..distributed.ranks import Ranks
from ..distributed.sharding import FSDP1Shard, Partition, rows_of
from ..errors import CSDRankError, CSDRuntimeError
from ..store.layout import round_up
from .wire import BULK, Session

ALIGN = 16  # bytes: any dtype may begin there
IN_FLIGHT = 3  # buckets to or from one other process


class Block(NamedTuple):
    """Of a tensor: where it begins in each dimension, and how large it is there."""

    first: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def common(self, other: Block) -> Block:
        """What both have; empty if nothing."""
        first = tuple(map(max, self.first, other.first))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.first, self.sizes, other.first, other.sizes, strict=True)]
        return Block(first, tuple(max(0, end - f) for f, end in zip(first, ends, strict=True)))

    def of(self, t: torch.Tensor, within: Block) -> torch.Tensor:
        """This block of a tensor that is the block `within`: a view."""
        for dim, (first, start, n) in enumerate(zip(self.first, within.first, self.sizes, strict=True)):
            t = t.narrow(dim, first - start, n)
        return t


def whole(shape: Sequence[int]) -> Block:
    return Block((0,) * len(shape), tuple(shape))


def block_of(part: Partition, shape: Sequence[int]) -> Block:
    """The block of a parameter of this shape that a trainer updates."""
    first, sizes = getattr(part, "first", None), getattr(part, "sizes", None)
    return whole(shape) if first is None or sizes is None else Block(tuple(first), tuple(sizes))


class FlatShard(FSDP1Shard):
    """Of FSDP1, for owners: what all ranks have of a flat parameter, one after another, is the whole.

    That is what was flattened, padded at its end; with `use_orig_params` it is not padded, and some have nothing of it.
    """

    def __init__(self, p: torch.Tensor, ranks: Ranks, lengths: Sequence[int]) -> None:
        """`lengths`: elements that each rank has. Raises CSDRuntimeError for NO_SHARD."""
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
    """The block that owner k keeps. Of what has no dimension every owner keeps all."""
    if not shape:
        return whole(shape)
    first, rows = rows_of(shape[0], owners, k)
    return Block((first, *[0] * (len(shape) - 1)), (rows, *shape[1:]))


class Part(NamedTuple):
    """What a trainer has of a tensor and exchanges with all owners."""

    key: int  # both sides know which tensor that is
    shape: tuple[int, ...]  # of all of it
    block: Block
    dtype: torch.dtype  # as it travels


class Piece(NamedTuple):
    key: int
    block: Block
    offset: int  # in its bucket, bytes
    dtype: torch.dtype  # as it travels


Bucket = list[Piece]


def with_owner(parts: Iterable[Part], owners: int, k: int, fewest: int = FEWEST) -> list[Bucket]:
    """What goes between a trainer with these parts and owner k: cut by rows, one piece after another.

    `fewest`: buckets are so small that there are about as many, if there is enough for that.
    """
    out: list[Bucket] = []
    room = 0
    blocks = [(part, block) for part in parts if (block := part.block.common(owned(part.shape, owners, k))).numel]
    most = bucket_bytes(sum(block.numel * part.dtype.itemsize for part, block in blocks), fewest)
    for part, block in blocks:
        rows = block.sizes[0] if block.sizes else 1
        row_bytes = block.numel // rows * part.dtype.itemsize
        first = 0
        while first < rows:
            fits = room // row_bytes
            if not fits:
                out.append([])
                room, fits = most, max(1, most // row_bytes)
            n = min(fits, rows - first)
            cut = Block((block.first[0] + first, *block.first[1:]), (n, *block.sizes[1:])) if block.sizes else block
            out[-1].append(Piece(part.key, cut, round_up(end_of(out[-1]), ALIGN), part.dtype))
            room = max(0, most - round_up(end_of(out[-1]), ALIGN))
            first += n
    return out


def end_of(bucket: Bucket) -> int:
    """The size of a bucket's buffer, bytes."""
    return bucket[-1].offset + bucket[-1].block.numel * bucket[-1].dtype.itemsize if bucket else 0


ViewOf = Callable[[int, Block], torch.Tensor]  # of a part's key: this block of the tensor, in memory


Guard = Callable[[], AbstractContextManager[None]]  # held while memory is read or written; may raise CSDRankError


def send_buckets(
    session: Session,
    to: Mapping[int, list[Bucket]],
    view_of: ViewOf,
    guard: Guard = nullcontext,
    tag: int = BULK,
    ready: Callable[[Bucket], None] = lambda _: None,
    under_way: deque[Any] | None = None,
) -> None:
    """Sends each rank its buckets. `ready` returns when one can be read. Raises CSDRankError.

    `under_way`: what is still being sent when this returns, and was when it was called; without, it waits for all.
    """
    sends = deque() if under_way is None else under_way
    for rank, bucket in by_turns(to):
        while len(sends) >= IN_FLIGHT * len(to):
            session.wait(sends.popleft())
        ready(bucket)
        buffer = torch.empty(end_of(bucket), dtype=torch.uint8, device="cpu")
        with guard():
            for piece in bucket:
                room_of(buffer, piece).copy_(view_of(piece.key, piece.block))
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
    """Receives what send_buckets() sends; `arrived` is told, within the guard, what of a rank is where it belongs.

    Raises CSDRankError.
    """
    under_way: deque[Coming] = deque()
    for rank, bucket in by_turns(sources):
        if len(under_way) >= IN_FLIGHT * len(sources):
            under_way.popleft().take(session, view_of, guard, arrived)
        under_way.append(begin_receiving(session, rank, bucket, tag))
    while under_way:
        under_way.popleft().take(session, view_of, guard, arrived)


class Coming(NamedTuple):
    """A bucket for which there is room."""

    work: Any
    buffer: torch.Tensor
    rank: int  # that sends it
    bucket: Bucket

    def take(self, session: Session, view_of: ViewOf, guard: Guard, arrived: Callable[[int, Bucket], None]) -> None:
        """Waits for it, and puts it where it belongs; as of receive_buckets()."""
        session.wait(self.work)
        with guard():
            for piece in self.bucket:
                view_of(piece.key, piece.block).copy_(room_of(self.buffer, piece))
            arrived(self.rank, self.bucket)


def begin_receiving(session: Session, rank: int, bucket: Bucket, tag: int) -> Coming:
    buffer = torch.empty(end_of(bucket), dtype=torch.uint8, device="cpu")
    return Coming(session.receive(buffer, rank, tag), buffer, rank, bucket)


def room_of(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Where a piece is in its bucket's buffer (uint8, 1-D): a view of the piece's dtype and sizes."""
    n = piece.block.numel * piece.dtype.itemsize
    return buffer[piece.offset : piece.offset + n].view(piece.dtype).view(piece.block.sizes)


def by_turns(lists: Mapping[int, list[Bucket]]) -> Iterable[tuple[int, Bucket]]:
    for k in range(max(map(len, lists.values()), default=0)):
        for rank, of_rank in lists.items():
            if k < len(of_rank):
                yield rank, of_rank[k]


def check_cover(names: Sequence[str], shapes: Sequence[Sequence[int]], blocks: Sequence[Sequence[Block]]) -> None:
    """`blocks`: of each trainer, of each parameter. Raises CSDRankError unless together they have all of each."""
    for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        different = {of_trainer[i] for of_trainer in blocks if of_trainer[i].numel}
        for block in different:
            if len(block.sizes) != len(shape) or block.common(whole(shape)) != block or min(block.sizes, default=0) < 0:
                raise CSDRankError(f"a trainer has a block of {name} that is not within its shape {tuple(shape)}")
        if (have := sum(block.numel for block in different)) != math.prod(shape):
            raise CSDRankError(
                f"the trainers of a session have {have} elements of {name}, which has {math.prod(shape)}: all of them "
                "train one model, each with a part of its own, or as replicas"
            )
