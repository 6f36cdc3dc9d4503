"""The published tensors: their parameters, the elements that this process publishes, and checksums of the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..bindings import Watch, checksum_of
from ..distributed.ranks import Ranks
from ..distributed.sharding import UNSHARDED, Partition, is_fsdp
from ..errors import CSDRuntimeError, CSDTypeError, CSDValueError
from ..grad_modes import no_autograd, version_of
from ..params.manifest import PartOf
from ..replica.versions import Tensor

Array = np.ndarray[Any, Any]
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
CHUNK = 1 << 24  # elements copied at a time


@dataclass(eq=False)
class Tracked:
    """A tensor of the model. This process publishes `numel` elements, from `first` on."""

    index: int  # among all tensors
    name: str
    aliases: tuple[str, ...]
    param: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    part: Partition = UNSHARDED  # selects these elements, in row-major order
    first: int = 0
    numel: int = 0
    checksum: int = 0  # of these elements, after the last update or the last read
    is_fp32: bool = False  # the parameter is fp32, and published as bfloat16
    watch: Watch | None = None  # None: no step updates the tensor, or steps cannot record changes
    row: int = -1  # of its watch: the engine's index of the parameter
    checked: bool = False  # the watch has checks: see csd_watch
    is_copied_late: bool = False  # has no watch, and gets its new values only after the end of a step
    whole: bool = True  # the next update records all elements, as the values before are unknown
    _master: torch.Tensor | None = None
    _seen: tuple[int, int] = 0, 0  # id of the master, and torch's count of writes to it

    @property
    def tensor(self) -> Tensor:
        """The whole tensor, without its checksum."""
        return Tensor(self.name, self.dtype, self.shape, 0, self.aliases)

    @property
    def slice(self) -> tuple[int, int, int]:
        """(index, first element, number of elements), a "slice" in a manifest."""
        return self.index, self.first, self.numel

    def adopt(self, params: Mapping[str, torch.Tensor]) -> None:
        """Take the parameter that has the name now.

        Ignores parameters gathered by FSDP2, which will be shards again.
        """
        new = params.get(self.name, self.param)
        if hasattr(new, "placements") == hasattr(self.param, "placements"):
            self.param = new

    @no_autograd()
    def read(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield copies of the present elements in chunks, int16 and 1-D: (index of the first element, chunk)."""
        flat = self.part.of(self.param).contiguous().view(-1)
        for first in range(0, self.numel, CHUNK):
            some = flat[first : first + CHUNK]
            some = some.to(torch.bfloat16) if some.dtype is torch.float32 else some.clone()
            yield first, some.view(torch.int16).cpu()

    def take(self) -> Iterator[tuple[int, Array]]:
        """As read(), with uint16 arrays; sets `checksum` at the end."""
        checksum = 0
        for first, some in self.read():
            checksum += checksum_of(some.data_ptr(), self.first + first, len(some))
            yield first, some.numpy().view(np.uint16)
        self.checksum = checksum % (1 << 32)

    def has_changed(self) -> bool:
        """Return whether the values differ from those at the last `checksum`, which is updated."""
        was = self.checksum
        for _ in self.take():
            pass
        return was != self.checksum

    def see_master(self, master: torch.Tensor | None) -> None:
        """Note the fp32 master (None: no master, or `checked`). Sets `whole` if the master was replaced or written."""
        seen = (id(master), version_of(master)) if master is not None else (0, 0)
        self.whole |= seen != self._seen or (master is not None and master.is_inference())  # has no count of writes
        self._seen, self._master = seen, master

    @property
    def master(self) -> torch.Tensor | None:
        return self._master

    def update(self, *, is_whole: bool) -> None:
        """Note that a kept step has updated the tensor. `is_whole`: all elements were recorded.

        Raises CSDRuntimeError if only some elements were updated.
        """
        assert self.watch
        if self.watch.updated != self.numel:
            n = self.watch.updated
            raise CSDRuntimeError(f"a step has updated {n} of the {self.numel} elements of {self.name}")
        self.checksum = (self.watch.sum + (0 if is_whole else self.checksum)) % (1 << 32)
        self.whole = False
        self.watch.keep()

    def check(self) -> None:
        """Raise CSDTypeError if the model's parameter of this name now has another dtype, shape or memory order."""
        if self.is_copied_late:
            raise CSDTypeError(
                f"the elements of parameter {self.name} are neither in row-major order nor without gaps: make it "
                "contiguous() before the optimizer is constructed"
            )
        if tuple(self.param.shape) != self.shape or not self.fits(self.param.dtype):
            raise CSDTypeError(
                f"parameter {self.name} is {self.param.dtype} {tuple(self.param.shape)} now, and was {self.dtype} "
                f"{self.shape} when publish() was called: close() the publisher, and call publish() again"
            )

    def fits(self, dtype: torch.dtype) -> bool:
        return DTYPES.get(dtype, "BF16" if self.is_fp32 else "") == self.dtype


