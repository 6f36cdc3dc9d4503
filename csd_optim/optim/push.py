"""The communication hook of DistributedDataParallel that hands gradients to optimizer ranks while backward goes on."""

# Its annotations are objects, not strings: DDP compares them.

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..errors import CSDTypeError
from .optimizer import CSDOptimizer


def push(optimizer: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp.register_comm_hook(optimizer, csd_optim.push)``, right after both were made.

    Of an optimizer with ``devices="serve://..."`` gradients leave for the optimizer ranks in backward, and `.grad` has
    this process's own gradient afterwards, not the mean: see docs/optimizer-ranks.md. With other devices, or
    ``?route=kept``, it does what DDP does without it. Raises CSDTypeError if `optimizer` is none of this package.
    """
    there = getattr(optimizer, "optimizer", optimizer)  # a trainer's wrapper
    if not isinstance(there, CSDOptimizer):
        raise CSDTypeError(
            f"csd_optim.push pushes for an optimizer of csd_optim, not for a {type(optimizer).__name__}: call "
            "ddp.register_comm_hook(optimizer, csd_optim.push)"
        )
    reduced: torch.futures.Future[torch.Tensor] = there._take_bucket(bucket)
    return reduced
