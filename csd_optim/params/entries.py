"""What a program does with the entries of `state`: it moves them to other parameters, or puts them away for a while."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from .decoded_entry import DecodedEntry
from .param_state import ParamState


def keep_apart(
    state: MutableMapping[torch.Tensor, Any], own: Mapping[int, ParamState], places: Collection[ParamState]
) -> None:
    """Copy what entries of `state` have in `places` of other parameters, as these are about to be written or freed.

    `own`: the parameters' places, by id(param).
    """
    addresses = {_address(t) for place in places for t in place.shown.values()} - {0}
    of_decoder = {place.decode: place for place in places if place.decoded}
    for p, entry in [*state.items()] if places else ():
        if not isinstance(entry, Mapping):
            continue
        place = own.get(id(p))
        shown = place.shown if place else {}
        decoded = entry if isinstance(entry, DecodedEntry) else None
        shared = decoded is not None and of_decoder.get(decoded.decoder, place) is not place
        values = entry if decoded is None else decoded.plain
        copied = {
            key: value.clone()
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and value is not shown.get(key) and _address(value) in addresses
        }
        if shared or copied:
            state[p] = {**entry, **copied}


class FormerStates:
    """Dicts that were `state` before a program assigned another one, which it may assign again."""

    def __init__(self) -> None:
        self._former: list[Any] = [{}]  # the first one is ours alone

    def add(self, state: MutableMapping[torch.Tensor, Any]) -> None:
        self._former.append(state)

    def held(self, now: object) -> list[Any]:
        """Return those that somebody else still has, and forget the others. `now`: what is `state`."""
        self._former = [state for state in self._former if state is not now]
        counts = [*map(sys.getrefcount, self._former)]  # a dict cannot have weak references
        held = [state for state, n in zip(self._former, counts, strict=True) if n > counts[0]]
        self._former[1:] = held
        return held


def _address(t: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none here."""
    local = t.to_local() if hasattr(t, "to_local") else t
    return 0 if local.is_meta else local.untyped_storage().data_ptr()
