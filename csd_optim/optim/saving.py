"""A warning in the first step that one rank alone cannot save all states: a script that tries fails hours later."""

from __future__ import annotations

import sys
import warnings

from ..distributed.ranks import Ranks
from ..distributed.sharding import HOW_TO_SAVE, ReplicaShard, Unsharded
from ..errors import CSDWarning, users_stacklevel
from ..step.steps import Steps

# Callers of step() that save on all ranks, or gather the states on rank 0: Lightning's Trainer and Fabric; and
# get_state_dict(), which takes a step of zeros in order to make states.
_SAVE_RIGHTLY = ("lightning.pytorch.", "lightning.fabric.", "pytorch_lightning.", "torch.distributed.checkpoint.")


def warn_of_saving(ranks: Ranks, steps: Steps) -> bool:
    """Warn on rank 0, after a step of DDP, that it has only a part of the states.

    Returns whether the question is settled.

    With FSDP or DTensors scripts save on all ranks with any optimizer, so there is no warning. Call this within the
    user's step().
    """
    if not steps.resources.gather.buckets and steps.has_updated:  # else the step has created states, or was skipped
        return False
    parts = [state.part for state in steps.state_map.by_index]
    kinds = {type(part) for part in parts}
    if ranks.rank == 0 and ReplicaShard in kinds and kinds <= {ReplicaShard, Unsharded} and not _saves_rightly():
        warnings.warn(
            f"rank 0 holds 1/{ranks.size} of the optimizer's states: a script that saves state_dict() on this rank "
            f"alone will fail, at its first checkpoint. {HOW_TO_SAVE}. If the script does so already, pass "
            "sharded=True, the default, and this is not said again",
            CSDWarning,
            users_stacklevel(),
        )
    return any(part.replicas for part in parts)


def _saves_rightly() -> bool:
    frame = sys._getframe(1).f_back
    while frame:
        if f"{frame.f_globals.get('__name__', '')}.".startswith(_SAVE_RIGHTLY):
            return True
        frame = frame.f_back
    return False
