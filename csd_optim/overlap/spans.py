"""The times at which the model computes, for the timeline of CSD_OPTIM_TRACE, next to the work of the devices."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from ..engine.trace import Span
from .arrivals import NO_OP


class ModelSpans:
    """Notes each forward, from the first module entered to the first gradient, and each backward, from there to the
    last gradient. Serves as a forward pre-hook of all modules; a copy, with the model or pickled, does nothing.
    """

    def __init__(self, spans: list[Span], model: torch.nn.Module, params: Iterable[torch.Tensor]) -> None:
        """`spans`: the list to which spans are appended."""
        self._spans = spans
        self._entered = self._first = self._last = 0.0  # times: first module, first and last gradient; 0: not yet
        modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._hooks = [m.register_forward_pre_hook(self) for m in modules]
        self._hooks += [
            p.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            for p in params
            if p.requires_grad
        ]

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1:  # recomputed in backward
            return
        if self._first:
            self.append_spans()  # a backward before this forward: gradient accumulation
        self._entered = self._entered or time.perf_counter()

    def _on_grad(self, p: torch.Tensor) -> None:
        self._last = time.perf_counter()
        self._first = self._first or self._last

    def append_spans(self) -> None:
        """Append the spans of a forward and a backward, which has made its last gradient."""
        if self._entered and self._first:
            self._spans.append(("forward", self._entered, self._first))
        if self._first:
            self._spans.append(("backward", self._first, self._last))
        self._entered = self._first = 0.0

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_OP
