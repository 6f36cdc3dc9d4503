"""What a program does with the entries of `state`: it moves them to other parameters, or puts them away for a while."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from ..errors import CSDWarning, users_stacklevel
from .decoded_entry import DecodedEntry
from .groups import Groups, members, name_of
from .param_state import ParamState, left_behind
from .update_rule import RuleOf


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


def drop_left_behind(
    groups: Groups, state: Mapping[torch.Tensor, Any], own: Mapping[int, ParamState], rule_of: RuleOf
) -> None:
    """Drop masters and residuals from the entries of parameters that were resized with their other states.

    `own`: the parameters' places, by id(param).
    """
    lost = None
    for k, i, p in members(groups):
        param_state, entry = own.get(id(p)), state.get(p)
        if entry and not (param_state and param_state.is_shown_by(entry)):
            for key in left_behind(entry, p, rule_of(groups[k]).sections):
                del entry[key]
                lost = name_of(groups, k, i) if key == "residual" else lost
    if lost is not None:
        text = f"{lost} was resized without its residual: what Top-K has not sent of its gradients is lost"
        warnings.warn(f"{text}. Resize 'residual' in its state as well", CSDWarning, users_stacklevel())


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
