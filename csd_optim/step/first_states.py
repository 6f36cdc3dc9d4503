"""Initial states without a step: torch's get_optimizer_state_dict() asks for them by a step of lr 0 and zero gradients.

Such a step moves nothing. If it counted, a loop that resumes at `committed_step` would leave out a batch.
"""

from __future__ import annotations

import torch

from ..engine.engine import Engine
from ..params.groups import Groups
from ..params.state_map import StateMap
from .spec import Participants


def asks_for_states(groups: Groups, state_map: StateMap) -> bool:
    """Return whether a step with these gradients only creates states: every lr and gradient is 0, and no state exists.

    A rule that adds weight decay to the gradient changes its states even at lr 0: that is an ordinary step.
    """
    if state_map.param_states or state_map.state or any(float(group["lr"]) for group in groups):
        return False
    if any(state_map.rule_of(group).decays_gradient(group) for group in groups):
        return False
    pairs = ((p, p.grad) for group in groups for p in group["params"] if p.grad is not None)
    return not any(g.layout is not torch.strided or bool(state_map.part(p).local(g).any()) for p, g in pairs)


def create_states(
    engine: Engine, state_map: StateMap, groups: Groups, taking_part: Participants, grad_dtype: torch.dtype | None
) -> None:
    """Create the states that a step of lr 0 and zero gradients leaves. Raises what StateMap.adopt() raises.

    As with states that a program assigns, the next step commits them.
    """
    for p in taking_part.params:
        state_map.state[p] = {"step": torch.tensor(1.0)}
    try:
        state_map.adopt(engine, groups, grad_dtype)
    except BaseException:
        for p in taking_part.params:
            state_map.state.pop(p, None)
        raise
