"""What `state` has of a parameter whose states are kept as codes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch


class DecodedEntry(dict[str, Any]):
    """A dict as every entry of `state` is one, whose fp32 tensors are decoded when the first of them is asked for.

    `decode` returns them by name: the same dict, until they are others. Beside them is what was assigned, or put there
    by `keep()`. Copies and pickles are such as anybody has.
    """

    def __init__(self, names: Iterable[str], decode: Callable[[], dict[str, torch.Tensor]]) -> None:
        super().__init__(dict.fromkeys(names))
        self._decode = decode
        self._names = {*names}
        self._decoded = {*names}  # and not assigned by somebody

    def keep(self, values: dict[str, Any]) -> None:
        """Has these, as they are, from now on."""
        super().update(values)
        self._names -= values.keys()
        self._decoded -= values.keys()

    def decodes(self, key: str) -> bool:
        """Is it one that this decodes, and not assigned by somebody?"""
        return key in self._decoded

    def has_own(self, key: str, decode: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """The same, by this way?"""
        return key in self._decoded and self._decode == decode

    def shows(self, decode: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Are all of its states those that this decodes?"""
        return self._decode == decode and self._decoded == self._names

    @property
    def marks(self) -> list[Any]:
        """What its values are, as far as that is known without decoding any."""
        return [self if key in self._decoded else super(DecodedEntry, self).__getitem__(key) for key in self]

    # ---- as a dict has it ------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        return self._decode()[key] if key in self._decoded else super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._decoded.discard(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._decoded.discard(key)
        super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:  # without it {**entry} would not ask for each value
        return super().__iter__()

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    if not TYPE_CHECKING:  # a dict's own, whose types they have, take the values past __getitem__
        get = MutableMapping.get
        items = MutableMapping.items
        values = MutableMapping.values
        popitem = MutableMapping.popitem
        setdefault = MutableMapping.setdefault
        update = MutableMapping.update
        __eq__ = MutableMapping.__eq__

    def copy(self) -> dict[str, Any]:
        return {**self}

    def __or__(self, other: Any) -> Any:
        return {**self} | other

    def __ror__(self, other: Any) -> Any:
        return other | {**self}

    def __repr__(self) -> str:
        return repr({**self})

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return OrderedDict, ([*self.items()],)  # which torch.load takes, as it does not take a dict by that name
