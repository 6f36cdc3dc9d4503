"""`user_state`, the user's addition to a commit: written by torch.save, read by torch.load(weights_only=True)."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch

from ..accelerator import is_accelerator
from ..errors import CSDStoreError, CSDTypeError, CSDValueError

USER_STATE_BYTES = 16 << 20  # limit, as it is written with every step


def unpack_user_state(data: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu") if data else {}
    return state


def stored_user_state(data: bytes, path: str) -> dict[str, Any]:
    """Return a store's user_state. Raises CSDStoreError if it is unreadable, or no dict."""
    try:
        state = unpack_user_state(data)
    except Exception as e:
        raise CSDStoreError(f"{path}: user_state cannot be read: {e}") from e
    if not isinstance(state, dict):
        raise CSDStoreError(f"{path}: user_state is no dict")
    return state


def pack_user_state(user_state: dict[str, Any]) -> bytes:
    return _saved(user_state) if user_state else b""


def checked_user_state(user_state: dict[str, Any], last: bytes) -> bytes:
    """Return the packed user_state, checked to be readable. `last`: the previous result, known to be readable.

    Raises CSDTypeError, naming the value that cannot be stored, and CSDValueError if user_state is too large.
    """
    if not isinstance(user_state, dict):
        raise CSDTypeError(f"user_state is a dict, got {type(user_state).__name__}")
    try:
        data = pack_user_state(user_state)
        if data != last and not _is_plain(user_state):
            unpack_user_state(data)
    except Exception as e:
        found = None
        with contextlib.suppress(RecursionError):
            found = _unstorable(user_state, "user_state", set())
        raise CSDTypeError(
            f"{found or 'user_state'} cannot be kept: user_state holds plain values, lists, dicts and tensors"
        ) from e
    if len(data) > USER_STATE_BYTES:
        raise CSDValueError(
            f"user_state takes {len(data)} bytes; it is written with every step and limited to {USER_STATE_BYTES}"
        )
    return data


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _is_scalar(value: Any) -> bool:
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63  # torch.load fails for some integers beyond 2000 bits
    return value is None or type(value) in (bool, float, str)


def _is_plain(user_state: dict[str, Any]) -> bool:
    """Return whether all values are of types that torch.load is known to read. Much faster than torch.load."""
    todo: list[Any] = [user_state]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if _is_scalar(value):
            continue
        if type(value) is torch.Tensor:
            plain = value.layout is torch.strided and (value.is_cpu or is_accelerator(value.device)) and not vars(value)
        else:
            plain = type(value) in (dict, list, tuple) and id(value) not in seen  # it may contain itself
            if plain:
                seen.add(id(value))
                todo += (*value, *value.values()) if isinstance(value, dict) else value
        if not plain:
            return False
    return True


def _unstorable(value: Any, name: str, seen: set[int]) -> str | None:
    """Name the innermost value in `value` that torch cannot save and load. `seen`: ids of containers visited."""
    if _is_scalar(value) or id(value) in seen:
        return None
    seen.add(id(value))
    with contextlib.suppress(Exception):
        unpack_user_state(_saved(value))
        return None
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, inner in entries:
        if found := _unstorable(key, f"a key of {name}", seen) or _unstorable(inner, f"{name}[{key!r}]", seen):
            return found
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"{name}, of type {kind},"
