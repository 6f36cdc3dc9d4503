"""What FSDP2 reads of parameters: their shards, when it gathers them."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from .waits import Arrivals


def is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def unit(module: nn.Module) -> list[nn.Module]:
    """The modules whose parameters FSDP gathers at once: those below `module`, without units of their own."""
    found, stack = [module], [module]
    while stack:
        for child in stack.pop().children():
            if not is_fsdp(child) and child not in found:
                found.append(child)
                stack.append(child)
    return found


def groups_of(modules: Iterable[nn.Module]) -> list[Any]:
    """FSDP's groups of these modules, each once: what a group has is gathered together."""
    found = {}
    for module in filter(is_fsdp, modules):
        state = module._get_fsdp_state()  # type: ignore[operator]
        of_state = getattr(state, "_fsdp_param_groups", None)  # until torch 2.12 there is one at most
        for group in [state._fsdp_param_group] if of_state is None else of_state:
            if group is not None:
                found[id(group)] = group
    return [*found.values()]


def ours_of(group: Any, ours: Container[int]) -> list[torch.Tensor]:
    """The shards of a group's parameters that are among `ours`, by id."""
    return [of_fsdp.sharded_param for of_fsdp in group.fsdp_params if id(of_fsdp.sharded_param) in ours]


class GatherNet:
    """Stands in place of a group's `unshard`, where its shards are read: they arrive before that.

    So it does not matter who gathers: a forward, also of several modules that make a group; a unit that is gathered
    ahead of its forward; `unshard()`; a backward. FSDP2 does not let torch.compile see it.
    """

    def __init__(self, group: Any, ours: Container[int], arrivals: Arrivals) -> None:
        """`ours`: ids of the parameters that have to be waited for."""
        self.group: Any = group
        self.ours: Container[int] = ours
        self.arrivals: Arrivals = arrivals
        self.unshard: Any = group.unshard
        group.unshard = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.arrivals.active:
            self.arrivals.wait(ours_of(self.group, self.ours))
        return self.unshard(*args, **kwargs)

    def is_intact(self) -> bool:
        """Is it in the way of who gathers? There may be another optimizer's, too."""
        net = self.group.__dict__.get("unshard")
        while isinstance(net, GatherNet) and net is not self:
            net = net.unshard
        return net is self

    def remove(self) -> None:
        """If others' are around it, it stays, for nothing."""
        if self.group.__dict__.get("unshard") is self:
            del self.group.unshard
            if isinstance(self.unshard, GatherNet):
                self.group.unshard = self.unshard
