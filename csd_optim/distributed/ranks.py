"""The processes that train together. All their communication goes through torch.distributed.

Every method of `Ranks` that communicates is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from operator import and_
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllToAllOptions

from ..accelerator import on_device
from ..errors import CSDRankError, CSDValueError

LINGER_SECONDS = 0.1  # seconds to wait at exit
MAX_LENT = 62  # groups that may be lent again, each a bit of an int64
CREATED_WITHIN = timedelta(seconds=60)  # all ranks make a group at the same time; a rank that takes longer has died
# Bytes of all rows in exchange(): up to this, one all_to_all. On two busy cores it took 0.16 ms, messages 4 ms.
SMALL_EXCHANGE = 256 << 10
EXCHANGE_TAG = 0x435344  # tag of exchange(): an arbitrary number, so that other messages do not match it
AnyFailed = Callable[[bool], bool]  # see Ranks.all_ranks_or_none()


# By process group: groups of the same ranks made by borrow(), in the same order on all ranks.
_LENT: weakref.WeakKeyDictionary[Any, list[Ranks]] = weakref.WeakKeyDictionary()


@functools.cache
def _linger_at_exit() -> None:
    """Give gloo's threads time at exit to release tensors, for which they need the GIL after a collective.

    The process would abort if the interpreter shut down meanwhile.
    """
    atexit.register(time.sleep, LINGER_SECONDS)


@dataclass
class Votes:
    """The values that ranks exchange at the end of Ranks.all_ranks_or_none()."""

    mine: Any = None  # this rank's, plain values; set inside the context
    all: list[Any] = field(default_factory=list)  # all ranks' values; set on exit


class Ranks:
    """The ranks of a process group with more than one rank; `rank` is this process's."""

    meet_here: bool = True

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.device_types: list[str] = [device.type for device in group._device_types]
        self.device: torch.device = device_of(group)
        self.lost: bool = False  # a rank is gone; communication is no longer possible
        # Of a borrowed group, see borrow(): no longer needed here; in use by a collective.
        self.returned: bool = False
        self.busy: bool = False
        self._replicas: dict[Any, tuple[Ranks, Any]] = {}
        _linger_at_exit()

    @functools.cached_property
    def members(self) -> list[int]:
        """The members' ranks in the job."""
        return dist.get_process_group_ranks(self.group)

    @functools.cached_property
    def mesh(self) -> Any:
        """The ranks as a one-dimensional device mesh."""
        from torch.distributed.device_mesh import DeviceMesh

        return DeviceMesh.from_group(self.group, self.device.type)

    def replicas(self, mesh: Any, dim: int) -> tuple[Ranks, Any]:
        """Return the ranks along a dimension of a device mesh, and the same mesh with that dimension last."""
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
        """Whether gloo transfers tensors in host memory. Other backends may lack all_to_all."""
        return self.device.type == "cpu" and bool(self.group._get_backend(self.device).name() == "gloo")

    def borrow(self) -> Ranks:
        """Return the same ranks on a separate gloo group, for communication on another thread. A collective.

        Collectives pair by their order, so each thread needs its own group. Set `returned` when the group is no longer
        needed: the group is lent again once all ranks have returned it, and it is `busy` on none. Groups are never
        destroyed, as their names, and with them addresses, would be used again.
        """
        lent = _LENT.setdefault(self.group, [])
        free = sum(1 << k for k, r in enumerate(lent[:MAX_LENT]) if r.returned and not (r.busy or r.lost))
        common: int = functools.reduce(and_, (there for (there,) in self.gather(free)))
        if common:
            k = common.bit_length() - 1
            lent[k] = again = Ranks(lent[k].group)
            return again
        with self._marking_lost():
            made = dist.new_group(self.members, CREATED_WITHIN, backend="gloo", use_local_synchronization=True)
            # Back ends of other vendors may have no options; gloo's default timeout then applies.
            options = getattr(self.group._get_backend(self.device), "options", None)
            dist.distributed_c10d._set_pg_timeout(options._timeout if options else dist.default_pg_timeout, made)
        lent.append(Ranks(made))
        return lent[-1]

    @property
    def is_world(self) -> bool:
        """Whether these are all ranks of the job."""
        return self.group is dist.group.WORLD

    def gather(self, *values: float, dtype: torch.dtype = torch.int64) -> list[tuple[Any, ...]]:
        """Return all ranks' values, by rank. Each rank passes the same number of values."""
        own = torch.tensor(values, dtype=dtype, device=self.device)
        out = own.new_empty(self.size, len(values))
        if self._is_gloo:  # direct sends between all pairs: gloo's all_gather goes round a ring, one rank at a time
            each = [len(values)] * self.size
            self.wait([self.all_to_all(out.view(-1), each, own.repeat(self.size), each)])
        else:
            self.wait([self.all_gather(out.view(-1), own)])
        return [tuple(row) for row in out.tolist()]

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> Any:
        """Begin to concatenate all ranks' `own` (1-D, the same size and dtype on every rank) in `out`."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter up to torch 2.12
        with self._marking_lost():
            return gather(out, own, group=self.group, async_op=True)

    def all_to_all(self, out: torch.Tensor, out_sizes: list[int], own: torch.Tensor, own_sizes: list[int]) -> Any:
        """Begin to send rank k the k-th part of `own` (1-D), `own_sizes[k]` elements, and to receive into `out`."""
        with self._marking_lost():
            return dist.all_to_all_single(out, own, out_sizes, own_sizes, group=self.group, async_op=True)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Begin to sum all ranks' tensors, in place."""
        with self._marking_lost():
            return dist.all_reduce(tensor, group=self.group, async_op=True)

    def exchange(self, rows: torch.Tensor) -> list[Any]:
        """Begin to all-gather in place. `rows`: contiguous, a row per rank; each rank has filled its own row."""
        if rows.device.type != "cpu":
            return [self.all_gather(rows.view(-1), rows[self.rank])]
        if self._is_gloo and rows.nbytes <= SMALL_EXCHANGE:
            return [self._exchange_at_once(rows)]
        # gloo's all_gather allocates memory each time, and has at most two broadcasts in flight at once. Direct sends
        # between all pairs are all in flight at once, which is faster where links are the limit.
        others = [(self.rank + k) % self.size for k in range(1, self.size)]  # ranks begin with different receivers
        with self._marking_lost():  # by the group object, as a program may destroy all groups during a step
            return [
                *(self.group.recv([rows[rank]], rank, EXCHANGE_TAG) for rank in others),
                *(self.group.send([rows[self.rank]], rank, EXCHANGE_TAG) for rank in others),
            ]

    def _exchange_at_once(self, rows: torch.Tensor) -> Any:
        """Begin exchange() by one all_to_all, for which gloo needs fewer wake-ups than for messages between pairs.

        Its input has a copy of the own row for each rank; between two ranks it is the row itself.
        """
        n, out, own = rows.shape[1], rows.view(-1), rows[self.rank]
        sizes = [n] * self.size
        if self.size == 2:
            out, sizes[self.rank] = rows[1 - self.rank], 0
        else:
            own = own.repeat(self.size)
        with self._marking_lost():  # by the group object, as in exchange()
            return self.group.alltoall_base(out, own, sizes, sizes, AllToAllOptions())

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Copy the values of `tensor` on `rank` to all ranks' `tensor`, which has the same shape and dtype."""
        with self._marking_lost():
            buffer = tensor if tensor.device.type in self.device_types else tensor.to(self.device)
            buffer = buffer.contiguous()
            dist.broadcast(buffer, self._global_rank(rank), group=self.group)
            if buffer is not tensor:
                tensor.copy_(buffer)

    def wait(self, under_way: list[Any]) -> None:
        """Wait for these works; on a GPU let the current stream wait."""
        with self._marking_lost():
            for work in under_way:
                work.wait()

    def use_device_of(self, tensors: Iterable[torch.Tensor]) -> None:
        """If the group requires a GPU, communicate from the GPU of these tensors, which may not be the current GPU."""
        devices = (t.device for t in tensors if t.device.type == self.device.type != "cpu")
        self.device = next(devices, self.device)

    @contextlib.contextmanager
    def _marking_lost(self) -> Iterator[None]:
        try:
            with on_device(self.device):
                yield
        except RuntimeError as e:
            self.lost = True
            raise CSDRankError(f"rank {self.rank} has lost the others: {e}") from e

    def gather_objects(self, value: Any) -> list[Any]:
        """Return all ranks' plain values, by rank."""
        out = [None] * self.size
        with self._marking_lost():
            dist.all_gather_object(out, value, group=self.group)
        return out

    def first_difference(self, entries: list[Any]) -> str | None:
        """Return a description of the first entry that is not the same on all ranks; None if all are equal.

        `entries`: tuples that begin with a name.
        """
        for rank, theirs in enumerate(by_ranks := self.gather_objects(entries)):
            for a, b in itertools.zip_longest(by_ranks[0], theirs):
                if a != b:
                    return f"rank 0 has {a}, rank {rank} {b}"
        return None

    @contextlib.contextmanager
    def all_ranks_or_none(self, any_failed: AnyFailed | None = None) -> Iterator[Votes]:
        """Raise on all ranks if any rank raises inside the context: see agree().

        `any_failed`: a collective that takes whether this rank has failed, and returns whether any rank has. Only after
        a failure do the ranks agree(), so that a success costs no further collective; `Votes.all` then stays empty.
        """
        failure, votes = None, Votes()
        try:
            yield votes
        except BaseException as e:
            failure = e
        if self.lost and failure is not None:
            raise failure
        if any_failed is None or any_failed(failure is not None):
            votes.all = self.agree(failure, votes.mine)

    def agree(self, failure: BaseException | None = None, own: Any = None) -> list[Any]:
        """Raise on all ranks if some rank has a `failure`: there the failure, elsewhere CSDRankError with its text.

        Otherwise return all ranks' `own` (plain values), by rank. Values are sent only if their checksums differ.
        """
        digest = hashlib.blake2b(repr(own).encode(), digest_size=8).digest()
        votes = self.gather(failure is not None, int.from_bytes(digest, "little", signed=True))
        if not any(failed for failed, _ in votes):
            return [own] * self.size if len({*votes}) == 1 else self.gather_objects(own)
        texts = self.gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        raise CSDRankError("; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text))


class RanksElsewhere:
    """The trainers' ranks, for a trainer's engine at an optimizer rank.

    Trainers meet without the optimizer rank: methods here return this rank's values alone, and contexts raise only
    here.
    """

    meet_here: bool = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank: int = rank
        self.size: int = size

    def gather(self, *values: Any) -> list[tuple[Any, ...]]:
        return [values]

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def all_ranks_or_none(self, _: AnyFailed | None = None) -> contextlib.AbstractContextManager[Votes]:
        return _alone()


def all_ranks_or_none(
    ranks: Ranks | RanksElsewhere | None, any_failed: AnyFailed | None = None
) -> contextlib.AbstractContextManager[Votes]:
    """Return Ranks.all_ranks_or_none(), or its equivalent for a single process (`ranks` None)."""
    return ranks.all_ranks_or_none(any_failed) if ranks else _alone()


@contextlib.contextmanager
def _alone() -> Iterator[Votes]:
    votes = Votes()
    yield votes
    votes.all = [votes.mine]


def device_of(group: Any) -> torch.device:
    """Return the device whose tensors the group can send: the CPU, unless the group supports GPUs only, like nccl."""
    types = [device.type for device in group._device_types]
    return torch.device("cpu" if "cpu" in types else types[0])


def ranks_of(group: Any) -> Ranks | None:
    """Return the Ranks of a process group (None: all ranks); None if this process is alone.

    Raises CSDValueError if `group` is not a process group with this process.
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
