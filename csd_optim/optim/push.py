"""A communication hook of DistributedDataParallel that hands gradients to optimizer ranks while backward goes on."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations, which must be objects, not strings.

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..errors import CSDTypeError
from .optimizer import CSDOptimizer


def push(optimizer: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Push a DDP bucket: the hook for ``ddp.register_comm_hook(optimizer, csd_optim.push)``.

    Register it right after both were constructed. With ``devices="serve://..."`` gradients leave for the optimizer
    ranks during backward, and `.grad` then holds this process's own gradient, not the mean: see
    docs/optimizer-ranks.md. With other devices, or ``?route=kept``, DDP reduces as it does without a hook. Raises
    CSDTypeError if `optimizer` is not one of this package.
    """
    unwrapped = getattr(optimizer, "optimizer", optimizer)  # unwraps the optimizer from a trainer's wrapper
    if not isinstance(unwrapped, CSDOptimizer):
        raise CSDTypeError(
            f"csd_optim.push pushes for an optimizer of csd_optim, not for a {type(optimizer).__name__}: call "
            "ddp.register_comm_hook(optimizer, csd_optim.push)"
        )
    reduced: torch.futures.Future[torch.Tensor] = unwrapped._reduce_bucket(bucket)
    return reduced
