"""The Python description of an update rule; its arithmetic is in a header in native/include, see rules.h there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CSDValueError
from ..muon.newton_schulz import Orthogonal
from ..store.sections import CODEC_OF_RULE, FP32

FLT_MAX = (2 - 2**-23) * 2.0**127  # the largest finite fp32 number: the devices compute in fp32

Group = dict[str, Any]  # one of an optimizer's `param_groups`
RuleOf = Callable[[Group], "UpdateRule"]  # the rule of a group; for an empty group, the rule of the optimizer's class


@dataclass(frozen=True)
class UpdateRule:
    """One optimizer's update rule: the names of its states, and its constants for a step."""

    name: str  # identifies the rule in a store
    sections: tuple[str, ...]  # of a tile, 1 to 4: the fp32 master, then the states by their names in `state`
    min_sections: int  # number of sections that every parameter has; others depend on its group
    # hyperparameter of a group → its default, as of the rule's class; a store keeps the values. In an optimizer of that
    # class, groups get the constructor's arguments instead.
    defaults: Mapping[str, Any]
    # (group, sections, t, grad_scale) → csd_rule and csd_hyper.c at step t, computed in double, for the parameters of
    # the group that have these sections. Gradients are multiplied by `grad_scale`.
    constants: Callable[[Group, Sequence[str], float, float], tuple[int, tuple[float, ...]]]
    # hyperparameter → the state that is needed while the hyperparameter is true (nonzero).
    switches: Mapping[str, str] = field(default_factory=dict)
    # state → the hyperparameter that is the initial value of all its elements; other states start at zero.
    initial: Mapping[str, str] = field(default_factory=dict)
    uncoded: Mapping[str, str] = field(default_factory=dict)  # state → why it cannot be kept in 8 bits
    texts: Collection[str] = ()  # hyperparameters that are text, None or tables of numbers: `orthogonal` checks them
    # (group, shape, device) → how a parameter is orthogonalized between two passes over its tiles (`constants` are then
    # the first pass's); None: one pass. Raises CSDValueError.
    orthogonal: Callable[[Group, Sequence[int], torch.device], Orthogonal] | None = None
    decays_gradient: Callable[[Group], bool] = lambda group: False  # whether weight decay is added to the gradient
    torch_counts: bool = True  # torch's checkpoints have a `step` beside its states; else these count as one step's

    @property
    def codec(self) -> str:
        """The codec of the rule's 8-bit states; FP32 if there is none."""
        return CODEC_OF_RULE.get(self.name, FP32)

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """The names of a group's hyperparameters."""
        return (*self.defaults,)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of hyperparameters that are numbers or pairs of numbers."""
        return tuple(name for name in self.defaults if name not in self.texts)

    def checked_constants(
        self, group: Group, sections: Sequence[str], t: float, grad_scale: float
    ) -> tuple[int, tuple[float, ...]]:
        """Return `constants`.

        Raises CSDValueError if a hyperparameter, a constant or `grad_scale` is not a finite number.

        One step with such a value would make all parameters and states NaN, durably.
        """
        try:
            rule, constants = self.constants(group, sections, t, grad_scale)
            values = self._values(group)
            numbers = [*constants, *(v for v in values if isinstance(v, float))]  # constants may not use every value
            has_text = any(issubclass(kind, (str, bytes)) for kind in {*map(type, values)})  # float() would accept text
            # fsum() propagates NaN, which comparisons may miss.
            is_finite = max(numbers) <= FLT_MAX and min(numbers) >= -FLT_MAX and not math.isnan(math.fsum(numbers))
            if is_finite and not has_text:
                return rule, constants
            why = f"at step {t:.0f} they give {constants}"
        except (ArithmeticError, TypeError, ValueError) as e:
            why = str(e)
        for name in self.numbers:
            for v in self._values(group, (name,)):
                if isinstance(v, (str, bytes)) or (isinstance(v, float) and not abs(v) <= FLT_MAX):
                    value = group[name]
                    raise CSDValueError(f"Invalid {name} of a parameter group: {value!r}; it must be a finite number")
        if not abs(grad_scale) <= FLT_MAX:
            raise CSDValueError(
                f"gradients cannot be multiplied by {grad_scale}: the loss scale is no finite number, or with "
                "max_grad_norm the norm of the gradients is none; nothing was changed"
            )
        given = ", ".join(f"{name}={group.get(name)!r}" for name in self.hyperparameters)
        raise CSDValueError(f"Invalid hyperparameters of a parameter group: {given}; {why}")

    def _values(self, group: Group, names: Sequence[str] = ()) -> list[Any]:
        """Return these hyperparameters of a group (default: all numbers), with pairs flattened."""
        values = [*map(group.get, names or self.numbers)]
        return [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]

    def check(self, group: Group, grad_scale: float = 1.0) -> None:
        """Raise CSDValueError, as checked_constants() does, for a first step of this group."""
        self.checked_constants(group, self.sections_for(group), 1.0, grad_scale)

    def sections_for(self, group: Group, held: Collection[str] = ()) -> tuple[str, ...]:
        """Return the sections that a parameter of this group needs, plus those for which it has a state (`held`)."""
        switched_on = (state for name, state in self.switches.items() if group[name])
        needed = {*self.sections[: self.min_sections], *held, *switched_on}
        return tuple(section for section in self.sections if section in needed)

    def initial_for(self, group: Group) -> dict[str, float]:
        """Return the initial values of the states of a parameter of this group, where they are not zero."""
        values = {state: float(group[name]) for state, name in self.initial.items()}
        return {state: value for state, value in values.items() if value}

    def lacking(self, group: Group, sections: Sequence[str]) -> tuple[str, str]:
        """Return the first hyperparameter of the group that needs a state not in `sections`, and the state.

        The caller knows that such a hyperparameter exists.
        """
        return next((name, state) for name, state in self.switches.items() if group[name] and state not in sections)

    def takes(self, sections: Sequence[str]) -> bool:
        """Return whether a parameter of this rule can have exactly these sections."""
        in_order = tuple(section for section in self.sections if section in sections)
        return (*sections,) == in_order and in_order[: self.min_sections] == self.sections[: self.min_sections]
