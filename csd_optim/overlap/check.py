"""`CSD_OPTIM_OVERLAP=check`: a parameter that is used before it has arrived is an error, whatever uses it.

For tests, and for who doubts whether the nets of waits.py catch a model's reads: it costs 5 to 20 µs an operation, and
under it torch.compile runs eagerly. It sees views, `detach()`, `.data`, NumPy's arrays and `torch._foreach_*`; it does
not see `tolist()`, `repr()`, `data_ptr()` and other threads.
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
    """Raises CSDRuntimeError for an operation on this thread one argument of which is still under way.

    `under_way()` gives the name of each such parameter, by the address of its storage,
    `p.untyped_storage().data_ptr()`. It is asked for every operation.
    """

    supports_higher_order_operators = True

    def __init__(self, under_way: Callable[[], Mapping[int, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.under_way = under_way

    def enter(self) -> None:
        """Check from now on; does nothing if it does already.

        It goes below all modes that the user is in, so that the user may leave them before it is left, or after.
        """
        if self not in _get_current_dispatch_mode_stack():
            above = left(lambda mode: True)
            TorchDispatchMode.__enter__(self)  # type: ignore[no-untyped-call]
            entered_again(above)

    def exit(self) -> None:
        """Check no more. Does nothing on a thread that has not entered it."""
        if self in _get_current_dispatch_mode_stack():
            above = left(lambda mode: mode is not self)
            TorchDispatchMode.__exit__(self, None, None, None)  # type: ignore[no-untyped-call]
            entered_again(above)

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


def left(whether: Callable[[TorchDispatchMode], bool]) -> list[TorchDispatchMode]:
    """Leave modes as long as `whether` says so, the innermost first; torch's own always lie below the others."""
    above = []
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if getattr(mode, "_mode_key", None) is not None or not whether(mode):
            break
        # Not its own, which may do more.
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
        above.append(mode)
    return above


def entered_again(above: list[TorchDispatchMode]) -> None:
    for mode in reversed(above):
        TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]


def addresses(leaf: object) -> Iterator[int]:
    """Of the memory of a tensor, or of those that it wraps; none of a tensor without memory."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return
    if is_traceable_wrapper_subclass(leaf):
        for name in leaf.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from addresses(getattr(leaf, name))
        return
    try:
        yield leaf.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, or of a functorch transformation
        return
