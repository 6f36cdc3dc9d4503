"""A trainer's view of its model as the owners know it: each parameter's number, and the part that this trainer has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..bindings import PIECE
from ..distributed.sharding import UNSHARDED, Partition, is_flat
from ..errors import CSDRankError, CSDStoreError, CSDValueError
from ..params.groups import members, name_of
from ..params.strides import numel
from ..step.all_gather import ParamAllGather
from .blocks import Block, Bucket, FlatShard, Part, ViewOf, block_of, round_robin
from .remote import RemoteEngine
from .request import Group, describe_group, group_message
from .wire import Address

if TYPE_CHECKING:
    from ..optim.optimizer import CSDOptimizer as _Optimizer
else:
    _Optimizer = object


# Receives tensors from owners. Arguments: buckets by rank, views to write to, callback for each bucket on arrival.
Receive = Callable[[Mapping[int, list[Bucket]], ViewOf, Callable[[int, Bucket], None]], Any]


@dataclass(eq=False)
class TrainerParam:
    """A parameter, and the part of it that this trainer pushes and pulls."""

    param: torch.Tensor
    part: Partition
    name: str
    index: int  # the parameter's number over all groups, by which owners identify it
    block: Block  # the part's block of the whole parameter
    shape: torch.Size  # of the whole parameter, as the owners know it
    stride: tuple[int, ...]
    dtype: torch.dtype
    param_shape: torch.Size  # shape of `param` when this was made: the user may change it later
    steps: float = 0.0
    version: int = -1  # the parameter's version when owners last had its value; -1: they have never had it
    pointer: int = -1  # the parameter's address at that time

    @property
    def local(self) -> torch.Tensor:
        """The part in the parameter's current memory."""
        return self.part.of(self.param)

    @property
    def is_absent(self) -> bool:
        """Whether this trainer's FSDP1 shard is empty: then it has no gradient and no entry in `state`."""
        return isinstance(self.part, FlatShard) and not self.block.numel

    @property
    def is_dirty(self) -> bool:
        return (self.version, self.pointer) != (self.part.version(self.param), self.part.pointer(self.param))

    def mark_synced(self) -> None:
        self.version, self.pointer = self.part.version(self.param), self.part.pointer(self.param)

    def as_part(self, dtype: torch.dtype) -> Part:
        return Part(self.index, tuple(self.shape), self.block, dtype)


