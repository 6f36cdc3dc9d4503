"""The processes that train together. torch.distributed carries everything between them.

Every method of `Ranks` that talks to the others is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..accelerator import on_device
from ..errors import CSDRankError, CSDValueError

LINGER = 0.1  # seconds at exit
EXCHANGE = 0x435344  # a tag that nobody else uses


@functools.cache
def _linger_at_exit() -> None:
    """Gives gloo's threads time to let go of tensors, for which they take the interpreter when a collective is done.

    If the script, and with it the interpreter, came to its end in that moment, the process would abort.
    """
    atexit.register(time.sleep, LINGER)


@dataclass
class Said:
    """What ranks tell each other at the end of what they do together: see Ranks.all_ranks_or_none()."""

    own: Any = None  # of this rank, plain values
    by_ranks: list[Any] = field(default_factory=list)  # of all of them, when it is done


class Ranks:
    """The ranks of a process group, more than one; `rank` is this process's among them."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.device_types: list[str] = [device.type for device in group._device_types]
        self.device: torch.device = device_of(group)
        self.lost: bool = False  # a rank is gone: nothing can be sent any more
        self._replicas: dict[Any, tuple[Ranks, Any]] = {}
        _linger_at_exit()

    @functools.cached_property
    def mesh(self) -> Any:
        """The ranks as a one-dimensional device mesh."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type)

    def replicas(self, mesh: Any, dim: int) -> tuple[Ranks, Any]:
        """The ranks along a dimension of a device mesh, and the same mesh with that dimension last."""
        if (mesh, dim) not in self._replicas:
            from torch.distributed.device_mesh import DeviceMesh

            ranks = Ranks(mesh.get_group(dim))
            if ranks.device.type == self.device.type:
                ranks.device = self.device
            order = [*(d for d in range(mesh.ndim) if d != dim), dim]
            groups = [mesh.get_group(d) for d in order]
            names = mesh.mesh_dim_names or [f"dim_{d}" for d in range(mesh.ndim)]
            turned = DeviceMesh.from_group(
                groups,
                mesh.device_type,
                mesh=mesh.mesh.permute(order).contiguous(),
                mesh_dim_names=tuple(names[d] for d in order),
            )
            self._replicas[mesh, dim] = ranks, turned
        return self._replicas[mesh, dim]

    @functools.cached_property
    def _is_gloo(self) -> bool:
        """Does gloo carry what is in host memory? Others may know no all_to_all."""
        return self.device.type == "cpu" and bool(self.group._get_backend(self.device).name() == "gloo")

    @property
    def is_world(self) -> bool:
        """Are these all ranks that there are?"""
        return self.group is dist.group.WORLD

    def gather(self, *values: float, dtype: torch.dtype = torch.int64) -> list[tuple[Any, ...]]:
        """Everybody's values (as many on every rank), by rank."""
        own = torch.tensor(values, dtype=dtype, device=self.device)
        out = own.new_empty(self.size, len(values))
        if self._is_gloo:  # from each straight to each: its all_gather goes from one to the next
            each = [len(values)] * self.size
            self.wait([self.all_to_all(out.view(-1), each, own.repeat(self.size), each)])
        else:
            self.wait([self.all_gather(out.view(-1), own)])
        return [tuple(row) for row in out.tolist()]

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> Any:
        """Begins to concatenate everybody's `own` (1-D, the same size and dtype on every rank) in `out`."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
        with self._noting_loss():
            return gather(out, own, group=self.group, async_op=True)

    def all_to_all(self, out: torch.Tensor, out_sizes: list[int], own: torch.Tensor, own_sizes: list[int]) -> Any:
        """Begins to send rank k the k-th part of `own` (1-D), of `own_sizes[k]` elements; `out` is what comes."""
        with self._noting_loss():
            return dist.all_to_all_single(out, own, out_sizes, own_sizes, group=self.group, async_op=True)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Begins to sum everybody's tensors, in place."""
        with self._noting_loss():
            return dist.all_reduce(tensor, group=self.group, async_op=True)

    def exchange(self, rows: torch.Tensor) -> list[Any]:
        """Begins to fill a contiguous tensor of a row per rank: each rank has its own there, and gets the others'."""
        if rows.device.type != "cpu":
            return [self.all_gather(rows.view(-1), rows[self.rank])]
        # gloo's all_gather goes through new memory each time, and only two of its broadcasts are under way at once.
        # From each straight to each, all are: where links are the limit, that is what counts.
        others = [(self.rank + k) % self.size for k in range(1, self.size)]  # not all of them to the same one at first
        with self._noting_loss():
            return [
                *(dist.irecv(rows[rank], self._global(rank), group=self.group, tag=EXCHANGE) for rank in others),
                *(dist.isend(rows[self.rank], self._global(rank), group=self.group, tag=EXCHANGE) for rank in others),
            ]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Everybody's `tensor`, alike in shape and dtype, gets the values of a rank's."""
        with self._noting_loss():
            there = tensor if tensor.device.type in self.device_types else tensor.to(self.device)
            there = there.contiguous()
            dist.broadcast(there, self._global(rank), group=self.group)
            if there is not tensor:
                tensor.copy_(there)

    def wait(self, under_way: list[Any]) -> None:
        """Returns when all of these are done; on a GPU, its stream waits."""
        with self._noting_loss():
            for work in under_way:
                work.wait()

    def use_device_of(self, tensors: Iterable[torch.Tensor]) -> None:
        """Sends from where these are, if it has to be a GPU: scripts need not have made that the current one."""
        there = (t.device for t in tensors if t.device.type == self.device.type != "cpu")
        self.device = next(there, self.device)

    @contextlib.contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            with on_device(self.device):
                yield
        except RuntimeError as e:
            self.lost = True
            raise CSDRankError(f"rank {self.rank} has lost the others: {e}") from e

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's plain values, by rank."""
        out = [None] * self.size
        with self._noting_loss():
            dist.all_gather_object(out, value, group=self.group)
        return out

    def first_difference(self, entries: list[Any]) -> str | None:
        """Where lists of tuples, each beginning with a name, are not the same on all ranks."""
        for rank, theirs in enumerate(said := self.gather_objects(entries)):
            for a, b in itertools.zip_longest(said[0], theirs):
                if a != b:
                    return f"rank 0 has {a}, rank {rank} {b}"
        return None

    @contextlib.contextmanager
    def all_ranks_or_none(self) -> Iterator[Said]:
        """What is done within counts only if no rank raises anything: see agree()."""
        failure, said = None, Said()
        try:
            yield said
        except BaseException as e:
            failure = e
        if self.lost and failure is not None:
            raise failure
        said.by_ranks = self.agree(failure, said.own)

    def agree(self, failure: BaseException | None = None, own: Any = None) -> list[Any]:
        """Raises on all ranks if one of them failed: there `failure`, elsewhere CSDRankError, which tells of it.

        Else returns what all of them say, by rank: `own`, plain values, which travel only if they are not the same.
        """
        digest = hashlib.blake2b(repr(own).encode(), digest_size=8).digest()
        votes = self.gather(failure is not None, int.from_bytes(digest, "little", signed=True))
        if not any(failed for failed, _ in votes):
            return [own] * self.size if len({*votes}) == 1 else self.gather_objects(own)
        said = self.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        raise CSDRankError("; ".join(f"rank {r}: {text}" for r, text in enumerate(said) if text))


def all_ranks_or_none(ranks: Ranks | None) -> contextlib.AbstractContextManager[Said]:
    """What is done within counts only if every rank has done it; a process on its own is all there is."""
    return ranks.all_ranks_or_none() if ranks else _alone()


@contextlib.contextmanager
def _alone() -> Iterator[Said]:
    said = Said()
    yield said
    said.by_ranks = [said.own]


def device_of(group: Any) -> torch.device:
    """Where what the group sends may lie: in host memory, unless it knows GPUs only, as nccl does."""
    types = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in types else types[0])


def ranks_of(group: Any) -> Ranks | None:
    """Of a process group, or of all ranks there are (`group` None); None if this process is alone.

    Raises CSDValueError if it is no process group that this process belongs to.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise CSDValueError("Invalid process_group: call torch.distributed.init_process_group() first")
        return None
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise CSDValueError(f"Invalid process_group: {group!r}; it is a group that this rank belongs to, or None")
    return Ranks(group) if dist.get_world_size(group) > 1 else None
