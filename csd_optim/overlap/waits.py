"""The nets around a model's parameters: they make the reader of a parameter wait while it is still under way.

    pre-hook        of each module with parameters: waits for all of them before the module's forward
    WaitingDict     in `module._parameters`: for reads that bypass the module's forward, such as
                    `F.linear(x, m.weight)`, a chunked loss, `nn.MultiheadAttention`, `state_dict()`
    GatherNet       where FSDP2 reads the shards that it all-gathers: see fsdp.py
    CompiledCall    around a module that `torch.compile` compiled: waits for all parameters below it
    WaitingList     in `group["params"]`: for reads through the optimizer

While nothing is under way, each net costs the test of a flag, and on an accelerator a check for graph capture. We hold
no lock while a reader waits. The nets cannot catch references taken earlier, as by `ps = list(model.parameters())`, or
C++ code that is passed a WaitingList itself.

`torch.compile` traces Python once and never runs these nets again. Below a CompiledCall that is right, and the nets
leave no trace in the graph. Elsewhere, as in a compiled function that calls the model, a traced net gives up its
parameters: they leave `Nets.reached`, and from then on each step() waits for them before it returns. The same holds for
CUDA graphs, whose replay runs no Python at all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, cast

import torch
from torch import nn

from ..accelerator import is_captured, is_on_accelerator
from ..errors import CSDRuntimeError
from .fsdp import GatherNet, groups_of, is_fsdp, is_fsdp1, shards_in, unit_modules


class Arrivals(Protocol):
    """The parameters under way."""

    active: bool  # whether wait() has to be called: a step is under way, or the order of use is noted. Plain attribute

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Return when `params` have arrived, for all threads and streams; raise the error of a step that failed.

        Called only while `active`: with all parameters of a module when it is entered, and with single ones when they
        are read. The same ones may come repeatedly; all belong to the optimizer. Any thread may call this.
        """

    def settle(self) -> None:
        """Return when all have arrived; raise the error of a step that failed, even before other ranks know of it."""

    def remove_if_dropped(self) -> bool:
        """Remove the nets if their optimizer is gone, and nothing else can. Returns whether it is."""


# Copies and pickles of our hooks become this: a function that takes any arguments and returns None. Unpickling it does
# not import csd_optim.
NO_OP: tuple[Any, ...] = getattr, (contextlib.nullcontext(), "__exit__")


class NoArrivals:
    """Arrivals that never wait: for nets that have been removed, but are still referenced."""

    active = False

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        pass

    def settle(self) -> None:
        pass

    def remove_if_dropped(self) -> bool:
        return False


class Reach:
    """The parameters that the nets of one optimizer wait for. Refers to no module, so as not to keep a model alive."""

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.ours: dict[int, torch.Tensor] = {id(p): p for p in params}
        self.ids: set[int] = set()

    def give_up(self, params: Iterable[torch.Tensor]) -> None:
        """Stop waiting for these parameters at later steps; wait for them now, once."""
        params = list(params)
        self.ids.difference_update(map(id, params))
        if self.arrivals.active:
            self.arrivals.wait(params)


class Cover:
    """Whether a compiled module is running: all parameters below it have arrived."""

    is_running = False


class Net:
    """The forward pre-hook of a module. The module's WaitingDict waits through it, too.

    A copy, made with the model or by pickle, does nothing, and is read without csd_optim.
    """

    def __init__(self, reach: Reach, params: list[torch.Tensor], covers: tuple[Cover, ...]) -> None:
        self.arrivals: Arrivals = reach.arrivals
        self.reach = reach
        self.params = params  # of the module
        self.covers = covers
        self.number: int = next(_numbers)
        _nets[self.number] = self

    def __call__(self, module: nn.Module, args: Any) -> None:
        # Not the parameters of `module`, which may be a replica of nn.DataParallel.
        if self.has_to_wait():
            self.arrivals.wait(self.params)

    def has_to_wait(self) -> bool:
        """Return whether this net has to wait now. Gives up its parameters if it is being traced or captured."""
        for cover in self.covers:
            if cover.is_running:
                return False
        # Tested before `active`, on which the graph would be specialized, and which may change while it is traced.
        if torch.compiler.is_dynamo_compiling():
            give_up(self.number)
            return False
        if self.params and is_on_accelerator(self.params[0]) and is_captured(self.params[0].device):
            give_up(self.number)  # a replay of the graph would not wait
            return False
        return self.arrivals.active

    def wait_for(self, values: Iterable[object]) -> None:
        if ours := [v for v in values if id(v) in self.reach.ours]:
            self.arrivals.wait(cast(list[torch.Tensor], ours))

    def __reduce__(self) -> tuple[Any, ...]:
        return NO_OP


