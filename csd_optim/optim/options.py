"""The keyword arguments that every optimizer here takes in addition to torch's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch.nn.parameter import is_lazy

from ..bindings import DTYPE_CODES
from ..compression.policy import check_topk
from ..errors import CSDRuntimeError, CSDValueError
from ..params.groups import Groups, check_state_dtype, name_of
from ..params.param_state import check_param
from ..params.update_rule import UpdateRule


class Options(TypedDict, total=False):
    """The keyword arguments that every optimizer here takes in addition to torch's: see CSDAdam."""

    devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    grad_dtype: torch.dtype | str | None
    topk: float | None
    error_feedback: bool
    topk_warmup: int
    max_grad_norm: float | None
    resume: bool
    resume_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    overwrite: bool
    tile_size: int | None
    process_group: Any
    sharded: bool
    state_dtype: str


_SHORT = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NAMED = {**{str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}, **_SHORT}


def grad_dtype_of(value: torch.dtype | str | None, where: str = "") -> torch.dtype | None:
    """Return the `grad_dtype` that the argument names: a dtype, or "bfloat16", "torch.bfloat16" or "bf16".

    Configuration files have no dtypes but only text. Raises CSDValueError; `where`: for the message.
    """
    dtype = _NAMED.get(value.strip().removeprefix("torch.")) if isinstance(value, str) else value
    if (value is not None and dtype is None) or dtype not in (None, *DTYPE_CODES):
        names = ", ".join(map(str, DTYPE_CODES))
        raise CSDValueError(f"Invalid grad_dtype{where}: {value!r}; it is one of {names}, or the name of one")
    return dtype


def check_options(a: Any, tile_size: Any, *, resume: bool, resume_from: object, overwrite: bool, shadow: bool) -> None:
    """Raise CSDValueError for an invalid one. `a`: the optimizer, which has the others as attributes.

    `shadow`: an option that there once was; False kept one copy of the states instead of two.
    """
    check_topk(a.topk)
    if not isinstance(a.error_feedback, bool):
        raise CSDValueError(f"Invalid error_feedback: {a.error_feedback!r}; it is True or False")
    if not (type(a.topk_warmup) is int and a.topk_warmup >= 0):
        raise CSDValueError(f"Invalid topk_warmup: {a.topk_warmup!r}; it is a number of steps")
    if a.max_grad_norm is not None and not (isinstance(a.max_grad_norm, (int, float)) and a.max_grad_norm > 0):
        raise CSDValueError(f"Invalid max_grad_norm: {a.max_grad_norm!r}")
    if tile_size is not None and not (type(tile_size) is int and tile_size > 0):
        raise CSDValueError(f"Invalid tile_size: {tile_size!r}")
    if not isinstance(a.sharded, bool):
        raise CSDValueError(f"Invalid sharded: {a.sharded!r}; it is True or False")
    if resume and overwrite:
        raise CSDValueError("resume=True and overwrite=True exclude each other")
    if resume_from is not None and not resume:
        raise CSDValueError("resume_from needs resume=True: it says from which other stores these are to continue")
    if not shadow:
        raise CSDValueError(
            "Invalid shadow: False; there are two copies of the states, so that every step can be undone. To save "
            "space, use CSDAdam(..., state_dtype='8bit')"
        )


def check_group(groups: Groups, k: int, optimizer: str, rule: UpdateRule, state_dtype: str) -> None:
    """Raise CSDRuntimeError, CSDValueError or CSDTypeError for group `k` if it asks for what no back end can do.

    `optimizer`: its name, for messages. `state_dtype`: the optimizer's argument.
    """
    group = groups[k]
    for name in ("capturable", "differentiable"):
        if group.get(name):
            raise CSDRuntimeError(f"{optimizer} does not support `{name}`: its state is not on the parameter's device")
    check_topk(group.get("topk"), f" of group {k}")
    advice = "" if "state_dtype" in group else '; say so in the group: "state_dtype": "fp32"'
    sections = rule.sections_for(group)
    check_state_dtype(group.get("state_dtype", state_dtype), f" of group {k}", rule, sections, advice)
    for i, p in enumerate(group["params"]):
        # A frozen parameter is not checked: it may be quantized, or not even allocated yet.
        if p.requires_grad and not is_lazy(p):
            check_param(p, name_of(groups, k, i))
