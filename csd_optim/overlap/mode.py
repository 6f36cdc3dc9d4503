"""When an optimizer's steps are made: what it asks of each way, and what those beside the model have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..engine.trace import Span
from ..params.groups import Groups, members
from ..step.prepare import Participants, PreparedStep
from ..store.format import Record
from .spans import ModelSpans
from .waits import Nets, WaitingList


class InStep:
    """Within step(), to the end: without overlap. The other ways derive from this one."""

    overlaps = False  # on all ranks, or on none

    @property
    def under_way(self) -> bool:
        """Has the step that is asked for now begun in backward, so that step() only has to end it?"""
        return False

    def end_step(self, record: Record | None) -> None:
        """Ends that. `record`: for its commit. Raises what a step raises."""
        raise NotImplementedError

    def before_step(self, *, skips: bool, scaled: bool) -> None:
        """step() is called. `skips`: it will do nothing; `scaled`: a GradScaler takes part.

        Raises what made the step before fail, among ranks on all of them: a collective.
        """

    def check(self, taking_part: Participants) -> None:
        """To be called before anything of a step uses the engine."""

    def compare(self, step: PreparedStep) -> None:
        """To be called with a step that has changed nothing yet."""

    def launch(self, step: PreparedStep | None, record: Record | None) -> bool:
        """Makes the step, which goes on while the program does; arrive_at_once() is to follow. False: it cannot.

        `step` None: this rank has nothing to do. Raises what a step raises. A collective.
        """
        return False

    def arrive_at_once(self) -> None:
        """Returns when the parameters have arrived that nobody would wait for. Raises what a step raises.

        Not within the engine's lock, which a step that fails takes to be undone.
        """

    def settle(self) -> None:
        """Returns when all parameters of this process are those of the last step. Raises what made that fail."""

    def come_to_rest(self, *, meets: bool) -> None:
        """Returns when no step is under way here; with `meets`, a collective, on any rank. Raises what made it fail."""

    def clears(self, *, set_to_none: bool) -> bool:
        """Before gradients are cleared. Returns whether it has done that itself."""
        return False

    def end(self) -> None:
        """Nobody waits any more. Not while a step is under way."""

    def close(self) -> None:
        """Ends it, with what is under way. Raises what made that fail."""

    def stats(self) -> dict[str, Any] | None:
        """See CSDAdam.stats()."""
        return None


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
