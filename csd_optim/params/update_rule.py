"""What the package asks of an update rule; its arithmetic is a header in native/include, see rules.h there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Group = dict[str, Any]  # one of an optimizer's `param_groups`


@dataclass(frozen=True)
class UpdateRule:
    """One optimizer's rule: what its states are called, and its constants for a step."""

    name: str  # by which a store says what made it
    sections: tuple[str, ...]  # of a tile, 1 to 4: the fp32 master, then the states as `state` calls them
    least: int  # of these, the first so many, every parameter has; of the others, those that it needs
    hyperparameters: tuple[str, ...]  # of a group; a store keeps them
    # csd_rule and csd_hyper.c at step t, computed in double, of parameters of a group that have these sections;
    # gradients are multiplied by `grad_scale`: (group, sections, t, grad_scale).
    constants: Callable[[Group, Sequence[str], float, float], tuple[int, tuple[float, ...]]]
    # A hyperparameter → the state that it needs, while it is true.
    switches: Mapping[str, str] = field(default_factory=dict)
    # A state → the hyperparameter that it begins as, for all its elements; others begin as zero.
    initial: Mapping[str, str] = field(default_factory=dict)
    has_codes: bool = False  # 8 bits can keep its states (rules.h): they are exp_avg and what bounds it, exp_avg_sq

    def sections_for(self, group: Group, held: Collection[str] = ()) -> tuple[str, ...]:
        """Those that a parameter of this group needs, and those of which it has a state already (`held`)."""
        needed = {*self.sections[: self.least], *held, *(state for name, state in self.switches.items() if group[name])}
        return tuple(section for section in self.sections if section in needed)

    def initial_for(self, group: Group) -> dict[str, float]:
        """What the states of a parameter of this group begin as, where that is not zero."""
        values = {state: float(group[name]) for state, name in self.initial.items()}
        return {state: value for state, value in values.items() if value}

    def lacking(self, group: Group, sections: Sequence[str]) -> tuple[str, str]:
        """The first hyperparameter of the group that needs more than these sections, which one does; and the state."""
        return next((name, state) for name, state in self.switches.items() if group[name] and state not in sections)

    def takes(self, sections: Sequence[str]) -> bool:
        """Can a parameter have these?"""
        in_order = tuple(section for section in self.sections if section in sections)
        return (*sections,) == in_order and in_order[: self.least] == self.sections[: self.least]
