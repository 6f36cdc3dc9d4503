"""The guard of FSDP2's parameters, whose shards FSDP2 reads in its all-gathers."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from ...distributed.sharding import is_fsdp
from ..arrivals import Arrivals, NoArrivals


def is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def unit_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters FSDP gathers together: `module` and its submodules in no other unit."""
    found, stack = [module], [module]
    while stack:
        for child in stack.pop().children():
            if not is_fsdp(child) and child not in found:
                found.append(child)
                stack.append(child)
    return found


def groups_of(modules: Iterable[nn.Module]) -> list[Any]:
    """Return FSDP's parameter groups of these modules, each once. A group's parameters are gathered together."""
    found = {}
    for module in filter(is_fsdp, modules):
        state = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)  # up to torch 2.12 a state has at most one group
        for group in [state._fsdp_param_group] if groups is None else groups:
            if group is not None:
                found[id(group)] = group
    return [*found.values()]


def shards_in(group: Any, param_ids: Container[int]) -> list[torch.Tensor]:
    """Return the shards of a group's parameters whose ids are in `param_ids`."""
    return [fsdp_param.sharded_param for fsdp_param in group.fsdp_params if id(fsdp_param.sharded_param) in param_ids]


class GatherGuard:
    """Replaces a group's `unshard`, which reads the group's shards, and first waits for these shards.

    This covers every cause of an all-gather: the forward of a module or of a group of modules, a prefetch, an explicit
    `unshard()`, a backward. FSDP2 hides `unshard` from torch.compile.
    """

    def __init__(self, group: Any, param_ids: Container[int], arrivals: Arrivals) -> None:
        """`param_ids`: ids of the parameters to wait for."""
        self.group: Any = group
        self.param_ids: Container[int] = param_ids
        self.arrivals: Arrivals = arrivals
        self.unshard: Any = group.unshard
        group.unshard = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.arrivals.active:
            self.arrivals.wait(shards_in(self.group, self.param_ids))
        return self.unshard(*args, **kwargs)

    def is_intact(self) -> bool:
        """Return whether `unshard` still calls this guard, perhaps through the guard of another optimizer."""
        guard = self.group.__dict__.get("unshard")
        while isinstance(guard, GatherGuard) and guard is not self:
            guard = guard.unshard
        return guard is self

    def remove(self) -> None:
        """Restore `unshard`. If another optimizer's guard wraps this guard, it stays in place, but no longer waits."""
        self.arrivals = NoArrivals()
        if self.group.__dict__.get("unshard") is self:
            del self.group.unshard
            if isinstance(self.unshard, GatherGuard):
                self.group.unshard = self.unshard
