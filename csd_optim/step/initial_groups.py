"""What an optimizer's groups were when they were added: a store keeps it, and the rule of a group cannot be changed."""

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
        self._groups: Groups = []  # as they were when of() was last called
        self._initial: list[dict[str, Any]] = []  # of each of these

    def kept(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return what a store keeps of a group. Raises CSDTypeError if it cannot keep a hyperparameter."""
        found = hyperparameters_of(group, self._rule_of(group).hyperparameters)
        if found.get("rule") == self._rule_of({}).name:  # as if the group did not name it
            del found["rule"]
        return found

    def of(self, groups: Groups) -> list[dict[str, Any]]:
        """Return them for the optimizer's groups as they are now: since the last call some may be gone, others new.

        Raises CSDTypeError.
        """
        if len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            known = {id(group): initial for group, initial in zip(self._groups, self._initial, strict=True)}
            if len(groups) != len(known) or any(id(group) in known for group in groups):
                self._initial = [known[id(g)] if id(g) in known else self.kept(g) for g in groups]
            self._groups = [*groups]  # if all are new ones, load_state_dict() has put them in the places of the others
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
