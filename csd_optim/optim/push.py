"""A communication hook of DistributedDataParallel that gives each rank only its rows of the mean gradients."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations, which must be objects, not strings.

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..errors import CSDTypeError
from .optimizer import CSDOptimizer


def push(optimizer: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a DDP bucket: the hook for ``ddp.register_comm_hook(optimizer, csd_optim.push)``.

    Register the hook right after both were constructed. Each rank then gets its rows of the mean gradients, which
    step() uses, and `.grad` is this rank's own gradient: see docs/distributed.md. With ``sharded=False``, DDP reduces
    as without a hook. Raises CSDTypeError if `optimizer` is not of this package, and CSDRankError if ranks are gone.
    """
    unwrapped = getattr(optimizer, "optimizer", optimizer)  # unwraps the optimizer from a trainer's wrapper
    if not isinstance(unwrapped, CSDOptimizer):
        raise CSDTypeError(
            f"csd_optim.push pushes for an optimizer of csd_optim, not for a {type(optimizer).__name__}: call "
            "ddp.register_comm_hook(optimizer, csd_optim.push)"
        )
    reduced: torch.futures.Future[torch.Tensor] = unwrapped._reduce_bucket(bucket)
    return reduced
