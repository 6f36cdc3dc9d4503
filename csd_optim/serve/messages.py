"""The arrays of messages between trainers and owners, their checks, and errors. requests.py has the messages.

Nothing is unpickled, and no number is an address. Integers in arrays are big-endian; tensors are little-endian, as they
lie in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from .. import errors
from ..bindings import DTYPE_CODES, HYPER, IN_SECTION, NEW, PARAM, PASS_RULES, RULES, UNCOMPARED
from ..errors import CSDError, CSDOSError, CSDRankError
from ..store.layout import Extent
from .requests import Failed, Failure

MAX_TEXT = 1 << 12  # characters of an error's text
CHUNK = 1 << 22  # elements of a state in one message: 16 MiB

# A parameter in a step, as it travels: csd_param without addresses.
ROW = np.dtype(
    [
        *(("row", ">u4"), ("hyper", ">u4"), ("seed", ">u4"), ("first", ">u4")),
        *(("topk", ">f8"), ("grad_dtype", "u1"), ("param_dtype", "u1"), ("topk_dtype", "u1"), ("master", "u1")),
        *(("has_grad", "u1"), ("in_image", "u1"), ("reserved", "u1", 2)),
    ]
)
WIRE_HYPER = np.dtype([("rule", ">u4"), ("c", ">f4", 9)])
WIRE_INDEX = np.dtype(">u4")
SAME_NAMES = ("hyper", "seed", "first", "topk", "grad_dtype", "param_dtype", "topk_dtype", "master", "in_image")
MASTERS = (IN_SECTION, NEW, UNCOMPARED)  # other values need parameters within the owner's reach


def refuse(what: str) -> NoReturn:
    """Raise CSDRankError: the other side violates the protocol."""
    raise CSDRankError(f"a message cannot be understood: {what}")


def array(data: memoryview, dtype: np.dtype[Any], what: str, n: int | None = None) -> np.ndarray[Any, Any]:
    """Return received bytes as an array; `n`: the number of elements, if known. `what`: for messages.

    Raises CSDRankError.
    """
    nbytes = len(data)
    if nbytes % dtype.itemsize or (n is not None and nbytes != n * dtype.itemsize):
        refuse(f"{what} have {nbytes} bytes")
    return np.frombuffer(data, dtype)


def number_of(arrays: Sequence[memoryview], n: int) -> Sequence[memoryview]:
    """Return the arrays of a message. Raises CSDRankError unless there are `n`."""
    if len(arrays) != n:
        refuse(f"it has {len(arrays)} arrays instead of {n}")
    return arrays


# ---- a step ----------------------------------------------------------------------------


def pack_rows(table: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return these rows of a step's table (dtype PARAM) in wire format."""
    packed = np.zeros(len(rows), ROW)
    packed["row"], packed["has_grad"] = rows, table["grad"][rows] != 0
    for name in SAME_NAMES:
        packed[name] = table[name][rows]
    return packed


def unpack_rows(packed: np.ndarray[Any, Any], n_rows: int, n_hypers: int) -> np.ndarray[Any, Any]:
    """Return an owner's table of a step (dtype PARAM, `n_rows` rows). Raises CSDRankError."""
    rows, dtypes = packed["row"], [*DTYPE_CODES.values()]
    for name, valid in (
        ("rows", bool((rows < n_rows).all()) and len(np.unique(rows)) == len(rows)),
        ("constants", bool((packed["hyper"] < max(n_hypers, 1)).all())),
        ("dtypes", all(bool(np.isin(packed[f"{of}_dtype"], dtypes).all()) for of in ("grad", "param", "topk"))),
        ("masters", bool(np.isin(packed["master"], MASTERS).all())),
        # The master of a new parameter travels in an image, and only tiles with gradients have images.
        ("new parameters", bool((packed["has_grad"] & packed["in_image"])[packed["master"] == NEW].all())),
        ("images", bool((packed["has_grad"] >= packed["in_image"]).all())),
        ("flags", bool((packed["has_grad"] <= 1).all() and (packed["in_image"] <= 1).all())),
        ("ratios", bool(((packed["topk"] >= 0) & (packed["topk"] <= 1)).all())),  # false for NaN
        ("reserved bytes", not packed["reserved"].any()),
    ):
        if not valid:
            refuse(f"the {name} of a step")
    table = np.zeros(n_rows, PARAM)
    for name in SAME_NAMES:
        table[name][rows] = packed[name]
    table["grad"][rows] = packed["has_grad"]  # not an address: gradients are in images
    return table


def pack_hypers(hypers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a step's constants (dtype HYPER) in wire format."""
    packed = np.zeros(len(hypers), WIRE_HYPER)
    packed["rule"], packed["c"] = hypers["rule"], hypers["c"]
    return packed


def unpack_hypers(packed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a step's constants, dtype HYPER. Raises CSDRankError, also for a constant that is not finite."""
    if not (np.isin(packed["rule"], [*RULES.values(), *PASS_RULES.values()]).all() and np.isfinite(packed["c"]).all()):
        refuse("the constants of a step")
    hypers = np.zeros(len(packed), HYPER)
    hypers["rule"], hypers["c"] = packed["rule"], packed["c"]
    return hypers


def pack_counts(steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return `step` counts (fp32) in wire format."""
    return steps.astype(WIRE_INDEX)


def unpack_counts(data: memoryview, n_params: int) -> np.ndarray[Any, Any]:
    """Return the `step` counts of all parameters, fp32. Raises CSDRankError."""
    counts = array(data, WIRE_INDEX, "step counts", n_params)
    if not (counts < 1 << 24).all():  # the largest integers that fp32 counts
        refuse("a step count")
    return counts.astype(np.float32)


# ---- dtypes and errors ---------------------------------------------------------------------


def name_of_dtype(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def extent_fields(extent: Extent) -> dict[str, Any]:
    """Return the fields that say how an extent's states are stored."""
    sections, dtype = [*extent.sections], name_of_dtype(extent.param_dtype)
    return {"tile_elems": extent.tile_elems, "sections": sections, "codec": extent.codec, "param_dtype": dtype}


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a parameter with this name; None for "". Raises CSDRankError."""
    known = {"": None, **{name_of_dtype(dtype): dtype for dtype in DTYPE_CODES}}
    if name not in known:
        refuse(f"the dtype {name!r}")
    return known[name]


def said(e: BaseException) -> str:
    """Return the text of an error, with the class unless it is a CSDError or OSError."""
    return str(e) if isinstance(e, (CSDError, OSError)) else f"{type(e).__name__}: {e}"


def failure_of(e: BaseException) -> Failure:
    """Return an error as fields of a message."""
    kind = next((c.__name__ for c in type(e).__mro__ if c.__module__ == errors.__name__), "CSDRankError")
    text = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
    text = text.encode(errors="replace").decode()  # it may name a path that is no text
    return Failure(error=kind, errno=getattr(e, "errno", None) or 5, text=text[:MAX_TEXT])


def raise_failure(said: Failure | Failed) -> NoReturn:
    """Raise the error that a message contains."""
    kind = getattr(errors, said.error, None)
    if not (isinstance(kind, type) and issubclass(kind, CSDError)):
        kind = CSDRankError
    text = f"{said.text} (said by the optimizer ranks)"
    raise kind(said.errno, text) if issubclass(kind, CSDOSError) else kind(text)


def check_byte_order() -> None:
    """Raise CSDRankError on big-endian machines, whose tensors cannot be sent without conversion."""
    if sys.byteorder != "little":
        raise CSDRankError("optimizer ranks work on little-endian machines only")
