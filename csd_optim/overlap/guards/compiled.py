"""The guard of a compiled module: a call of the module waits for all parameters below it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..arrivals import Arrivals, NoArrivals


class CompiledState:
    """Whether a compiled module is running: all parameters below it have arrived."""

    is_running = False


class CompiledCall:
    """A wrapper of a compiled module that first waits for all parameters below the module.

    Replaces `module._compiled_call_impl` or `module.forward`, and pickles as the replaced callable.
    """

    def __init__(self, compiled: Callable[..., Any], arrivals: Arrivals, params: list[torch.Tensor]) -> None:
        functools.update_wrapper(self, compiled)
        self.compiled = compiled
        self.arrivals = arrivals
        self.params = params
        self.state: CompiledState = CompiledState()
        self.within: tuple[CompiledState, ...] = ()  # states of this module and of the compiled modules around it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or any(compiled.is_running for compiled in self.within):
            return self.compiled(*args, **kwargs)
        if self.arrivals.active:
            self.arrivals.wait(self.params)
        self.state.is_running = True
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self.state.is_running = False

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.compiled,)


def itself(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


class CompiledGuard:
    """A module with a CompiledCall in place of each of its compiled callables; most modules have none."""

    def __init__(self, module: nn.Module, arrivals: Arrivals, own: Mapping[nn.Module, Sequence[torch.Tensor]]) -> None:
        """`own`: the parameters of each module that readers wait for."""
        self.module = module
        parts, attributes = compiled_parts(module), module.__dict__
        params = [p for m in module.modules() for p in own.get(m, ())] if parts else []
        # By the name of the replaced attribute; and the original values.
        self.calls: dict[str, CompiledCall] = {
            name: CompiledCall(compiled, arrivals, params) for name, compiled in parts.items()
        }
        self._originals = {name: attributes[name] for name in parts if name in attributes}
        attributes.update(self.calls)

    def is_intact(self) -> bool:
        attributes = self.module.__dict__
        return compiled_parts(self.module).keys() == self.calls.keys() and all(
            attributes.get(name) is call for name, call in self.calls.items()
        )

    def remove(self) -> None:
        attributes = self.module.__dict__
        for name, call in self.calls.items():
            call.arrivals = NoArrivals()
            if attributes.get(name) is call:
                del attributes[name]
                attributes.update({name: self._originals[name]} if name in self._originals else {})


def compiled_parts(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the compiled callables of this module, by the attribute through which they are called.

    Made by `module.compile()`, by `torch.compile(module)`, which returns a module, or by compiling `forward`.
    """
    found = {}
    if module._compiled_call_impl is not None:
        found["_compiled_call_impl"] = module._compiled_call_impl
    forward = module.__dict__.get("forward") or type(module).forward
    if hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False):
        found["forward"] = module.forward
    return found
