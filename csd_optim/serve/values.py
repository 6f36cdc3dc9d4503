"""`user_state` as JSON for the network: plain values and tensors, so that no pickle is needed."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch

from ..errors import CSDRankError, CSDTypeError

_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def dtype_named(name: Any) -> torch.dtype:
    """Return the torch dtype of this name ("float32"). Raises CSDRankError if there is none."""
    if not isinstance(name, str) or name not in _DTYPES:
        raise CSDRankError(f"there is no dtype {name!r}")
    return _DTYPES[name]


def packed(value: Any, name: str = "user_state") -> Any:
    """Convert `value` to what JSON can express. Raises CSDTypeError, which names the value that cannot be sent."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return {type(value).__name__: [packed(v, f"{name}[{k}]") for k, v in enumerate(value)]}
    if type(value) is dict:
        return {"dict": [[packed(k, f"a key of {name}"), packed(v, f"{name}[{k!r}]")] for k, v in value.items()]}
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        values = value.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
        data = base64.b64encode(values.view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": [str(value.dtype).removeprefix("torch."), [*value.shape], data]}
    raise CSDTypeError(
        f"{name}, of type {type(value).__name__}, cannot be sent to optimizer ranks: user_state holds plain values, "
        "lists, tuples, dicts and tensors"
    )


def unpacked(value: Any) -> Any:
    """Invert packed(). Raises CSDRankError if `value` is malformed."""
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(unpacked(v) for v in content)
        if kind == "dict":
            return {unpacked(k): unpacked(v) for k, v in content}
        if kind == "tensor":
            name, shape, data = content
            dtype, n = dtype_named(name), math.prod(shape)
            raw = bytearray(base64.b64decode(data, validate=True))
            if len(raw) != n * dtype.itemsize:
                raise ValueError(f"{len(raw)} bytes for {n} elements of {name}")
            return (torch.frombuffer(raw, dtype=dtype) if n else torch.empty(0, dtype=dtype)).view(shape)
    except (ValueError, TypeError, RuntimeError, RecursionError) as e:
        raise CSDRankError(f"user_state cannot be read: {e}") from None
    raise CSDRankError(f"user_state cannot be read: there is no {kind!r}")
