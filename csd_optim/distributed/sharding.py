"""Which part of a parameter this process updates: the whole, a shard of a DTensor, or a share of replicas.

The engine handles parts only. `state` shows each part as torch's training libraries and checkpoints expect it: as a
plain tensor, or as the local tensor of a DTensor of the parameter's shape.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import CSDRuntimeError
from ..grad_modes import version_of, writable
from .ranks import Ranks

HOW_TO_SAVE = (
    "Call consolidate_state_dict() on all ranks before rank 0 saves, which takes all states into its memory; or save "
    "on all ranks with torch.distributed.checkpoint, or with the optimizer's own save() where devices are named; or "
    "save no states, and go on from named devices with resume=True; or construct the optimizer with sharded=False, "
    "which stores everything on each rank (docs/distributed.md)"
)


class Partition:
    """How a parameter is divided among processes, and which part of it this process updates.

    The methods of this base class are for a plain tensor that is updated as a whole.
    """

    is_whole = False  # of() returns the whole tensor
    # torch._foreach_* increments no version counter: not a DTensor's nor, on the CPU, its local tensor's.
    writes_uncounted = False
    # Ranks with the same local tensor, each of which updates some rows (dimension 0).
    replicas: Ranks | None = None

    def of_rank(self, t: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the part of `t` that `rank` updates: as of(), for another rank."""
        local = self.local(t)
        return local.narrow(0, *rows_of(local.shape[0], self.replicas.size, rank)) if self.replicas else local

    def local(self, t: torch.Tensor) -> torch.Tensor:
        """Return this process's local tensor of a parameter or gradient, including rows that other ranks update."""
        return writable(t)

    def version(self, p: Any) -> int:
        """Return a counter that increases with each write to a parameter; see version_of()."""
        return version_of(p)

    def pointer(self, p: Any) -> int:
        """Return the address of the parameter's memory."""
        address: int = p.data_ptr()
        return address

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a parameter or gradient: detached, and a view where the tensor permits it."""
        return self.of_rank(t, self.replicas.rank) if self.replicas else self.local(t)

    def is_here(self, t: torch.Tensor) -> bool:
        """Return whether of() returns the part of this gradient without communication."""
        return True

    def of_state(self, value: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a value of the parameter's shape that was assigned in `state`."""
        return value

    def show(self, window: torch.Tensor) -> torch.Tensor:
        """Return the tensor that `state` shows for `window`, the part's state."""
        return window

    def groups(self) -> tuple[Any, ...]:
        """Return the process groups over which the parts' sums of squares add up to the whole parameter's, in order."""
        return ()

    def manifest_fields(self) -> dict[str, Any]:
        """Return what the manifest says about the part: the tensor's shape and the part's place in it."""
        return {}

    def first_element(self) -> int:
        """Return the index of the part's first element in the whole tensor; in memory order if the part is rows."""
        return 0

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the whole tensor, for parts with blocks_by_rank()."""
        raise NotImplementedError

    def run_in(self, p: torch.Tensor) -> tuple[int, int] | None:
        """Return (first element, number of elements) of the part in the parameter, in row-major order.

        None if the part is no contiguous run, or its place is unknown.
        """
        return (0, p.numel()) if self.is_whole else None

    def rows_by_rank(self, ranks: Ranks) -> list[tuple[int, int]] | None:
        """Return which rows (dimension 0) each of these ranks updates: (first row, number of rows).

        None unless these ranks divide the parameter, by rows alone and completely.
        """
        return None

    def blocks_by_rank(self, ranks: Ranks) -> list[tuple[int, int]]:
        """Return rows_by_rank(), which must not be None, in elements."""
        if self._blocks is None:
            rows, per_row = self.rows_by_rank(ranks), math.prod(self.whole_shape[1:])
            assert rows is not None
            self._blocks = [(first * per_row, n * per_row) for first, n in rows]
        return self._blocks

    _blocks: list[tuple[int, int]] | None = None


class Unsharded(Partition):
    """The whole parameter."""

    is_whole = True


class FSDP1Shard(Partition):
    """A shard of FSDP1, which does not tell how the original parameters are divided."""

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = ranks

    def groups(self) -> tuple[Any, ...]:
        return (self.ranks.group,) if self.ranks else ()

    def manifest_fields(self) -> dict[str, Any]:
        return {"of": None}


class _BlockOfTensor(Partition):
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

    @property
    def whole_shape(self) -> torch.Size:
        return self.shape

    def _keep_rows(self, first: int, rows: int) -> None:
        """Reduce the block to some of its rows (dimension 0)."""
        self.first, self.sizes = (self.first[0] + first, *self.first[1:]), (rows, *self.sizes[1:])

    def of_state(self, value: torch.Tensor) -> torch.Tensor:
        if hasattr(value, "to_local"):
            return local_of(value, self.mesh, self.placements)
        for dim, (first, size) in enumerate(zip(self.first, self.sizes, strict=True)):
            value = value.narrow(dim, first, size)
        return value

    def show(self, window: torch.Tensor) -> torch.Tensor:
        return as_dtensor(window, self.mesh, self.placements, self.shape, self.stride)

    def manifest_fields(self) -> dict[str, Any]:
        return {"of": {"shape": list(self.shape), "first": list(self.first)}}

    def first_element(self) -> int:
        return sum(first * math.prod(self.shape[dim + 1 :]) for dim, first in enumerate(self.first))

    def run_in(self, p: torch.Tensor) -> tuple[int, int] | None:
        from torch.distributed.tensor import Shard as ShardOfDim

        # Other blocks, such as strided shards of FSDP2 with tensor parallelism, may be no run.
        if not all(by.is_replicate() or (type(by) is ShardOfDim and by.dim == 0) for by in self.placements):
            return None
        return self.first_element(), math.prod(self.sizes)


class DTensorShard(_BlockOfTensor):
    """The local tensor of a DTensor: FSDP2, tensor parallelism."""

    writes_uncounted = True

    def __init__(self, p: Any) -> None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(placement.is_partial() for placement in p.placements):
            raise CSDRuntimeError(f"csd_optim does not support parameters with placements {p.placements}")
        sizes, first = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        super().__init__(p, p.device_mesh, p.placements, first, sizes)

    def local(self, t: torch.Tensor) -> torch.Tensor:
        return writable(local_of(t.detach(), self.mesh, self.placements))

    def is_here(self, t: Any) -> bool:
        return t.device_mesh == self.mesh and tuple(t.placements) == self.placements

    def version(self, p: Any) -> int:  # a DTensor and its local tensor have separate counters
        return version_of(p) + version_of(p._local_tensor)

    def pointer(self, p: Any) -> int:
        address: int = p._local_tensor.data_ptr()
        return address

    def rows_by_rank(self, ranks: Ranks) -> list[tuple[int, int]] | None:
        from torch.distributed.tensor import Shard as ShardOfDim

        found = []
        for member in ranks.members:
            if not (self.mesh.mesh == member).any():
                return None
            where = (self.mesh.mesh == member).nonzero()[0].tolist()
            first, rows, shared = 0, self.shape[0], None
            for dim, (placement, k) in enumerate(zip(self.placements, where, strict=True)):
                n = self.mesh.size(dim)
                if type(placement) is ShardOfDim and placement.dim == 0:
                    skipped, rows = rows_of(rows, n, k)
                    first += skipped
                elif n > 1:
                    if not placement.is_replicate() or shared or self.replicas is None:
                        return None
                    shared = n, k
            if shared:  # ranks with the same rows divide them
                skipped, rows = rows_of(rows, *shared)
                first += skipped
            found.append((first, rows))
        return found

    def groups(self) -> tuple[Any, ...]:
        dims = [dim for dim, placement in enumerate(self.placements) if not placement.is_replicate()]
        return tuple(self.mesh.get_group(dim) for dim in dims)


class ReplicaShare(DTensorShard):
    """Some rows (dimension 0) of a local tensor that several ranks hold: HSDP, which replicates its shards."""

    replicas: Ranks

    def __init__(self, p: Any, ranks: Ranks, dim: int) -> None:
        super().__init__(p)
        from torch.distributed.tensor import Shard as ShardOfDim

        self.replicas, self._permuted_mesh = ranks.replicas(self.mesh, dim)
        kept = [placement for d, placement in enumerate(self.placements) if d != dim]
        self._row_placements = (*kept, ShardOfDim(0))  # the rows of each shard are divided among its replicas
        first, rows = rows_of(self.sizes[0], self.replicas.size, self.replicas.rank)
        self._keep_rows(first, rows)

    @staticmethod
    def dim_of(p: Any) -> int | None:
        """Return the only mesh dimension along which a DTensor is replicated, if others shard it; or None."""
        replicated = [d for d, placement in enumerate(p.placements) if placement.is_replicate()]
        sharded = any(placement.is_shard() for placement in p.placements)
        return replicated[0] if sharded and len(replicated) == 1 and p.device_mesh.size(replicated[0]) > 1 else None

    def of_state(self, value: torch.Tensor) -> torch.Tensor:
        if not hasattr(value, "to_local"):
            return super().of_state(value)
        if value.device_mesh == self._permuted_mesh:  # type: ignore[attr-defined]
            return local_of(value, self._permuted_mesh, self._row_placements)
        return self.of(value)

    def show(self, window: torch.Tensor) -> torch.Tensor:
        return as_dtensor(window, self._permuted_mesh, self._row_placements, self.shape, self.stride)


class ReplicaShard(_BlockOfTensor):
    """Some rows (dimension 0) of a parameter that all ranks hold, divided as by DTensor and torch.chunk."""

    replicas: Ranks

    def __init__(self, p: torch.Tensor, ranks: Ranks) -> None:
        from torch.distributed.tensor import Shard as ShardOfDim

        super().__init__(p, ranks.mesh, (ShardOfDim(0),), (0,) * p.dim(), tuple(p.shape))
        self.replicas = ranks
        self._keep_rows(*rows_of(p.shape[0], ranks.size, ranks.rank))

    def rows_by_rank(self, ranks: Ranks) -> list[tuple[int, int]] | None:
        if self.replicas.members != ranks.members:
            return None
        return [rows_of(self.shape[0], ranks.size, k) for k in range(ranks.size)]

    def show(self, window: torch.Tensor) -> torch.Tensor:
        shown = super().show(window)
        text = (
            f"rank {self.replicas.rank} holds 1/{self.replicas.size} of the optimizer's states: its state dict alone "
            f"cannot be pickled or saved. {HOW_TO_SAVE}"
        )

        def refuse(_: Any) -> Any:  # a plain function, so that the tensor can still be copied with its attributes
            raise CSDRuntimeError(text)

        # Training libraries that expect AdamW save rank 0's state dict with torch.save(), and would lose the other
        # shares.
        shown.__reduce_ex__ = refuse  # type: ignore[method-assign]
        return shown


UNSHARDED: Partition = Unsharded()


def part_of(p: torch.Tensor, ranks: Ranks | None, *, sharded: bool) -> Partition:
    """Return the part of a parameter that this process updates. `sharded`: ranks divide replicated parameters.

    Raises CSDRuntimeError for a DTensor with Partial placements.
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
    """Return whether `p` is a plain parameter, which ranks may replicate: neither a DTensor nor a shard of FSDP1."""
    return not hasattr(p, "to_local") and not is_flat(p)


