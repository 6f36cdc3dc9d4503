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
    least: int  # of these, the first so many, every parameter has
    hyperparameters: tuple[str, ...]  # of a group; a store keeps them
    # csd_rule and csd_hyper.c of a group at step t, computed in double; gradients are multiplied by `grad_scale`.
    constants: Callable[[Group, float, float], tuple[int, tuple[float, ...]]]
    # A hyperparameter → the state that it needs, while it is true. That and all sections before it are there then.
    switches: Mapping[str, str] = field(default_factory=dict)

    def sections_for(self, group: Group, held: Collection[str] = ()) -> tuple[str, ...]:
        """Those that a parameter of this group needs, and those of which it has a state already (`held`)."""
        needed = {*held, *(state for name, state in self.switches.items() if group[name])}
        ends = [k + 1 for k, section in enumerate(self.sections) if section in needed]
        return self.sections[: max([self.least, *ends])]

    def lacking(self, group: Group, sections: Sequence[str]) -> tuple[str, str]:
        """The first hyperparameter of the group that needs more than these sections, which one does; and the state."""
        return next((name, state) for name, state in self.switches.items() if group[name] and state not in sections)

    def takes(self, sections: Sequence[str]) -> bool:
        """Can a parameter have these?"""
        return len(sections) >= self.least and (*sections,) == self.sections[: len(sections)]
