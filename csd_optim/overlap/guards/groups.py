"""The guard of a parameter group: reads of `group["params"]` wait until the parameters have arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..arrivals import Arrivals


class WaitingList(list[torch.Tensor]):
    """A `group["params"]` that waits for all its parameters at every read. Copies and pickles as a list.

    `list.copy(params)`, as csd_optim itself uses it, does not wait.
    """

    def __init__(self, params: Iterable[torch.Tensor], arrivals: Arrivals) -> None:
        super().__init__(params)
        self.arrivals: Arrivals = arrivals

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
