"""The hyperparameters of groups when they were added: stores keep them, and the rule of a group cannot be changed."""

from __future__ import annotations

from operator import is_
from typing import Any

from ..errors import CSDRuntimeError
from ..params.groups import Groups, hyperparameters_of
from ..params.update_rule import RuleOf


class InitialGroups:
    """The hyperparameters that groups had when they were added. `rule_of`: as of StateMap."""

    def __init__(self, rule_of: RuleOf) -> None:
        self._rule_of = rule_of
        self._groups: Groups = []  # the optimizer's groups when of() was last called
        self._initial: list[dict[str, Any]] = []  # the initial hyperparameters of each of `_groups`

    def stored_hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group's hyperparameters as a store keeps them. Raises CSDTypeError if a value cannot be stored."""
        found = hyperparameters_of(group, self._rule_of(group).hyperparameters)
        if found.get("rule") == self._rule_of({}).name:  # as if the group did not name it
            del found["rule"]
        return found

    def of(self, groups: Groups) -> list[dict[str, Any]]:
        """Return the initial hyperparameters of each group. Groups may have come and gone since the last call.

        Raises CSDTypeError.
        """
        if len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            known = {id(group): initial for group, initial in zip(self._groups, self._initial, strict=True)}
            if len(groups) != len(known) or any(id(group) in known for group in groups):
                self._initial = [known[id(g)] if id(g) in known else self.stored_hyperparameters(g) for g in groups]
            self._groups = [*groups]  # if all are new, load_state_dict() has replaced the old ones, in their order
        return self._initial

    def check_rules(self, groups: Groups) -> None:
        """Raise CSDRuntimeError if the rule of a group has been changed since the group was added."""
        for k, (group, then) in enumerate(zip(groups, self.of(groups), strict=True)):
            now, before = (self._rule_of(g).name for g in (group, then))
            if group.get("rule") != then.get("rule") and now != before:
                raise CSDRuntimeError(
                    f"the rule of group {k} was {before} when the group was added, and is {now} now: it cannot be "
                    "changed; make a new optimizer"
                )
