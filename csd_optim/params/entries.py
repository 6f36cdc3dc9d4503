"""Deals with programs that move entries of `state` to other parameters, or keep them for later."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from ..errors import CSDWarning, users_stacklevel
from ..grad_modes import no_autograd
from .decoded_entry import DecodedEntry
from .groups import Groups, members, name_of
from .param_state import ParamState, left_behind
from .update_rule import RuleOf


def keep_apart(
    state: MutableMapping[torch.Tensor, Any], own: Mapping[int, ParamState], places: Collection[ParamState]
) -> None:
    """Copy the values in `state` that are views of `places`, except in a place's own entry.

    These places are about to be written or freed. If a program has exchanged the entries of two parameters, for
    example, filling the place of one would overwrite the values for the other. `own`: the parameters' places, by
    id(param).
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


def replaced_tensors(state: Mapping[torch.Tensor, Any], places: Iterable[ParamState]) -> Iterator[torch.Tensor]:
    """Yield the tensors in `state` that were set from outside, and are still to be copied to these places."""
    for place in places:
        entry = state.get(place.param) or {}
        for key in {*place.sections, *place.shown}:
            if isinstance(entry, DecodedEntry) and entry.decodes(key):
                continue
            if isinstance(value := entry.get(key), torch.Tensor) and value is not place.shown.get(key):
                yield value.to_local() if hasattr(value, "to_local") else value


class Held:
    """The tensors and decoded entries of leaving parameters that a program may still hold.

    As with AdamW, their values stay: copy() gives them memory of their own. Raises CSDError if decoded states are
    unreadable.
    """

    def __init__(self, places: Iterable[ParamState]) -> None:
        self._tensors = [weakref.ref(tensor) for place in places for tensor in place.shown_windows()]
        for place in places:
            if (entry := place.shown_entry()) is not None:
                entry.keep_decoded(place.decode)

    @no_autograd()
    def copy(self) -> None:
        """Copy the tensors that the program still holds. Call this when nothing else refers to the tensors."""
        for tensor in (ref() for ref in self._tensors):
            if tensor is not None:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.data = local.clone()


def _address(t: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if the tensor has no storage here."""
    local = t.to_local() if hasattr(t, "to_local") else t
    return 0 if local.is_meta else local.untyped_storage().data_ptr()
