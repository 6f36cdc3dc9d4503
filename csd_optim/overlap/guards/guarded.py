"""The parameters of an optimizer that guards make their readers wait for."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..arrivals import Arrivals


class Guarded:
    """The parameters that the guards of one optimizer wait for.

    Refers to no module, so as not to keep a model alive.
    """

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        """`params`: all of the optimizer's."""
        self.arrivals = arrivals
        self.params: dict[int, torch.Tensor] = {id(p): p for p in params}
        self.ids: set[int] = set()  # of those whose readers wait

    def of_module(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the optimizer's parameters that the module holds itself."""
        return [p for p in dict.values(module.__dict__["_parameters"]) if id(p) in self.params]

    def give_up(self, params: Iterable[torch.Tensor]) -> None:
        """Stop waiting for these parameters at later steps; wait for them now, once."""
        params = list(params)
        self.ids.difference_update(map(id, params))
        if self.arrivals.active:
            self.arrivals.wait(params)