def tensors_of(model: torch.nn.Module, part_of: PartOf, *, as_bf16: bool) -> list[Tracked]:
    """Return the parameters of a model in its order: of each, the part that this process has or updates.

    `as_bf16`: publish fp32 parameters as bfloat16. Raises CSDTypeError for a parameter of another dtype, CSDValueError
    for a parameter that is divided otherwise than by rows, or if there are no parameters.
    """
    for module in filter(is_fsdp, model.modules()):
        module.reshard()  # type: ignore[operator]
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    found: list[Tracked] = []
    for p, (first, *others) in names.items():
        dtype = "BF16" if as_bf16 and p.dtype is torch.float32 else DTYPES.get(p.dtype)
        if dtype is None:
            advice = 'publish(..., dtype="bf16") rounds it' if p.dtype is torch.float32 else "it cannot be published"
            raise CSDTypeError(f"parameter {first} is {p.dtype}, and versions hold 16 bits: {advice}")
        if p.is_meta or p.layout is not torch.strided:
            raise CSDTypeError(f"parameter {first} is no plain tensor with data: it cannot be published")
        part = part_of(p)
        if (run := part.run_in(p)) is None:
            raise CSDValueError(
                f"parameter {first} is divided otherwise than by rows, as by tensor parallelism or FSDP1: it cannot be "
                "published. Use DistributedDataParallel, or fully_shard (FSDP2) alone"
            )
        is_fp32 = p.dtype is torch.float32
        found.append(Tracked(len(found), first, tuple(others), p, dtype, tuple(p.shape), part, *run, is_fp32=is_fp32))
    if not found:
        raise CSDValueError("the model has no parameters: there is nothing to publish")
    return found


def own_share(found: Sequence[Tracked], ranks: Ranks | None) -> list[Tracked]:
    """Return the tensors with elements for this rank to publish.

    Of several ranks with the same elements, the first publishes.

    Call Tracked.take() on all tensors before it. Raises CSDValueError, on all ranks, if the models differ, or some
    elements are on no rank. A collective.
    """
    if not ranks:
        return [*found]
    if difference := ranks.first_difference([(t.name, t.dtype, t.shape, t.aliases) for t in found]):
        raise CSDValueError(f"the ranks publish different models: {difference}")
    by_rank = ranks.gather_objects([(t.first, t.numel, t.checksum) for t in found])
    own = []
    for tracked, parts in zip(found, zip(*by_rank, strict=True), strict=True):
        end, whole = 0, tracked.param.numel()
        for first, n, _ in sorted({*parts}):
            if n and first != end:
                raise CSDValueError(
                    f"parameter {tracked.name} has elements that ranks hold with different values, or that none holds: "
                    "its parts cannot be published together"
                )
            end += n
        if end != whole:
            raise CSDValueError(f"parameter {tracked.name} has {whole} elements, of which the ranks hold {end}")
        if parts.index(parts[ranks.rank]) == ranks.rank and (tracked.numel or not whole):
            own.append(tracked)
    return own