class TrainerModel(_Optimizer):
    """The parameters of an optimizer whose states are with owners, and how they travel."""

    _address: Address

    def _reset_model(self) -> None:
        """Reset to the state before the first look at the model."""
        self._known: dict[int, TrainerParam] = {}  # by id of the parameter
        self._flat: dict[int, FlatShard] = {}  # by id of the parameter
        self._gathers: dict[tuple[Any, ...], ParamAllGather] = {}
        self._groups_sent = 0

    @property
    def _is_star(self) -> bool:
        """Whether trainers send their own gradients, and owners sum them."""
        return self._address.route == "star"

    @property
    def _remote(self) -> RemoteEngine:
        assert isinstance(self._engine, RemoteEngine)
        return self._engine

    def _shape_of(self, p: torch.Tensor) -> torch.Size:
        """Return the shape of the whole parameter, as the owners know it."""
        return flat.shape if (flat := self._flat.get(id(p))) else p.shape

    def _exchange_shard_sizes(self) -> None:
        """Exchange the sizes of all trainers' FSDP1 shards; a collective if some parameters are new."""
        flat_params = {id(p): p for _, _, p in members(self.param_groups) if is_flat(p)}
        new = [p for key, p in flat_params.items() if key not in self._flat or self._flat[key].param is not p]
        if new and self._ranks:
            lengths = self._ranks.gather(*(p.numel() for p in new))
            for p, of_ranks in zip(new, zip(*lengths, strict=True), strict=True):
                self._flat[id(p)] = FlatShard(p, self._ranks, of_ranks)

    def _register_params(self) -> None:
        """Record new parameters. Raises CSDStoreError if one replaces a parameter of another shape or dtype."""
        self._exchange_shard_sizes()
        known_before = {known.index: known for known in self._known.values()}
        known: dict[int, TrainerParam] = {}
        for index, (k, i, p) in enumerate(members(self.param_groups)):
            if id(p) in known:
                raise CSDValueError(f"parameter {name_of(self.param_groups, k, i)} is there twice")
            before = known_before.get(index)
            if before is not None and before.param is p and (p.shape, p.dtype) == (before.param_shape, before.dtype):
                known[id(p)] = before
                continue
            part, shape = self._flat.get(id(p)) or self._state_map.part_of(p), self._shape_of(p)
            part = UNSHARDED if self._is_star else part
            block = block_of(part, shape)
            new = TrainerParam(
                p, part, name_of(self.param_groups, k, i), index, block, shape, p.stride(), p.dtype, p.shape
            )
            if before is not None:  # the parameter was replaced, as some training libraries do when they move a model
                if (p.shape, p.dtype, block) != (before.param_shape, before.dtype, before.block):
                    raise CSDStoreError(
                        f"parameter {new.name} is {tuple(p.shape)} {p.dtype} now; the optimizer ranks know it as "
                        f"{tuple(before.param_shape)} {before.dtype}: convert the model before the optimizer is made"
                    )
                new.steps, new.stride = before.steps, before.stride
                self._state_map.state.pop(before.param, None)
            known[id(p)] = new
        if list(known) != list(self._known):
            self._known = known
            self._gathers.clear()

    def _blocks(self, first_group: int) -> list[Block]:
        return [self._known[id(p)].block for k, _, p in members(self.param_groups) if k >= first_group]

    def _describe_group(self, k: int) -> Group:
        return describe_group(self.param_groups, k, self._rule.hyperparameters, self._shape_of, star=self._is_star)

    def _send_new_groups(self) -> None:
        """Tell the owners about new parameter groups."""
        first = self._groups_sent
        new = [group_message(self._describe_group(k)) for k in range(first, len(self.param_groups))]
        self._remote.call({"op": "join", "groups": new}, blocks=self._blocks(first))
        self._groups_sent = len(self.param_groups)

    def _agreed(self, by_rank: Sequence[dict[int, Any]], differ: str) -> dict[int, Any]:
        """Merge what each trainer says about parameters, by number. Raises CSDRankError(differ) if they disagree.

        A trainer whose FSDP1 shard of a parameter is empty need not mention it.
        """
        agreed = {index: value for of_rank in by_rank for index, value in of_rank.items()}
        lengths = {known.index: flat.lengths for key, known in self._known.items() if (flat := self._flat.get(key))}
        for rank, of_rank in enumerate(by_rank):
            present = (index for index in agreed if index not in lengths or lengths[index][rank])
            if any(of_rank.get(index) != agreed[index] for index in present):
                raise CSDRankError(differ)
        return dict(sorted(agreed.items()))

    def _wire_dtype(self, known: TrainerParam) -> torch.dtype:
        """Return a gradient's dtype on the wire. Raises CSDValueError for a `grad_dtype` that cannot be sent."""
        dtype, wanted = known.param.dtype, self.grad_dtype
        if wanted in (None, dtype, torch.float32) and not (wanted and dtype.is_complex):
            return dtype
        if dtype is not torch.float32:
            raise CSDValueError(
                f"Invalid grad_dtype: {wanted}; for optimizer ranks (serve://) it is the parameter's own dtype, or a "
                f"16-bit one for fp32 parameters, and {known.name} is {dtype}"
            )
        assert wanted is not None
        return wanted

    def _value_parts(self, params: Sequence[TrainerParam]) -> tuple[list[Part], ViewOf]:
        """Return parts and views to send or receive the values of parameters."""
        parts = [known.as_part(known.param.dtype) for known in params]
        return parts, views({known.index: (known.local, known.block) for known in params})

    def _receive(self, params: Sequence[TrainerParam], receive: Receive) -> tuple[Any, int]:
        """Receive new values of parameters from owners, and all-gather them among trainers as they arrive.

        `receive` does the receiving from owners. Returns its result, and the number of bytes from other trainers.
        """
        parts, view_of = self._value_parts(params)
        sources = self._remote.buckets_with_owners(parts)
        numbers = {id(bucket): n for n, (_, bucket) in enumerate(round_robin(sources))}
        missing = {*numbers.values()}

        def arrived(_: int, bucket: Bucket) -> None:
            missing.remove(numbers[id(bucket)])
            if gather:
                gather.advance(wait=False)

        with torch.no_grad():
            gather = self._gather(params, sources, numbers)
            if gather:
                gather.begin(lambda tiles, *, wait: missing.isdisjoint(tiles.tolist()))
            try:
                reply = receive(sources, view_of, arrived)
            finally:  # also if the session is over, so that no other trainer waits in vain
                if gather and not gather.ranks.lost:
                    gather.finish()
                torch.autograd.graph.increment_version([known.param for known in params])
        for known in params:
            known.mark_synced()
        return reply, gather.received_bytes if gather else 0

    def _gather(
        self, params: Sequence[TrainerParam], sources: Mapping[int, list[Bucket]], numbers: Mapping[int, int]
    ) -> ParamAllGather | None:
        """Return the cached all-gather among trainers for these parameters; None if there is nothing to gather.

        `numbers`: by id of a bucket.
        """
        divided = [known for known in params if known.part.replicas]
        if not (self._ranks and divided):
            return None
        key = tuple((known.index, known.local.data_ptr()) for known in divided)
        if key not in self._gathers:
            self._gathers.clear()
            shares = [_SharedParam(known.param, known.part, known.local, known.index) for known in divided]
            locations = _BucketLocations(
                {known.index: (known.local, known.block) for known in divided}, sources, numbers
            )
            self._gathers[key] = ParamAllGather(self._ranks, shares, locations)
        return self._gathers[key]