def is_fsdp(module: nn.Module) -> bool:
    """Return whether a module belongs to FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_flat(p: torch.Tensor) -> bool:
    """Return whether `p` is FSDP1's flat parameter, or this rank's shard of an original parameter (use_orig_params)."""
    return getattr(p, "_fsdp_flattened", False)


def rows_of(rows: int, n: int, k: int) -> tuple[int, int]:
    """Return the first row and the number of rows of the k-th of n parts, divided like torch.chunk."""
    each = -(-rows // n)
    first = min(k * each, rows)
    return first, min(first + each, rows) - first


def as_dtensor(
    window: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: torch.Size, stride: Sequence[int]
) -> torch.Tensor:
    """Return the DTensor with this local tensor; `shape` and `stride` are the whole's."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    # DTensor.from_local() would copy the window to the GPU if the mesh is on one.
    spec = DTensorSpec(mesh, tuple(placements), TensorMeta(shape, tuple(stride), window.dtype))
    return DTensor(window, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def whole_of(t: Any) -> torch.Tensor:
    """Return a whole DTensor in host memory. A collective through the mesh's devices, whatever the device of `t`."""
    from torch.distributed.tensor import DTensor

    dtensor = DTensor.from_local(
        t.to_local(), t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride()
    )
    return dtensor.full_tensor().cpu()


def local_of(t: Any, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """Return the local tensor of a DTensor; a collective if the DTensor must be redistributed to these placements."""
    if t.device_mesh != mesh or tuple(t.placements) != tuple(placements):
        t = t.redistribute(mesh, placements)
    local: Any = t.to_local()
    done: torch.Tensor = local.wait() if hasattr(local, "wait") else local  # redistribute() may still be in flight
    return done
