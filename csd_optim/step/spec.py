"""What a step does: which parameters take part, with which gradients and constants.

How gradients and parameters travel is in travel.py; how a step runs and ends is in live.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ..muon.newton_schulz import Orthogonal
from ..params.grad_source import GradSource
from ..params.param_state import ParamState

# By id of a parameter: this rank's rows of the mean gradient; `grad` has only this rank's own gradient.
Rows = Mapping[int, torch.Tensor]
NO_ROWS: Rows = MappingProxyType({})


class Arguments(Protocol):
    """Attributes of the optimizer that a program may change at any time: each step reads them anew."""

    param_groups: list[dict[str, Any]]
    grad_dtype: torch.dtype | None
    topk: float | None
    topk_warmup: int
    error_feedback: bool
    max_grad_norm: float | None
    user_state: dict[str, Any]


class GradOptions(NamedTuple):
    """How gradients travel in this step: the optimizer's arguments of these names."""

    grad_dtype: torch.dtype | None
    topk: float | None
    topk_warmup: int
    error_feedback: bool
    max_grad_norm: float | None = None
    reduced: Rows = NO_ROWS


class Participants(NamedTuple):
    """Parameters that take part in a step."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    groups_of: list[int]  # the indices of their groups


@dataclass
class StepPlan:
    """The part of a step that is reused while the same parameters take part."""

    params: list[torch.Tensor]
    param_states: list[ParamState]
    rows: np.ndarray[Any, Any]  # the parameters' rows in the table
    layouts: list[tuple[str, tuple[str, ...]]]  # the distinct pairs of rule and sections
    layout_of: np.ndarray[Any, Any]  # index into `layouts`, for each parameter
    table: np.ndarray[Any, Any]  # dtype PARAM, without gradients and hyperparameters
    grad_dtype: torch.dtype | None  # the optimizer's option when the plan was made
    changes: int  # StateMap.changes when the plan was made


@dataclass
class BoundStep:
    """A step whose parameters have their places on the devices."""

    plan: StepPlan
    participants: Participants
    new: list[ParamState]  # without states: the step creates them
    written: list[ParamState]  # written from outside since the last step
    coded: list[ParamState]  # with 8-bit states


@dataclass
class StepSpec:
    """What a step does, checked: for each parameter a row of `table`, with its gradient and constants."""

    plan: StepPlan
    grads: dict[int, torch.Tensor]  # by row of the table: gradients of the parts that this rank updates
    steps: np.ndarray[Any, Any]  # step counts of all parameters after this step
    table: np.ndarray[Any, Any]  # dtype PARAM
    hypers: np.ndarray[Any, Any]  # dtype HYPER
    sources: dict[int, GradSource]  # by row: gradients that the engine cannot read as they are
    written: list[ParamState]  # written from outside since the last step
    with_residual: list[ParamState]  # parameters whose residuals the step changes
    error_feedback: bool
    unscaled: bool  # grad_scale is invertible: a gradient that is sent in full leaves no residual
    orthogonal: dict[int, Orthogonal] = field(default_factory=dict)  # by row: the parameters that take two passes
    # By row: values set from outside, where only the step itself detects the write (8-bit states). An undo restores
    # them.
    outside_values: dict[int, torch.Tensor] = field(default_factory=dict)
