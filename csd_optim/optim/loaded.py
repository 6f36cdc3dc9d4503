"""State dicts to be loaded, of torch's optimizers or ours: what they lack is filled in, others are refused."""

from __future__ import annotations

from typing import Any

from ..errors import CSDValueError
from ..params.groups import Groups
from ..params.update_rule import RuleOf
from .rules import STATES


class Box:
    """Hides a state entry from torch's load_state_dict, which would cast it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def as_ours(state_dict: dict[str, Any], groups: Groups, rule_of: RuleOf) -> dict[str, Any]:
    """Return a state dict with the entries missing in torch's. Raises CSDValueError if rules differ from `groups`."""
    state, loaded = {**state_dict["state"]}, [*state_dict["param_groups"]]
    for k, (own, group) in enumerate(zip(groups, loaded, strict=False)):
        rule = rule_of(own)
        if group.get("rule", rule.name) != rule.name:
            raise CSDValueError(
                f"the state dict is of another optimizer: the rule of its group {k} is {group['rule']}, and here "
                f"it is {rule.name}"
            )
        if "rule" in own:
            loaded[k] = {**group, "rule": own["rule"]}
        names_none = "rule" in own and "rule" not in group
        others = STATES.difference(rule.sections) if names_none else frozenset[str]()
        for n in group["params"] if others else ():
            if foreign := sorted(others.intersection(state.get(n, {}))):
                raise CSDValueError(
                    f"the state dict is of another optimizer: parameters of its group {k} have {foreign[0]}, which "
                    f"the rule {rule.name} has not"
                )
        for n in () if rule.torch_counts else group["params"]:
            if any(state.get(n, {}).get(name) is not None for name in rule.sections[1:]):
                state[n] = {"step": 1.0, **state[n]}
    # The base class would cast every entry to the parameter's dtype and copy it; a Box prevents both.
    return {**state_dict, "state": {n: Box(entry) for n, entry in state.items()}, "param_groups": loaded}


def complete_groups(loaded: Groups, before: Groups, rule_of: RuleOf, optimizer: str) -> None:
    """Fill in what loaded groups lack of the groups `before`. Raises CSDValueError if hyperparameters are missing."""
    for k, (own, group) in enumerate(zip(before, loaded, strict=True)):
        rule = rule_of(own)
        if missing := [name for name in rule.hyperparameters if name not in group]:
            by = f"its rule {rule.name}" if "rule" in own else optimizer
            raise CSDValueError(
                f"the state dict is of another optimizer: its group {k} has no {missing[0]}, which {by} needs"
            )
        if "topk" in own:  # missing in torch's checkpoints
            group.setdefault("topk", own["topk"])
        group.pop("state_dtype", None)  # the optimizer decides how states are stored, not the checkpoint
        if "state_dtype" in own:
            group["state_dtype"] = own["state_dtype"]
