"""The base class of the modes in which a step runs concurrently with the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import CSDError
from ..params.groups import members
from ..step.mode import InStep
from ..step.steps import Steps
from .arrivals import NoArrivals
from .guards.groups import WaitingList
from .guards.model import ModelGuards
from .spans import ModelSpans


class ConcurrentMode(InStep):
    """Steps that run concurrently with a model. While `active`, readers of parameters call wait(): see Arrivals."""

    overlaps = True

    def __init__(self, steps: Steps, model: torch.nn.Module) -> None:
        """Subclasses register gradient hooks after this constructor, so that the spans see each gradient first."""
        self.active: bool = False
        self._steps, self._engine, self._state_map = steps, steps.engine, steps.state_map
        self._hooks: list[RemovableHandle] = []
        self._lists: list[WaitingList] = []  # lists that were put into groups
        params, spans = [p for _, _, p in members(steps.groups)], steps.engine.states.timeline.model_spans
        self._guards = ModelGuards(model, params, self)
        self._spans = None if spans is None else ModelSpans(spans, model, params)
        self._wrap_groups()

    def _trainable_params(self) -> list[torch.Tensor]:
        """Return each parameter that requires a gradient, once: a group may list it twice."""
        return list({id(p): p for _, _, p in members(self._steps.groups) if p.requires_grad}.values())

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        raise NotImplementedError

    def _wrap_groups(self) -> None:
        """Make reads of the groups' parameter lists wait, too."""
        for group in self._steps.groups:
            if getattr(group["params"], "arrivals", None) is not self:
                group["params"] = WaitingList(list.copy(group["params"]), self)
                self._lists.append(group["params"])

    def close(self) -> None:
        if self._spans:
            self._spans.end()
        self._guards.remove()
        for hook in self._hooks:
            hook.remove()
        for group in self._steps.groups:
            group["params"] = list.copy(group["params"])  # does not wait
        for params in self._lists:  # a removed group still has its list, which must not keep this object alive
            params.arrivals = NoArrivals()

    def remove_if_dropped(self) -> bool:
        """Return whether the optimizer was dropped; if so, end this mode, as no other call can."""
        if self._steps.arguments is not None:
            return False
        with contextlib.suppress(CSDError, RuntimeError, MemoryError):  # no caller is left to handle an error
            self.close()
        return True
