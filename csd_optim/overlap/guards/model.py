"""Guards around a model's parameters: whoever reads a parameter waits until it has arrived.

    module.py     a forward pre-hook of each module with parameters, which waits for all of them; and a WaitingDict in
                  `module._parameters`, for reads that bypass the module's forward, such as `F.linear(x, m.weight)`,
                  a chunked loss, `nn.MultiheadAttention`, `state_dict()`
    compiled.py   a CompiledCall around a module that `torch.compile` compiled: waits for all parameters below it
    fsdp.py       where FSDP2 reads the shards that it all-gathers
    groups.py     a WaitingList in `group["params"]`, for reads through the optimizer

While nothing is under way, each guard costs the test of a flag, and on an accelerator a check for graph capture. No
lock is held while a reader waits. The guards cannot catch references taken earlier, as by
`ps = list(model.parameters())`, or C++ code that is passed a WaitingList itself.

`torch.compile` traces Python once and never runs these guards again. Below a CompiledCall that is right, and the guards
leave no trace in the graph. Elsewhere, as in a compiled function that calls the model, a traced guard gives up its
parameters: they leave `ModelGuards.guarded`, and from then on each step() waits for them before it returns. The same
holds for CUDA graphs, whose replay runs no Python at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType

import torch
from torch import nn

from ...distributed.sharding import is_fsdp
from ...errors import CSDRuntimeError
from ..arrivals import Arrivals
from .compiled import CompiledCall, CompiledGuard, CompiledState, compiled_parts
from .fsdp import GatherGuard, groups_of, is_fsdp1, shards_in, unit_modules
from .module import Guarded, ModuleGuard, ModuleHook, WaitingDict, give_up


@functools.cache
def configure_compiler() -> None:
    """Tell torch.compile to run give_up() while it traces, and not to compile the guards' methods by themselves."""
    from torch._dynamo.eval_frame import skip_code  # takes a second, but the optimizer has imported it already

    torch.compiler.assume_constant_result(give_up)  # type: ignore[no-untyped-call]
    # Between two graphs these methods are called as plain functions. If dynamo compiled them by themselves there,
    # is_dynamo_compiling() would be true and the guards would give up.
    for kind in (ModuleHook, WaitingDict, CompiledCall):
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                skip_code(function.__code__)


class ModelGuards:
    """The guards of one optimizer around one model, from the constructor to `remove`.

    `params`: all of the optimizer's. Parameters whose ids are not in `guarded` can be read unnoticed, so they have to
    arrive before `step()` returns. These are parameters outside the model, in a ScriptModule or FSDP1, and parameters
    that were traced into the graph of a compiled function, or captured. `guarded` may shrink during a forward. Raises
    CSDRuntimeError if another optimizer's guards are around one of the modules.
    """

    def __init__(self, model: nn.Module, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        configure_compiler()
        self.model = model
        self._guarded = Guarded(params, arrivals)
        modules = list(model.modules())
        hidden = self._hidden(modules)
        own = {m: [p for p in self._guarded.of_module(m) if id(p) not in hidden] for m in modules if not is_script(m)}
        for module in own:
            others = module.__dict__["_parameters"]
            if own[module] and isinstance(others, WaitingDict) and not others.hook.arrivals.remove_if_dropped():
                raise CSDRuntimeError(
                    f"{type(module).__name__} already waits for another optimizer's parameters: call overlap(None) "
                    "on that one first"
                )
        self._guarded.ids.update(id(p) for params in own.values() for p in params)
        ours = self._guarded.params
        groups = [group for group in groups_of(modules) if shards_in(group, ours)]
        self.gathers: list[GatherGuard] = [GatherGuard(group, ours, arrivals) for group in groups]
        self.compiled: dict[nn.Module, CompiledGuard] = {}
        within = self._guard_compiled(own)
        exchanged = {n for m in modules if is_fsdp(m) for n in unit_modules(m)}
        self.modules: dict[nn.Module, ModuleGuard] = {
            m: ModuleGuard(m, self._guarded, params, within.get(m, ()), is_exchanged=m in exchanged)
            for m, params in own.items()
        }

    @property
    def guarded(self) -> set[int]:
        """Ids of the parameters whose readers wait."""
        return self._guarded.ids

    def _hidden(self, modules: list[nn.Module]) -> set[int]:
        """Return the ids of the parameters that are read below Python (TorchScript), or under another name (FSDP1)."""
        return {id(p) for m in modules if is_script(m) or is_fsdp1(m) for p in m.parameters()}

    def _guard_compiled(self, own: dict[nn.Module, list[torch.Tensor]]) -> dict[nn.Module, tuple[CompiledState, ...]]:
        """Put a CompiledCall around each compiled module. `own`: the parameters of each module.

        Returns, for each module, the states of the compiled callables of the module and of all modules above it.
        """
        within: dict[nn.Module, list[CompiledState]] = {}
        for module in own:
            guard = self.compiled[module] = CompiledGuard(module, self._guarded.arrivals, own)
            for call in guard.calls.values():
                for m in module.modules():
                    within.setdefault(m, []).append(call.state)
        for module, guard in self.compiled.items():
            for call in guard.calls.values():
                call.within = tuple(within[module])
        return {module: tuple(states) for module, states in within.items()}

    def _all(self) -> Iterator[ModuleGuard | CompiledGuard | GatherGuard]:
        yield from self.compiled.values()
        yield from self.modules.values()
        yield from self.gathers

    def intact(self) -> bool:
        """Return whether each module still has its guards. If not: `remove`, and make new guards."""
        if not all(guard.is_intact() for guard in self._all()):
            return False
        stack, seen = [self.model], {self.model}
        while stack:
            module = stack.pop()
            if module not in self.modules and not is_script(module):
                found = self._guarded.of_module(module)
                if found or (
                    compiled_parts(module) and any(id(p) in self._guarded.params for p in module.parameters())
                ):
                    return False
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
        return True

    def remove(self) -> None:
        """Restore the model. Guards that are still referenced elsewhere no longer wait."""
        for guard in self._all():
            guard.remove()
        self.compiled.clear()
        self.modules.clear()
        self.gathers.clear()
        self._guarded.ids.clear()


def is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)
