"""Optimizers as `csd-optim plan --optimizer` names them, such as `CSDSGD,momentum`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CSDValueError
from ..optim.adagrad import CSDAdagrad
from ..optim.adamw import CSDAdam
from ..optim.lion import CSDLion
from ..optim.optimizer import CSDOptimizer
from ..optim.rmsprop import CSDRMSprop
from ..optim.sgd import CSDSGD
from ..params.groups import check_state_dtype
from ..planning.advice import Optimizer

_CLASSES: tuple[type[CSDOptimizer], ...] = (CSDAdam, CSDSGD, CSDAdagrad, CSDRMSprop, CSDLion)
OPTIMIZERS = {cls.__name__: cls for cls in _CLASSES}


def described(text: str, state_dtype: str) -> tuple[Optimizer, tuple[str, ...], tuple[int, tuple[float, ...]]]:
    """Parse `CLASS[,OPTION...]`, an optimizer class and those of its arguments that add a state.

    Returns the optimizer for a plan, the names of its sections, and the rule and constants of its first step as
    csd_hyper has them. Raises CSDValueError, also if its states cannot be kept as `state_dtype`.
    """
    name, *options = (part.strip() for part in text.split(","))
    if name not in OPTIMIZERS:
        raise CSDValueError(f"Invalid optimizer: {text!r}; there are {', '.join(OPTIMIZERS)}")
    of, rule = OPTIMIZERS[name], OPTIMIZERS[name]._rule
    for option in options:
        if option not in rule.switches:
            known = ", ".join(rule.switches) or "nothing"
            raise CSDValueError(f"Invalid optimizer: {text!r}; {option!r} adds no state to {name}, but {known} does")
    check_state_dtype(state_dtype, rule=rule)
    asked: dict[str, Any] = dict.fromkeys(options, True)
    with of([torch.nn.Parameter(torch.zeros(1))], devices="null:", **asked) as optimizer:
        group = optimizer.param_groups[0]
    sections = rule.sections_for(group)
    found = Optimizer(name, tuple(n for n in rule.switches if n in options), rule.name, len(sections))
    return found, sections, rule.constants(group, sections, 1, 1.0)
