"""What the ways of steps that go on beside the model have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from ..engine.trace import Span
from ..params.groups import Groups, members
from ..step.mode import InStep
from .spans import ModelSpans
from .waits import Nets, WaitingList


class BesideModel(InStep):
    """Steps that go on while a model runs: while `active`, who reads a parameter of it has to wait(). See Arrivals."""

    overlaps = True

    def __init__(self, model: torch.nn.Module, groups: Callable[[], Groups], spans: list[Span] | None) -> None:
        """`groups`: the optimizer's, which load_state_dict() exchanges; none: it is gone. `spans`: see ModelSpans.

        Who derives from this adds hooks of gradients: after it, so that spans see gradients first.
        """
        self.active = False
        self._groups = groups
        self._hooks: list[RemovableHandle] = []
        params = [p for _, _, p in members(groups())]
        self._nets = Nets(model, params, self)
        self._spans = None if spans is None else ModelSpans(spans, model, params)
        self._spread_nets()

    def _trained(self) -> list[torch.Tensor]:
        """Each parameter that requires a gradient, once: a group may list it twice."""
        return list({id(p): p for _, _, p in members(self._groups()) if p.requires_grad}.values())

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        raise NotImplementedError

    def _spread_nets(self) -> None:
        """Whoever goes through the parameters of a group waits, too."""
        for group in self._groups():
            if not isinstance(group["params"], WaitingList):
                group["params"] = WaitingList(group["params"], self)

    def end(self) -> None:
        if self._spans:
            self._spans.end()
        self._nets.remove()
        for hook in self._hooks:
            hook.remove()
        for group in self._groups():
            group["params"] = list(group["params"])

    def abandon(self) -> None:
        """What is under way is nobody's any more."""
        raise NotImplementedError

    def give_way(self) -> bool:
        """Ends if the optimizer is gone, which cannot be asked to. Returns whether it is."""
        if self._groups():
            return False
        self.abandon()
        self.end()
        return True
