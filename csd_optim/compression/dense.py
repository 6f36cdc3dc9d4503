"""Top-K of parameters that `gpu:` updates: nothing travels, and what would be sent becomes a dense gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .kernel_check import topk_kernels_of
from .kernel_selection import BATCH_BYTES, KernelSelection, nbytes_of_part
from .selection import HostSelection, Part, Tiles, TopK


@dataclass
class DenseTopK:
    """What Top-K sends of one parameter's gradient, dense: zeros stand for the rest."""

    topk: TopK
    parts: Sequence[tuple[int, int]]  # first element and length of each

    @property
    def residual(self) -> torch.Tensor | None:
        """The residual, if send() changes it."""
        return self.topk.residual if self.topk.ratio < 1 else None

    def send(self, grad: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """Return the gradient with zeros for what is not sent, in `to` (int16, at least as long); update the residual.

        `grad`: 1-D, on the parameter's device. Queued on the current stream; without kernels the host waits.
        """
        library = topk_kernels_of(grad.device)
        for _, batch in self.batches():
            tiles: Tiles = {first: (n, [self._part(grad, first, n)]) for first, n in batch}
            selection: HostSelection | KernelSelection
            selection = HostSelection(tiles) if library is None else KernelSelection(library, tiles)
            selection.spread(to)
            selection.feed_back()
            del selection  # before the next one takes memory
        return to[: len(grad)].view(self.topk.dtype)

    def batches(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield the parts that are selected at once, and before them how many bytes that takes on the accelerator."""
        nbytes, batch = 0, list[tuple[int, int]]()
        for first, n in self.parts:
            more = nbytes_of_part(self.topk, n)
            if batch and nbytes + more > BATCH_BYTES:
                yield nbytes, batch
                nbytes, batch = 0, []
            nbytes += more
            batch.append((first, n))
        yield nbytes, batch

    def _part(self, grad: torch.Tensor, first: int, n: int) -> Part:
        here, residual = slice(first, first + n), self.topk.residual
        return Part(self.topk, grad[here], None if residual is None else residual[here], first, 0)


def sent_buffer(parameters: Sequence[DenseTopK], device: torch.device) -> torch.Tensor:
    """Return memory for the dense gradient of any of the parameters, int16.

    Also compiles the kernels, and has the allocator keep room for the largest selection, so that a step does not run
    out of memory in the midst of it.
    """
    if parameters and topk_kernels_of(device):
        nbytes = max(nbytes for dense in parameters for nbytes, _ in dense.batches())
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    numels = [sum(n for _, n in dense.parts) for dense in parameters]
    return torch.empty(max(numels, default=0), dtype=torch.int16, device=device)
