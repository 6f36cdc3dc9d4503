"""`CSD_OPTIM_OVERLAP=check`: any operation that uses a parameter before it has arrived raises an error.

It is meant for tests, and for users who doubt that the guards of guards/ catch every read of their model. It costs 5 to
20 µs per operation, and torch.compile runs eagerly under it. It sees uses through views, `detach()`, `.data`, NumPy
arrays and `torch._foreach_*`; it does not see `tolist()`, `repr()`, `data_ptr()` or other threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves

from ..errors import CSDRuntimeError


class UseCheck(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that raises CSDRuntimeError if an operation on this thread uses a parameter still under way.

    `under_way()` returns the names of these parameters, keyed by the address of their storage,
    `p.untyped_storage().data_ptr()`. It is called for every operation.
    """

    supports_higher_order_operators = True

    def __init__(self, under_way: Callable[[], Mapping[int, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.under_way = under_way

    def enter(self) -> None:
        """Start to check; a no-op if this thread is checking already.

        The mode is inserted below all modes that the user has entered, so that the user may leave those before or after
        this one is left.
        """
        if self not in _get_current_dispatch_mode_stack():
            above = leave_modes(lambda mode: True)
            TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
            reenter_modes(above)

    def exit(self) -> None:
        """Stop checking; a no-op on a thread that has not entered the mode."""
        if self in _get_current_dispatch_mode_stack():
            above = leave_modes(lambda mode: mode is not self)
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]
            reenter_modes(above)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if under_way := self.under_way():
            for leaf in tree_leaves((args, kwargs)):
                for address in addresses(leaf):
                    if address and address in under_way:
                        raise CSDRuntimeError(
                            f"{func} uses {under_way[address]}, which the last step() is still updating: read it from "
                            "its module, or call wait() of the optimizer first"
                        )
        return func(*args, **(kwargs or {}))


def leave_modes(predicate: Callable[[TorchDispatchMode], bool]) -> list[TorchDispatchMode]:
    """Leave modes, innermost first, while `predicate(mode)` is true; return them. Torch's own, always lowest, stay."""
    above = []
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if getattr(mode, "_mode_key", None) is not None or not predicate(mode):
            break
        # Not the mode's own __exit__, which may have side effects.
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
        above.append(mode)
    return above


def reenter_modes(above: list[TorchDispatchMode]) -> None:
    """Enter again the modes that leave_modes() returned."""
    for mode in reversed(above):
        TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]


def addresses(leaf: object) -> Iterator[int]:
    """Yield the storage address of a tensor, or of each tensor that it wraps; nothing for a tensor without memory."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return
    if is_traceable_wrapper_subclass(leaf):
        for name in leaf.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from addresses(getattr(leaf, name))
        return
    try:
        yield leaf.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and those of functorch transformations
        return