class _BucketLocations:
    """Locates the elements of local parts in buckets (as `Located` of step/all_gather.py; buckets stand for tiles)."""

    def __init__(
        self,
        local: Mapping[int, tuple[torch.Tensor, Block]],
        sources: Mapping[int, list[Bucket]],
        numbers: Mapping[int, int],
    ) -> None:
        locations: dict[int, list[tuple[int, int, int, int, int]]] = {index: [] for index in local}
        for bucket in (bucket for buckets in sources.values() for bucket in buckets):
            for piece in bucket:
                if piece.key not in local:
                    continue
                t, within = local[piece.key]
                first, n = 0, numel(t)
                if t.dim() and t.is_contiguous():  # otherwise the piece may be anywhere in the tensor
                    width = n // t.shape[0]
                    first, n = (piece.block.first[0] - within.first[0]) * width, piece.block.sizes[0] * width
                locations[piece.key].append((piece.key, numbers[id(bucket)], first, 0, n))
        self._locations = {index: np.array(pieces, PIECE) for index, pieces in locations.items()}

    def of(self, param: int, /) -> np.ndarray[Any, Any]:
        return self._locations[param]


@dataclass
class _SharedParam:
    """A parameter as ParamAllGather expects it (`Shared` of step/all_gather.py)."""

    param: torch.Tensor
    part: Partition
    local: torch.Tensor
    index: int


def views(tensors: dict[int, tuple[torch.Tensor, Block]]) -> ViewOf:
    """Return the function that views blocks of tensors. `tensors`: by key, a tensor and the block that it holds."""

    def view_of(key: int, block: Block) -> torch.Tensor:
        tensor, within = tensors[key]
        return block.of(tensor, within)

    return view_of
