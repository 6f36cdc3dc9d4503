"""Parameter groups: members, names and hyperparameters, in torch's form and in a store's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CSDTypeError, CSDValueError
from ..grad_modes import no_autograd
from ..store.sections import FP32, STATE_DTYPES
from .update_rule import UpdateRule

Groups = Sequence[dict[str, Any]]

MOST_ELEMS = 1024  # limit for tensors in a group that a store keeps, as the record is written with each step
_PLAIN = (int, float, str, type(None))  # JSON values; bool is an int


def name_of(groups: Groups, k: int, i: int) -> str:
    """Return a parameter's name if the group has names, else its group and position, such as "0.3"."""
    names = groups[k].get("param_names")
    return str(names[i]) if names else f"{k}.{i}"


def members(groups: Groups) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield every parameter with the index of its group and its position in the group."""
    for k, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            yield k, i, p


def check_state_dtype(
    value: Any, where: str = "", rule: UpdateRule | None = None, sections: Collection[str] = (), advice: str = ""
) -> None:
    """Raise CSDValueError if `value` is no state_dtype, or if this rule's states cannot be kept in it.

    `sections`: of the parameters, if known. `where`, `advice`: for the message.
    """
    if value not in STATE_DTYPES:
        raise CSDValueError(f"Invalid state_dtype{where}: {value!r}; it is {' or '.join(map(repr, STATE_DTYPES))}")
    if value == FP32 or not rule:
        return
    why = [f"{s} of {rule.name}: {reason}" for s, reason in rule.uncoded.items() if rule.codec == FP32 or s in sections]
    missing = why or [f"states of {rule.name}"] * (rule.codec == FP32)
    if missing:
        raise CSDValueError(
            f"Invalid state_dtype{where}: {value!r} has no code for the {missing[0]}; its states stay 'fp32'{advice}"
        )


def _items(value: Any) -> Any:
    """Convert numbers of torch or NumPy to Python numbers, tensors, arrays and tuples to lists; else return `value`."""
    if isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided:
        return value.item() if value.numel() == 1 else value.tolist() if value.numel() <= MOST_ELEMS else value
    if isinstance(value, (np.generic, np.ndarray)) and value.size <= MOST_ELEMS:
        return value.item() if value.size == 1 else value.tolist()
    return [_items(v) for v in value] if isinstance(value, (list, tuple)) else value


def hyperparameters_of(group: dict[str, Any], needed: Collection[str] = ()) -> dict[str, Any]:
    """Return a group's hyperparameters as JSON values.

    Tensors become numbers; values that JSON cannot hold are left out.

    Raises CSDTypeError if one of the `needed` hyperparameters would be left out.
    """
    stored = {}
    for name, value in group.items():
        if name in ("params", "param_names") or not isinstance(name, str):
            continue
        value = _items(value)
        items = [w for v in value for w in (v if isinstance(v, list) else [v])] if isinstance(value, list) else [value]
        if all(isinstance(v, _PLAIN) for v in items):
            stored[name] = value
        elif name in needed:
            raise CSDTypeError(f"Invalid {name}: {group[name]!r}; a store keeps numbers")
    return stored


def restore_hyperparameters(group: dict[str, Any], kept: dict[str, Any]) -> None:
    """Restore what hyperparameters_of() returned; a group's tensors are filled in place.

    A stored value that does not fit the group's present value is ignored, as a group may also hold the program's own
    values.
    """
    for name, value in kept.items():
        if name in ("foreach", "fused", "capturable", "differentiable"):
            continue  # selects torch's implementation; no hyperparameter
        if name == "initial_lr" and isinstance(group["lr"], torch.Tensor):
            group[name] = torch.full_like(group["lr"], value)  # LR schedulers make it a tensor if lr is one
        elif name == "ns_coefficients":
            group[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        else:
            group[name] = _restored(group[name], value) if name in group else value


def _restored(current: Any, value: Any) -> Any:
    """Return `current` or a replacement, with the stored `value`; `current` unchanged if the value does not fit."""
    if isinstance(current, (torch.Tensor, np.ndarray)):
        return _filled(current, value)
    if isinstance(current, tuple):
        fits = isinstance(value, list) and len(value) == len(current) and type(current) is tuple
        return tuple(map(_restored, current, value)) if fits else current
    if isinstance(current, list):
        if not isinstance(value, list):
            return current
        if len(value) != len(current):
            return value if all(isinstance(v, _PLAIN) for v in (*value, *current)) else current
        return [*map(_restored, current, value)]
    if isinstance(value, list):
        # Old stores kept a one-element tensor as a list.
        return value[0] if len(value) == 1 and isinstance(current, (int, float)) else current
    return value if isinstance(current, (*_PLAIN, np.generic)) else current


@no_autograd()
def _filled(current: torch.Tensor | np.ndarray[Any, Any], value: Any) -> Any:
    """Return a tensor or array with the stored `value`: `current`, or a new one if `current` cannot be written."""
    try:
        if isinstance(current, np.ndarray):
            new = torch.from_numpy(np.array(value, current.dtype))
        else:
            new = torch.tensor(value, dtype=current.dtype, device=current.device)
        new = new.reshape(current.shape) if new.numel() == 1 else new
    except (RuntimeError, TypeError, ValueError, OverflowError):  # the value is of another kind
        return current
    if new.shape != current.shape:
        return current
    try:
        torch.as_tensor(current).copy_(new)
    except RuntimeError:  # elements share memory, as after expand()
        return new
    return current
