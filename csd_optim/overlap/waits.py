"""The nets around a model's parameters: whoever reads one that is still under way waits for it.

    pre-hook        of each module with parameters: they arrive together, before its forward
    WaitingDict     in `module._parameters`: what reads a parameter past its module's forward, such as
                    `F.linear(x, m.weight)`, a chunked loss, `nn.MultiheadAttention`, `state_dict()`
    GatherNet       where FSDP2 reads the shards that it gathers: see fsdp.py
    CompiledCall    around what `torch.compile` made of a module: all parameters below it arrive first
    WaitingList     in `group["params"]`

While nothing is under way each of them is one test of a flag, and on an accelerator whether a graph is captured. No
lock of ours is held while somebody waits. References that somebody has kept are out of reach:
`ps = list(model.parameters())`, and C++ that is handed a WaitingList itself.

`torch.compile` looks at Python once and never runs these nets again. Below a CompiledCall that is right, and they leave
no trace in the graph. Elsewhere, in a compiled function that calls the model, what was traced gives up its parameters:
they leave `Nets.reached`, and no later step lets them arrive after it has returned. So does what is captured in a CUDA
graph, a replay of which runs no Python at all.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol, cast

import torch
from torch import nn

from ..accelerator import is_captured, is_far
from ..errors import CSDRuntimeError
from .fsdp import GatherNet, groups_of, is_fsdp, is_fsdp1, ours_of, unit


class Arrivals(Protocol):
    """The parameters under way."""

    active: bool  # may anything have to be waited for, or is the order of use being noted? A plain attribute

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        """Return when these have arrived, for whatever thread and stream; raise what made the step fail.

        Called only while `active`: with a module's parameters when it is entered, and with single ones when they are
        read. Many come again and again; all of `params` are the optimizer's. Any thread may call it.
        """

    def settle(self) -> None:
        """Return when all have arrived; raise what made the step fail, also where others are to be told of it first."""

    def give_way(self) -> bool:
        """Take the nets away if nobody is left who could. Returns whether that is so."""


# What a hook of ours is where it was copied, or pickled: a function that takes anything and gives None. It takes no
# csd_optim to read.
NOTHING: tuple[Any, ...] = getattr, (contextlib.nullcontext(), "__exit__")


class Landed:
    """Arrivals of nothing: for nets that have been removed, and that somebody has a copy of."""

    active = False

    def wait(self, params: Iterable[torch.Tensor]) -> None:
        pass

    def settle(self) -> None:
        pass

    def give_way(self) -> bool:
        return False


class Reach:
    """What the nets of one optimizer are for. It knows no module, so that a model is freed as soon as nobody has it."""

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.ours: dict[int, torch.Tensor] = {id(p): p for p in params}
        self.ids: set[int] = set()

    def give_up(self, params: Iterable[torch.Tensor]) -> None:
        """These are no longer waited for."""
        params = list(params)
        self.ids.difference_update(map(id, params))
        if self.arrivals.active:
            self.arrivals.wait(params)


class Cover:
    """Whether a compiled module is running, all parameters below which have arrived."""

    inside = False


class Net:
    """The forward pre-hook of a module; its WaitingDict asks here too.

    A copy, with the model or pickled, does nothing, and takes no csd_optim to read.
    """

    def __init__(self, reach: Reach, params: list[torch.Tensor], covers: tuple[Cover, ...]) -> None:
        self.arrivals: Arrivals = reach.arrivals
        self.reach = reach
        self.params = params  # of the module
        self.covers = covers

    def __call__(self, module: nn.Module, args: Any) -> None:
        # `module` may be a replica of nn.DataParallel: the parameters are those of the one that it was made from.
        if self.is_due():
            self.arrivals.wait(self.params)

    def is_due(self) -> bool:
        """May something have to be waited for here?"""
        for cover in self.covers:
            if cover.inside:
                return False
        # Before `active`, which a graph would be compiled for, and which may change while it is traced.
        if torch.compiler.is_dynamo_compiling():
            give_up(self)
            return False
        if self.params and is_far(self.params[0]) and is_captured(self.params[0].device):
            give_up(self)  # who replays the graph asks nobody
            return False
        return self.arrivals.active

    def wait_for(self, values: Iterable[object]) -> None:
        if ours := [v for v in values if id(v) in self.reach.ours]:
            self.arrivals.wait(cast(list[torch.Tensor], ours))

    def __reduce__(self) -> tuple[Any, ...]:
        return NOTHING


def give_up(net: Net) -> bool:
    """A net is being traced where no CompiledCall is around it, or captured: it is not going to wait."""
    net.reach.give_up(net.params)
    return True


class WaitingDict(dict[str, Any]):
    """`module._parameters` whose values are there when somebody has them. Copies and pickles as a dict."""

    __slots__ = ("net",)
    net: Net

    def arrive(self, values: Iterable[object]) -> None:
        if self.net.is_due():
            self.net.wait_for(values)

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if self.net.is_due():
            self.net.wait_for((value,))
        return value

    def get(self, name: str, default: Any = None) -> Any:
        value = dict.get(self, name, default)
        self.arrive((value,))
        return value

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        if self.net.is_due() and not only_frees_gradients(frame := sys._getframe(1)):
            if frame.f_code is _SAVE:
                self.net.arrivals.settle()
            else:
                self.net.wait_for(dict.values(self))
        return dict.items(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self.arrive(dict.values(self))
        return dict.values(self)

    def pop(self, name: str, *default: Any) -> Any:
        self.arrive((dict.get(self, name),))
        return dict.pop(self, name, *default)

    def popitem(self) -> tuple[str, Any]:
        self.arrive(dict.values(self))
        return dict.popitem(self)

    def setdefault(self, name: str, default: Any = None) -> Any:
        value = dict.setdefault(self, name, default)
        self.arrive((value,))
        return value

    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)  # defined, so that dict(self), {**self}, copy() and | ask for each value

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self.net.is_due():
            self.net.arrivals.settle()
        return dict, (), None, None, iter(self.items())


_SAVE: CodeType = nn.Module._save_to_state_dict.__code__
_ZERO_GRAD: CodeType = nn.Module.zero_grad.__code__
_BETWEEN = 10  # frames from `zero_grad` to `items`, with some to spare; 5 in torch 2.13


def only_frees_gradients(frame: FrameType | None) -> bool:
    """Is it `model.zero_grad()`, which goes over all parameters and looks at none?

    Trainers call that right after `step()`. It has to wait if it sets to zero: gradients are still being read.
    """
    for _ in range(_BETWEEN):
        if frame is None:
            break
        if frame.f_code is _ZERO_GRAD:
            return bool(frame.f_locals["set_to_none"])
        frame = frame.f_back
    return False


class CompiledCall:
    """What torch.compile made of a module, called once all parameters below the module have arrived.

    It stands in place of `module._compiled_call_impl` or `module.forward`, and pickles as what it stands for.
    """

    def __init__(self, compiled: Callable[..., Any], reach: Reach, params: list[torch.Tensor]) -> None:
        functools.update_wrapper(self, compiled)
        self.compiled = compiled
        self.arrivals: Arrivals = reach.arrivals
        self.params = params
        self.cover: Cover = Cover()
        self.covers: tuple[Cover, ...] = ()  # those around it, and its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or any(cover.inside for cover in self.covers):
            return self.compiled(*args, **kwargs)
        if self.arrivals.active:
            self.arrivals.wait(self.params)
        self.cover.inside = True
        try:
            return self.compiled(*args, **kwargs)
        finally:
            self.cover.inside = False

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self.compiled,)


def itself(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


@functools.cache
def tell_compiler() -> None:
    """Say to torch.compile what of this module it is to run at once, and what it is not to compile by itself."""
    from torch._dynamo.eval_frame import skip_code  # a second; whoever has an optimizer has it already

    torch.compiler.assume_constant_result(give_up)  # type: ignore[no-untyped-call]
    # Python between two graphs calls these as functions. Compiled by themselves, they would seem to be traced.
    for kind in (Net, WaitingDict, CompiledCall):
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                skip_code(function.__code__)


class Site:
    """What a module looked like once its nets were in place."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind: type[nn.Module] = type(module)
        self.plain: dict[str, Any] | None = None  # what was in module._parameters
        self.waiting: WaitingDict | None = None
        self.net: Net | None = None
        self.hook: Any = None
        self.calls: dict[str, CompiledCall] = {}  # by the attribute that it stands in
        self.covered: dict[str, Any] = {}  # those attributes, before
        self.params: list[tuple[str, torch.Tensor]] = []  # none where FSDP exchanges them

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

    `params` are the optimizer's; those of them that are not in `reached`, by id, can be read without anybody noticing,
    so they have to arrive before `step()` returns: parameters that the model does not have, those of a ScriptModule or
    of FSDP1, what was traced into the graph of a compiled function, or captured. The set may shrink during a forward.
    Raises CSDRuntimeError if another optimizer's nets are around one of the modules.
    """

    def __init__(self, model: nn.Module, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        tell_compiler()
        self.model = model
        self.reach: Reach = Reach(params, arrivals)
        self.sites: dict[nn.Module, Site] = {}
        modules = list(model.modules())
        hidden = self._hidden(modules)
        owned = {m: [p for p in self._own(m) if id(p) not in hidden] for m in modules if not is_script(m)}
        for module in owned:
            others = module.__dict__["_parameters"]
            if owned[module] and isinstance(others, WaitingDict) and not others.net.arrivals.give_way():
                raise CSDRuntimeError(
                    f"{type(module).__name__} already waits for another optimizer's parameters: call overlap(None) "
                    "on that one first"
                )
        self.reach.ids.update(id(p) for own in owned.values() for p in own)
        ours = self.reach.ours
        self.gathers: list[GatherNet] = [GatherNet(g, ours, arrivals) for g in groups_of(modules) if ours_of(g, ours)]
        exchanged = {n for m in modules if is_fsdp(m) for n in unit(m)}
        covers = self._cover(owned)
        for module, own in owned.items():
            self._install(module, own, tuple(covers.get(module, ())), module in exchanged)

    def _own(self, module: nn.Module) -> list[torch.Tensor]:
        return [p for p in dict.values(module.__dict__["_parameters"]) if id(p) in self.reach.ours]

    def _hidden(self, modules: list[nn.Module]) -> set[int]:
        """What is read below Python, or under another name."""
        return {id(p) for m in modules if is_script(m) or is_fsdp1(m) for p in m.parameters()}

    def _cover(self, owned: dict[nn.Module, list[torch.Tensor]]) -> dict[nn.Module, list[Cover]]:
        """Put a CompiledCall around whatever is compiled. Returns the covers above each module."""
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
                    site.covered[name] = module.__dict__[name]
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
        """The parameters that are waited for, by id."""
        return self.reach.ids

    def intact(self) -> bool:
        """Are all nets in place, and around all there is now? If not: `remove`, and make new ones."""
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
        """Leave the model as it was; nets that somebody has a copy of let everything through."""
        for site in self.sites.values():
            attributes = site.module.__dict__
            for name, call in site.calls.items():
                call.arrivals = Landed()
                if attributes.get(name) is call:
                    del attributes[name]
                    attributes.update({name: site.covered[name]} if name in site.covered else {})
            if site.net:
                site.hook.remove()
                site.net.arrivals = Landed()
            if site.plain is not None and site.waiting is attributes["_parameters"]:
                site.plain.clear()
                site.plain.update(dict.items(site.waiting))
                attributes["_parameters"] = site.plain
        for gather in self.gathers:
            gather.arrivals = Landed()
            gather.remove()
        self.gathers.clear()
        self.sites.clear()
        self.reach.ids.clear()


def is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def compiled_parts(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """What torch.compile made of this module, by the attribute that is called: of `module.compile()`, of
    `torch.compile(module)`, whose result is a module too, and of a compiled `forward`."""
    found = {}
    if module._compiled_call_impl is not None:
        found["_compiled_call_impl"] = module._compiled_call_impl
    forward = module.__dict__.get("forward") or type(module).forward
    if hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False):
        found["forward"] = module.forward
    return found


class WaitingList(list[torch.Tensor]):
    """`group["params"]` whose parameters are all there when somebody has one. Copies and pickles as a list.

    For ourselves: `list.copy(params)` does not wait.
    """

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        super().__init__(params)
        self.arrivals = arrivals

    def arrive(self) -> None:
        if self.arrivals.active:
            self.arrivals.wait(list.copy(self))

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.arrive()
        return super().__iter__()

    def __reversed__(self) -> Iterator[torch.Tensor]:
        self.arrive()
        return super().__reversed__()

    def __getitem__(self, index: Any) -> Any:
        self.arrive()
        return super().__getitem__(index)

    def __add__(self, other: Any) -> Any:
        return self.copy() + other

    def __radd__(self, other: Any) -> Any:  # of `sum(lists, [])`; a list that is added to would not ask us
        return other + self.copy()

    def __mul__(self, times: Any) -> Any:
        return self.copy() * times

    def pop(self, *index: Any) -> torch.Tensor:
        self.arrive()
        return super().pop(*index)

    def copy(self) -> list[torch.Tensor]:
        self.arrive()
        return super().copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return list, (), None, iter(self)
