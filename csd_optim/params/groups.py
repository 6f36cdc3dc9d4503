"""Parameter groups: their members, names and hyperparameters, in torch's form and in that of a store."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import CSDTypeError, CSDValueError
from ..store.sections import FP32, STATE_DTYPES
from .update_rule import UpdateRule

Groups = Sequence[dict[str, Any]]


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

    `sections`: those of its parameters, where they are known. `where`, `advice`: for the message.
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


def _item(value: Any) -> Any:
    """Return a number of torch or NumPy as a Python number (a list, for a tensor of several); else return `value`."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def _items(value: Any) -> Any:
    """Return a number, or a list of such values for a tuple or list."""
    return [_items(v) for v in value] if isinstance(value, (list, tuple)) else _item(value)


def hyperparameters_of(group: dict[str, Any], needed: Collection[str] = ()) -> dict[str, Any]:
    """Return a group's hyperparameters as JSON values: tensors become numbers, and what JSON cannot hold is left out.

    Raises CSDTypeError if one of the `needed` hyperparameters would be left out.
    """
    stored = {}
    for name, value in group.items():
        if name in ("params", "param_names"):
            continue
        value = _items(value)
        items = [w for v in value for w in (v if isinstance(v, list) else [v])] if isinstance(value, list) else [value]
        if all(isinstance(v, (int, float, str, type(None))) for v in items):
            stored[name] = value
        elif name in needed:
            raise CSDTypeError(f"Invalid {name}: {group[name]!r}; a store keeps numbers")
    return stored


def restore_hyperparameters(group: dict[str, Any], kept: dict[str, Any]) -> None:
    """Restore the hyperparameters that hyperparameters_of() returned; a group's tensors are filled in place."""
    for name, value in kept.items():
        current = group.get(name)
        if name in ("foreach", "fused", "capturable", "differentiable"):
            continue  # these are not hyperparameters: they select torch's implementation
        if isinstance(current, (int, float, torch.Tensor)) and isinstance(value, list) and len(value) == 1:
            (value,) = value  # old stores kept a one-element tensor as a list
        if isinstance(current, torch.Tensor):
            current.fill_(value)
        elif name == "initial_lr" and isinstance(group["lr"], torch.Tensor):
            group[name] = torch.full_like(group["lr"], value)  # an LR scheduler keeps it as a tensor if lr is one
        elif name == "ns_coefficients":
            group[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
        elif isinstance(current, tuple):
            pairs = zip(current, value, strict=True)
            group[name] = tuple(a.fill_(b) if isinstance(a, torch.Tensor) else b for a, b in pairs)
        else:
            group[name] = value
