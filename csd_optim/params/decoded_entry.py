"""The entry in `state` of a parameter whose states are read on demand, for example 8-bit states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import torch


class DecodedEntry(dict[str, Any]):
    """A dict like any entry of `state`, but its fp32 tensors are decoded when the first of them is read.

    `decode` returns the tensors by name: the same dict until the states change. Values that the program has assigned,
    or set_plain() has stored, are plain values. Copies and pickles are ordinary dicts.
    """

    def __init__(self, names: Iterable[str], decode: Callable[[], dict[str, torch.Tensor]]) -> None:
        super().__init__(dict.fromkeys(names))
        self._decode = decode
        self._names = {*names}
        self._decoded = {*names}  # keys whose values were not replaced by an assignment

    def set_plain(self, values: dict[str, Any]) -> None:
        """Store plain values, which `decode` no longer provides."""
        super().update(values)
        self._names -= values.keys()
        self._decoded -= values.keys()

    def keep_decoded(self, decode: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Replace all values that this very `decode` provides by plain values."""
        if self._decode == decode and self._decoded:
            values = decode()
            self.set_plain({key: values[key] for key in self._decoded})

    @property
    def decoder(self) -> Callable[[], dict[str, torch.Tensor]]:
        """The function that decodes all values that were not replaced by an assignment."""
        return self._decode

    @property
    def plain(self) -> dict[str, Any]:
        """The values that are not decoded."""
        return {key: self[key] for key in self if key not in self._decoded}

    def decodes(self, key: str) -> bool:
        """Return whether the value of `key` is decoded, and not replaced by an assignment."""
        return key in self._decoded

    def is_decoded_by(self, key: str, decode: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Return whether the value of `key` is decoded by this very `decode`, and not replaced by an assignment."""
        return key in self._decoded and self._decode == decode

    def all_decoded_by(self, decode: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Return whether all states are decoded by this very `decode`, with none replaced by an assignment."""
        return self._decode == decode and self._decoded == self._names

    @property
    def identities(self) -> list[Any]:
        """One object per value, by whose identity a change is noticed without decoding; the entry itself if decoded."""
        return [self if key in self._decoded else super(DecodedEntry, self).__getitem__(key) for key in self]

    # ---- the methods of a dict -------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        return self._decode()[key] if key in self._decoded else super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._decoded.discard(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._decoded.discard(key)
        super().__delitem__(key)

    def __iter__(self) -> Iterator[str]:  # without it {**entry} would bypass __getitem__
        return super().__iter__()

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    if not TYPE_CHECKING:  # dict's own methods, whose types these have, bypass __getitem__
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
        return OrderedDict, ([*self.items()],)  # torch.load(weights_only=True) accepts an OrderedDict, not this class
