"""Which part of a parameter this process updates: all of it, its shard of a DTensor, or its share of replicas.

The engine knows parts only. Beside them stand the parameters, and `state`, which shows each part as trainers and
checkpoints of torch want to see it: as it is, or as the local tensor of a DTensor of the parameter's shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..errors import CSDRuntimeError
from .ranks import Ranks


class Partition:
    """How a parameter is divided among processes, and which part of it this one updates.

    What is said here is true where all of a plain tensor is updated.
    """

    is_whole = False  # of() has nothing to take out
    # torch._foreach_* writes to it without counting, neither in a DTensor nor, on the CPU, in its local tensor.
    writes_uncounted = False
    # Those that hold the local tensor alike, and each update some rows (of dimension 0) of it.
    replicas: Ranks | None = None

    def of_rank(self, t: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of one of the replicas, as of()."""
        local = self.local(t)
        return local.narrow(0, *rows_of(local.shape[0], self.replicas.size, rank)) if self.replicas else local

    def local(self, t: torch.Tensor) -> torch.Tensor:
        """What this process has of a parameter, or of a gradient, whoever updates it."""
        return t.detach()

    def version(self, p: Any) -> int:
        """Counts what was written to a parameter."""
        count: int = p._version
        return count

    def pointer(self, p: Any) -> int:
        """Where the parameter lies."""
        address: int = p.data_ptr()
        return address

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The part of a parameter, or of a gradient: a view where the tensor has it, detached."""
        return self.of_rank(t, self.replicas.rank) if self.replicas else self.local(t)

    def of_state(self, value: torch.Tensor) -> torch.Tensor:
        """The part of a value of the parameter's shape, as somebody put it into `state`."""
        return value

    def show(self, window: torch.Tensor) -> torch.Tensor:
        """What `state` shows of the part's state."""
        return window

    def groups(self) -> tuple[Any, ...]:
        """Process groups, one after another, over which the squares of gradients sum up to those of the parameter."""
        return ()

    def about(self) -> dict[str, Any]:
        """For the manifest: of which tensor it is a part, and where in it."""
        return {}

    def first_element(self) -> int:
        """Which of the whole tensor's is the part's first; of rows, in the order of memory."""
        return 0


class Unsharded(Partition):
    """All of it."""

    is_whole = True


class FSDP1Shard(Partition):
    """Of FSDP1: what it is the shard of is FSDP's own business."""

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks

    def groups(self) -> tuple[Any, ...]:
        return (self.ranks.group,) if self.ranks else ()

    def about(self) -> dict[str, Any]:
        return {"of": None}


class _OfTensor(Partition):
    """A block of a larger tensor: `shape` and `stride` of the whole, `first` and `sizes` of the block."""

    def __init__(
        self, p: Any, mesh: Any, placements: tuple[Any, ...], first: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        self.mesh: Any = mesh
        self.placements: tuple[Any, ...] = placements
        self.shape: torch.Size = p.shape
        self.stride: tuple[int, ...] = p.stride()
        self.first: tuple[int, ...] = first
        self.sizes: tuple[int, ...] = sizes

    def _keep_rows(self, first: int, rows: int) -> None:
        """Makes it these rows (of dimension 0) of the block that it was."""
        self.first, self.sizes = (self.first[0] + first, *self.first[1:]), (rows, *self.sizes[1:])

    def of_state(self, value: torch.Tensor) -> torch.Tensor:
        if hasattr(value, "to_local"):
            return local_of(value, self.mesh, self.placements)
        for dim, (first, size) in enumerate(zip(self.first, self.sizes, strict=True)):
            value = value.narrow(dim, first, size)
        return value

    def show(self, window: torch.Tensor) -> torch.Tensor:
        return shown_as(window, self.mesh, self.placements, self.shape, self.stride)

    def about(self) -> dict[str, Any]:
        return {"of": {"shape": list(self.shape), "first": list(self.first)}}

    def first_element(self) -> int:
        return sum(first * math.prod(self.shape[dim + 1 :]) for dim, first in enumerate(self.first))


class DTensorShard(_OfTensor):
    """The local tensor of a DTensor: FSDP2, tensor parallelism."""

    writes_uncounted = True

    def __init__(self, p: Any) -> None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in p.placements):
            raise CSDRuntimeError(f"csd_optim does not support parameters with placements {p.placements}")
        sizes, first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        super().__init__(p, p.device_mesh, p.placements, first, sizes)

    def local(self, t: torch.Tensor) -> torch.Tensor:
        return local_of(t.detach(), self.mesh, self.placements)

    def version(self, p: Any) -> int:  # a DTensor counts apart from its local tensor
        count: int = p._version + p._local_tensor._version
        return count

    def pointer(self, p: Any) -> int:
        address: int = p._local_tensor.data_ptr()
        return address

    def groups(self) -> tuple[Any, ...]:
        dims = [dim for dim, placement in enumerate(self.placements) if not placement.is_replicate()]
        return tuple(self.mesh.get_group(dim) for dim in dims)