_numbers = itertools.count()
_nets: weakref.WeakValueDictionary[int, Net] = weakref.WeakValueDictionary()


def give_up(number: int) -> bool:
    """Give up the parameters of a net that is captured, or traced outside a CompiledCall: it will not run again.

    Takes the net's number, because dynamo in torch 2.9 passes only constants to a call that it makes while it traces.
    """
    net = _nets[number]
    net.reach.give_up(net.params)
    return True


class WaitingDict(dict[str, Any]):
    """A `module._parameters` that waits for each value before it returns it. Copies and pickles as a dict."""

    __slots__ = ("net",)
    net: Net

    def wait_for(self, values: Iterable[object]) -> None:
        if self.net.has_to_wait():
            self.net.wait_for(values)

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if self.net.has_to_wait():
            self.net.wait_for((value,))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = dict.get(self, name, default)
        self.wait_for((value,))
        return value

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        if self.net.has_to_wait() and not only_frees_gradients(frame := sys._getframe(1)):
            if frame.f_code is _SAVE_CODE:
                self.net.arrivals.settle()
            else:
                self.net.wait_for(dict.values(self))
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
        if self.net.has_to_wait():
            self.net.arrivals.settle()
        return dict, (), None, None, iter(self.items())


_SAVE_CODE: CodeType = nn.Module._save_to_state_dict.__code__
_ZERO_GRAD_CODE: CodeType = nn.Module.zero_grad.__code__
_MAX_FRAMES = 10  # frames from `zero_grad` to `items`, with some to spare; 5 in torch 2.13


def only_frees_gradients(frame: FrameType | None) -> bool:
    """Return whether the caller is `model.zero_grad(set_to_none=True)`, which reads no parameter.

    Trainers call it right after `step()`. With set_to_none=False it has to wait: the step still reads the gradients.
    """
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if frame.f_code is _ZERO_GRAD_CODE:
            return bool(frame.f_locals["set_to_none"])
        frame = frame.f_back
    return False


class CompiledCall:
    """A wrapper of a compiled module that first waits for all parameters below the module.

    It replaces `module._compiled_call_impl` or `module.forward`, and pickles as the callable that it replaces.
    """

    def __init__(self, compiled: Callable[..., Any], reach: Reach, params: list[torch.Tensor]) -> None:
        functools.update_wrapper(self, compiled)
        self.compiled = compiled
        self.arrivals: Arrivals = reach.arrivals
        self.params = params
        self.cover: Cover = Cover()
        self.covers: tuple[Cover, ...] = ()  # of the compiled modules around this one, and its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or any(cover.is_running for cover in self.covers):
            return self.compiled(*args, **kwargs)
        if self.arrivals.active:
            self.arrivals.wait(self.params)
        self.cover.is_running = True
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self.cover.is_running = False

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.compiled,)


