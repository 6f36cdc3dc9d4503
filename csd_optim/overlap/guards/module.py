"""The guard of one module, for the parameters in its own `_parameters`."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import ItemsView, Iterable, Iterator, ValuesView
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

from ...accelerator import is_captured, is_on_accelerator
from ..arrivals import NO_OP, Arrivals, NoArrivals
from .compiled import CompiledState


class Guarded:
    """The parameters that the guards of one optimizer wait for.

    Refers to no module, so as not to keep a model alive.
    """

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        """`params`: all of the optimizer's."""
        self.arrivals = arrivals
        self.params: dict[int, torch.Tensor] = {id(p): p for p in params}
        self.ids: set[int] = set()  # ids of the parameters whose readers wait

    def of_module(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the optimizer's parameters in the module's own `_parameters`."""
        return [p for p in dict.values(module.__dict__["_parameters"]) if id(p) in self.params]

    def give_up(self, params: Iterable[torch.Tensor]) -> None:
        """Stop waiting for these parameters at later steps; wait for them now, once."""
        params = list(params)
        self.ids.difference_update(map(id, params))
        if self.arrivals.active:
            self.arrivals.wait(params)


class ModuleHook:
    """The forward pre-hook of a module, also used by the module's WaitingDict.

    A copy of the hook, made with the model or by pickle, does nothing; unpickling it needs no csd_optim.
    """

    def __init__(self, guarded: Guarded, params: list[torch.Tensor], within: tuple[CompiledState, ...]) -> None:
        """`params`: the module's. `within`: the compiled modules around it."""
        self.arrivals: Arrivals = guarded.arrivals
        self.guarded = guarded
        self.params = params
        self.within = within
        self.number: int = next(_numbers)
        _hooks[self.number] = self

    def __call__(self, module: nn.Module, args: Any) -> None:
        # Not the parameters of `module`, which may be a replica of nn.DataParallel.
        if self.has_to_wait():
            self.arrivals.wait(self.params)

    def has_to_wait(self) -> bool:
        """Return whether readers have to wait now. Gives up the parameters if this is being traced or captured."""
        for compiled in self.within:
            if compiled.is_running:
                return False
        # Tested before `active`: the graph would be specialized on `active`, which may change during tracing.
        if torch.compiler.is_dynamo_compiling():
            give_up(self.number)
            return False
        if self.params and is_on_accelerator(self.params[0]) and is_captured(self.params[0].device):
            give_up(self.number)  # a replay of the graph would not wait
            return False
        return self.arrivals.active

    def wait_for(self, values: Iterable[object]) -> None:
        if params := [v for v in values if id(v) in self.guarded.params]:
            self.arrivals.wait(cast(list[torch.Tensor], params))

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_OP


_numbers = itertools.count()
_hooks: weakref.WeakValueDictionary[int, ModuleHook] = weakref.WeakValueDictionary()


def give_up(number: int) -> bool:
    """Give up the parameters of a hook that is captured, or traced outside a CompiledCall, and will not run again.

    `number`: the hook's, because dynamo in torch 2.9 passes only constants to a call made while tracing.
    """
    hook = _hooks[number]
    hook.guarded.give_up(hook.params)
    return True


class WaitingDict(dict[str, Any]):
    """A `module._parameters` that waits for each parameter before returning it. Copies and pickles as a dict."""

    __slots__ = ("hook",)
    hook: ModuleHook

    def wait_for(self, values: Iterable[object]) -> None:
        if self.hook.has_to_wait():
            self.hook.wait_for(values)

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if self.hook.has_to_wait():
            self.hook.wait_for((value,))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = dict.get(self, name, default)
        self.wait_for((value,))
        return value

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        if self.hook.has_to_wait() and not only_frees_gradients(frame := sys._getframe(1)):
            if frame.f_code is _SAVE_CODE:
                self.hook.arrivals.settle()
            else:
                self.hook.wait_for(dict.values(self))
        return dict.items(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.wait_for(dict.values(self))
        return dict.values(self)

    def pop(self, name: str, *default: Any) -> Any:
        self.wait_for((dict.get(self, name),))
        return dict.pop(self, name, *default)

    def popitem(self) -> tuple[str, Any]:
        self.wait_for(dict.values(self))
        return dict.popitem(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        value = dict.setdefault(self, name, default)
        self.wait_for((value,))
        return value

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)  # overridden so that dict(self), {**self}, copy() and | call __getitem__

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self.hook.has_to_wait():
            self.hook.arrivals.settle()
        return dict, (), None, None, iter(self.items())


_SAVE_CODE: CodeType = nn.Module._save_to_state_dict.__code__
_ZERO_GRAD_CODE: CodeType = nn.Module.zero_grad.__code__
_MAX_FRAMES = 10  # frames from `zero_grad` to `items`, with some to spare; 5 in torch 2.13


def only_frees_gradients(frame: FrameType | None) -> bool:
    """Return whether the caller is `model.zero_grad(set_to_none=True)`, which reads no parameter.

    Trainers call this right after `step()`. With set_to_none=False the call has to wait: the step still reads
    gradients.
    """
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code is _ZERO_GRAD_CODE:
            return bool(frame.f_locals["set_to_none"])
        frame = frame.f_back
    return False


class ModuleGuard:
    """A module's hook and WaitingDict, with the originals: detects later changes, and restores the module.

    A module without parameters to guard stays unchanged, and is only watched.
    """

    def __init__(
        self,
        module: nn.Module,
        guarded: Guarded,
        params: list[torch.Tensor],
        within: tuple[CompiledState, ...],
        *,
        is_exchanged: bool,
    ) -> None:
        """`params`, `within`: as in ModuleHook. `is_exchanged`: FSDP replaces the module's parameters."""
        self.module = module
        self.kind: type[nn.Module] = type(module)
        self.hook: ModuleHook | None = None
        if not params:
            return
        self.hook = hook = ModuleHook(guarded, params, within)
        self.handle: Any = module.register_forward_pre_hook(hook, prepend=True)
        self.plain: dict[str, Any] = module.__dict__["_parameters"]
        named = [] if is_exchanged else self.plain.items()
        self.params: list[tuple[str, torch.Tensor]] = [(name, p) for name, p in named if id(p) in guarded.params]
        self.waiting: WaitingDict = WaitingDict(self.plain)
        self.waiting.hook = hook
        module.__dict__["_parameters"] = self.waiting

    def is_intact(self) -> bool:
        module = self.module
        if type(module) is not self.kind:
            return False
        if self.hook is None:
            return True
        return (
            self.handle.id in module._forward_pre_hooks
            and module.__dict__["_parameters"] is self.waiting
            and all(dict.get(self.waiting, name) is param for name, param in self.params)
        )

    def remove(self) -> None:
        if self.hook is None:
            return
        self.handle.remove()
        self.hook.arrivals = NoArrivals()
        attributes = self.module.__dict__
        if attributes["_parameters"] is self.waiting:
            self.plain.clear()
            self.plain.update(dict.items(self.waiting))
            attributes["_parameters"] = self.plain