class ReplicaShare(DTensorShard):
    """Some rows (of dimension 0) of a local tensor that ranks hold alike: of HSDP, which replicates what it shards."""

    replicas: Ranks

    def __init__(self, p: Any, ranks: Ranks, dim: int) -> None:
        super().__init__(p)
        from torch.distributed.tensor import Shard as ShardOfDim

        self.replicas, self._turned = ranks.replicas(self.mesh, dim)
        kept = [placement for d, placement in enumerate(self.placements) if d != dim]
        self._divided = (*kept, ShardOfDim(0))  # the rows of each shard, once more
        first, rows = rows_of(self.sizes[0], self.replicas.size, self.replicas.rank)
        self._keep_rows(first, rows)

    @staticmethod
    def dim_of(p: Any) -> int | None:
        """The dimension of the mesh along which a DTensor is replicated, if along others it is sharded."""
        replicated = [d for d, placement in enumerate(p.placements) if placement.is_replicate()]
        sharded = any(placement.is_shard() for placement in p.placements)
        return replicated[0] if sharded and len(replicated) == 1 and p.device_mesh.size(replicated[0]) > 1 else None

    def of_state(self, value: torch.Tensor) -> torch.Tensor:
        if not hasattr(value, "to_local"):
            return super().of_state(value)
        if value.device_mesh == self._turned:  # type: ignore[attr-defined]
            return local_of(value, self._turned, self._divided)
        return self.of(value)

    def show(self, window: torch.Tensor) -> torch.Tensor:
        return shown_as(window, self._turned, self._divided, self.shape, self.stride)


class ReplicaShard(_OfTensor):
    """Some rows (of dimension 0) of a parameter that all ranks hold alike, as DTensor and torch.chunk divide them."""

    replicas: Ranks

    def __init__(self, p: torch.Tensor, ranks: Ranks) -> None:
        from torch.distributed.tensor import Shard as ShardOfDim

        super().__init__(p, ranks.mesh, (ShardOfDim(0),), (0,) * p.dim(), tuple(p.shape))
        self.replicas = ranks
        self._keep_rows(*rows_of(p.shape[0], ranks.size, ranks.rank))

    def show(self, window: torch.Tensor) -> torch.Tensor:
        shown = super().show(window)
        text = (
            f"rank {self.replicas.rank} holds 1/{self.replicas.size} of the optimizer's states: its state dict alone "
            "cannot be pickled or saved. Call consolidate_state_dict() on all ranks before, which takes all states "
            "into memory; or save on all ranks with torch.distributed.checkpoint, or with CSDAdam.save() where devices "
            "are named; or construct CSDAdam with sharded=False (docs/distributed.md)"
        )

        def refuse(_: Any) -> Any:  # a plain function: the tensor can still be copied, with its attributes
            raise CSDRuntimeError(text)

        # Trainers that know AdamW alone write rank 0's state dict with torch.save(), and would lose the others' shares.
        shown.__reduce_ex__ = refuse  # type: ignore[method-assign]
        return shown


UNSHARDED: Partition = Unsharded()


def part_of(p: torch.Tensor, ranks: Ranks | None, *, sharded: bool) -> Partition:
    """The part of a parameter that this process updates. `sharded`: what the ranks hold alike, they share.

    Raises CSDRuntimeError for a DTensor that is no parameter's.
    """
    if hasattr(p, "to_local"):
        dim = ReplicaShare.dim_of(p) if ranks is not None and sharded else None
        return DTensorShard(p) if ranks is None or dim is None else ReplicaShare(p, ranks, dim)
    if is_lazy(p):
        return UNSHARDED
    if is_flat(p):
        return FSDP1Shard(ranks)
    if ranks is None or not sharded or p.dim() == 0:
        return UNSHARDED
    return ReplicaShard(p, ranks)


def is_replicated(p: torch.Tensor) -> bool:
    """Is it a plain parameter, that ranks may hold alike? Not a DTensor, nor a shard of FSDP1."""
    return not hasattr(p, "to_local") and not is_flat(p)


def is_flat(p: torch.Tensor) -> bool:
    """Is it of FSDP1: its flat parameter, or what this rank has of one that it has flattened?"""
    return getattr(p, "_fsdp_flattened", False)


def rows_of(rows: int, n: int, k: int) -> tuple[int, int]:
    """First row and number of rows of the k-th of n parts, as torch.chunk has them."""
    each = -(-rows // n)
    first = min(k * each, rows)
    return first, min(first + each, rows) - first


def shown_as(
    window: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> torch.Tensor:
    """The DTensor with this local tensor, `shape` and `stride` of the whole."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # DTensor.from_local() would copy the window to the GPU, if that is where the mesh is.
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, tuple(stride), window.dtype))
    return DTensor(window, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def whole_of(t: Any) -> torch.Tensor:
    """All of a DTensor, in host memory; a collective. It goes by the devices of the mesh, wherever `t` is."""
    from torch.distributed.tensor import DTensor

    there = DTensor.from_local(
        t.to_local(), t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
    )
    return there.full_tensor().cpu()


def local_of(t: Any, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """The local tensor of a DTensor, brought to these placements if it has others: a collective then."""
    if t.device_mesh != mesh or tuple(t.placements) != tuple(placements):
        t = t.redistribute(mesh, placements)
    local: Any = t.to_local()
    of: torch.Tensor = local.wait() if hasattr(local, "wait") else local  # of a collective that is under way
    return of
