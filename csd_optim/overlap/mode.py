"""The base class of the modes in which a step runs concurrently with the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from ..engine.trace import Span
from ..errors import CSDError
from ..params.groups import Groups, members
from ..step.mode import InStep
from .guards.groups import WaitingList
from .guards.model import ModelGuards
from .spans import ModelSpans


class ConcurrentMode(InStep):
    """Steps that run concurrently with a model. While `active`, its parameters are read after wait(): see Arrivals."""

    overlaps = True

    def __init__(self, model: torch.nn.Module, groups: Callable[[], Groups], spans: list[Span] | None) -> None:
        """`groups` returns the optimizer's groups, which load_state_dict() replaces; empty if the optimizer is gone.

        `spans`: see ModelSpans. Subclasses register their gradient hooks after this constructor, so that the spans see
        each gradient first.
        """
        self.active = False
        self._groups = groups
        self._hooks: list[RemovableHandle] = []
        params = [p for _, _, p in members(groups())]
        self._guards = ModelGuards(model, params, self)
        self._spans = None if spans is None else ModelSpans(spans, model, params)
        self._wrap_groups()

    def _trainable_params(self) -> list[torch.Tensor]:
        """Return each parameter that requires a gradient, once: a group may list it twice."""
        return list({id(p): p for _, _, p in members(self._groups()) if p.requires_grad}.values())

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        raise NotImplementedError

    def _wrap_groups(self) -> None:
        """Make iterating over a group's parameters wait for them, too."""
        for group in self._groups():
            if not isinstance(group["params"], WaitingList):
                group["params"] = WaitingList(group["params"], self)

    def end(self) -> None:
        if self._spans:
            self._spans.end()
        self._guards.remove()
        for hook in self._hooks:
            hook.remove()
        for group in self._groups():
            group["params"] = list.copy(group["params"])  # does not wait

    def abandon(self) -> None:
        """End the step under way, because nobody is left to complete it. Raises what a step raises."""
        raise NotImplementedError

    def remove_if_dropped(self) -> bool:
        """End this mode if its optimizer was dropped, so that no other call can end it. Returns whether it was."""
        if self._groups():
            return False
        with contextlib.suppress(CSDError):  # no caller is left to hear of it
            self.abandon()
        self.end()
        return True