def itself(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


@functools.cache
def configure_compiler() -> None:
    """Tell torch.compile to run give_up() while it traces, and not to compile the methods of the nets by themselves."""
    from torch._dynamo.eval_frame import skip_code  # takes a second, but the optimizer has imported it already

    torch.compiler.assume_constant_result(give_up)  # type: ignore[no-untyped-call]
    # Between two graphs these methods are called as plain functions. If dynamo compiled them by themselves there,
    # is_dynamo_compiling() would be true and the nets would give up.
    for kind in (Net, WaitingDict, CompiledCall):
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                skip_code(function.__code__)


class Site:
    """A module's nets, and what they replaced: to detect later changes of the module, and to remove the nets."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind: type[nn.Module] = type(module)
        self.plain: dict[str, Any] | None = None  # the original module._parameters
        self.waiting: WaitingDict | None = None
        self.net: Net | None = None
        self.hook: Any = None
        self.calls: dict[str, CompiledCall] = {}  # by the attribute that it replaces
        self.originals: dict[str, Any] = {}  # the original values of these attributes
        self.params: list[tuple[str, torch.Tensor]] = []  # empty where FSDP replaces them

    def is_intact(self) -> bool:
        module = self.module
        attributes = module.__dict__
        if type(module) is not self.kind or compiled_parts(module).keys() != self.calls.keys():
            return False
        if any(attributes.get(name) is not call for name, call in self.calls.items()):
            return False
        if self.hook and self.hook.id not in module._forward_pre_hooks:
            return False
        if self.waiting is None:
            return True
        return attributes["_parameters"] is self.waiting and all(
            dict.get(self.waiting, name) is param for name, param in self.params
        )


class Nets:
    """The nets of one optimizer around one model, from the constructor to `remove`.

    `params` are the optimizer's. Those whose ids are not in `reached` can be read unnoticed, so they have to arrive
    before `step()` returns: parameters outside the model, those of a ScriptModule or of FSDP1, and those that were
    traced into the graph of a compiled function or captured. `reached` may shrink during a forward.
    Raises CSDRuntimeError if another optimizer's nets are around one of the modules.
    """

    def __init__(self, model: nn.Module, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        configure_compiler()
        self.model = model
        self.reach: Reach = Reach(params, arrivals)
        self.sites: dict[nn.Module, Site] = {}
        modules = list(model.modules())
        hidden = self._hidden(modules)
        owned = {m: [p for p in self._own(m) if id(p) not in hidden] for m in modules if not is_script(m)}
        for module in owned:
            others = module.__dict__["_parameters"]
            if owned[module] and isinstance(others, WaitingDict) and not others.net.arrivals.remove_if_dropped():
                raise CSDRuntimeError(
                    f"{type(module).__name__} already waits for another optimizer's parameters: call overlap(None) "
                    "on that one first"
                )
        self.reach.ids.update(id(p) for own in owned.values() for p in own)
        ours = self.reach.ours
        self.gathers: list[GatherNet] = [GatherNet(g, ours, arrivals) for g in groups_of(modules) if shards_in(g, ours)]
        exchanged = {n for m in modules if is_fsdp(m) for n in unit_modules(m)}
        covers = self._cover(owned)
        for module, own in owned.items():
            self._install(module, own, tuple(covers.get(module, ())), module in exchanged)

    def _own(self, module: nn.Module) -> list[torch.Tensor]:
        return [p for p in dict.values(module.__dict__["_parameters"]) if id(p) in self.reach.ours]

    def _hidden(self, modules: list[nn.Module]) -> set[int]:
        """Return the ids of the parameters that are read below Python (TorchScript), or under another name (FSDP1)."""
        return {id(p) for m in modules if is_script(m) or is_fsdp1(m) for p in m.parameters()}

    def _cover(self, owned: dict[nn.Module, list[torch.Tensor]]) -> dict[nn.Module, list[Cover]]:
        """Put a CompiledCall around each compiled module. Returns the covers of each module and of those above it."""
        covers: dict[nn.Module, list[Cover]] = {}
        calls: dict[nn.Module, list[CompiledCall]] = {}
        for module in owned:
            site = self.sites[module] = Site(module)
            for name, compiled in compiled_parts(module).items():
                below = [m for m in module.modules() if m in owned]
                call = CompiledCall(compiled, self.reach, [p for m in below for p in owned[m]])
                for m in below:
                    covers.setdefault(m, []).append(call.cover)
                if name in module.__dict__:
                    site.originals[name] = module.__dict__[name]
                site.calls[name] = call
                calls.setdefault(module, []).append(call)
                module.__dict__[name] = call
        for module, compiled_here in calls.items():
            for call in compiled_here:
                call.covers = tuple(covers[module])
        return covers

    def _install(
        self, module: nn.Module, own: list[torch.Tensor], covers: tuple[Cover, ...], is_exchanged: bool
    ) -> None:
        if not own:
            return
        site = self.sites[module]
        site.net = net = Net(self.reach, own, covers)
        site.hook = module.register_forward_pre_hook(net, prepend=True)
        site.plain = module.__dict__["_parameters"]
        site.params = [] if is_exchanged else [(name, p) for name, p in site.plain.items() if id(p) in self.reach.ours]
        site.waiting = WaitingDict(site.plain)
        site.waiting.net = net
        module.__dict__["_parameters"] = site.waiting

    @property
    def reached(self) -> set[int]:
        """Ids of the parameters whose readers wait."""
        return self.reach.ids

    def intact(self) -> bool:
        """Return whether all nets are in place, and no module lacks one. If not: `remove`, and make new ones."""
        if not all(site.is_intact() for site in self.sites.values()):
            return False
        if not all(gather.is_intact() for gather in self.gathers):
            return False
        stack, seen = [self.model], {self.model}
        while stack:
            module = stack.pop()
            if module not in self.sites and not is_script(module):
                found = self._own(module)
                if found or (compiled_parts(module) and any(id(p) in self.reach.ours for p in module.parameters())):
                    return False
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
        return True

    def remove(self) -> None:
        """Restore the model. Nets that are still referenced elsewhere no longer wait."""
        for site in self.sites.values():
            attributes = site.module.__dict__
            for name, call in site.calls.items():
                call.arrivals = NoArrivals()
                if attributes.get(name) is call:
                    del attributes[name]
                    attributes.update({name: site.originals[name]} if name in site.originals else {})
            if site.net:
                site.hook.remove()
                site.net.arrivals = NoArrivals()
            if site.plain is not None and site.waiting is attributes["_parameters"]:
                site.plain.clear()
                site.plain.update(dict.items(site.waiting))
                attributes["_parameters"] = site.plain
        for gather in self.gathers:
            gather.arrivals = NoArrivals()
            gather.remove()
        self.gathers.clear()
        self.sites.clear()
        self.reach.ids.clear()


def is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def compiled_parts(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the compiled callables of this module, by the attribute through which they are called.

    They come from `module.compile()`, from `torch.compile(module)`, whose result is a module, too, or from a compiled
    `forward`.
    """
    found = {}
    if module._compiled_call_impl is not None:
        found["_compiled_call_impl"] = module._compiled_call_impl
    forward = module.__dict__.get("forward") or type(module).forward
    if hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False):
        found["forward"] = module.forward
    return found


class WaitingList(list[torch.Tensor]):
    """A `group["params"]` that waits for all its parameters before any is read. Copies and pickles as a list.

    `list.copy(params)`, as csd_optim itself uses it, does not wait.
    """

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        super().__init__(params)
        self.arrivals = arrivals

    def wait(self) -> None:
        if self.arrivals.active:
            self.arrivals.wait(list.copy(self))

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.wait()
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.Tensor]:
        self.wait()
        return super().__reversed__()

    def __getitem__(self, index: Any) -> Any:
        self.wait()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return self.copy() + other

    def __radd__(self, other: Any) -> Any:  # for `sum(lists, [])`: list.__add__ would read without waiting
        return other + self.copy()

    def __mul__(self, times: Any) -> Any:
        return self.copy() * times

    def pop(self, *index: Any) -> torch.Tensor:
        self.wait()
        return super().pop(*index)

    def copy(self) -> list[torch.Tensor]:
        self.wait()
        return super().copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return list, (), None, iter(self)
