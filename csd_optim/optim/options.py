"""The keyword arguments that every optimizer here takes in addition to torch's."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, TypeVar

import torch
from torch.nn.parameter import is_lazy

from .. import settings
from ..bindings import DTYPE_CODES
from ..compression.policy import check_topk
from ..errors import CSDRuntimeError, CSDValueError, CSDWarning, users_stacklevel
from ..params.groups import Groups, check_state_dtype, name_of
from ..params.param_state import check_param
from ..params.update_rule import UpdateRule
from .rules import named_elsewhere

_Init = TypeVar("_Init", bound=Callable[..., None])


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
    """Return the dtype that an argument `grad_dtype` means: a dtype, or "bfloat16", "torch.bfloat16" or "bf16".

    Text is for configuration files. Raises CSDValueError; `where`: for the message.
    """
    dtype = _NAMED.get(value.strip().removeprefix("torch.")) if isinstance(value, str) else value
    if (value is not None and dtype is None) or dtype not in (None, *DTYPE_CODES):
        names = ", ".join(map(str, DTYPE_CODES))
        raise CSDValueError(f"Invalid grad_dtype{where}: {value!r}; it is one of {names}, or the name of one")
    return dtype


def _read_bool(text: str) -> bool:
    return {"1": True, "true": True, "0": False, "false": False}[text.lower()]


# Readers of options in CSD_OPTIM_OPTIONS, and descriptions of valid text for messages. `devices` has its own variable,
# and a process group has no text.
_READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "state_dtype": (str, ""),
    "grad_dtype": (str, ""),
    "topk": (float, "a number"),
    "error_feedback": (_read_bool, "1 or 0"),
    "topk_warmup": (int, "a number of steps"),
    "max_grad_norm": (float, "a number"),
    "resume": (_read_bool, "1 or 0"),
    "resume_from": (str, ""),
    "overwrite": (_read_bool, "1 or 0"),
    "tile_size": (int, "a number of elements"),
    "sharded": (_read_bool, "1 or 0"),
}


def takes_environment(init: _Init) -> _Init:
    """Make the ``__init__`` of an optimizer take the options in CSD_OPTIM_OPTIONS that its caller does not pass.

    Also decides whether the optimizer warns of saving on one rank: not if the caller has passed `sharded`, with any
    value, and not if a store keeps the states.
    """

    @functools.wraps(init)
    def with_environment(self: Any, *args: Any, **given: Any) -> None:
        options = {**_from_environment(given, self._rule), **given}
        self._warns_of_saving = "sharded" not in options and not options.get("resume")
        init(self, *args, **options)

    return with_environment  # type: ignore[return-value]


def _from_environment(given: dict[str, Any], rule: UpdateRule) -> dict[str, Any]:
    """Return the options in CSD_OPTIM_OPTIONS that are not `given`. Warns of `given` options with another value.

    Raises CSDValueError for an invalid option, even if it is `given`, so that a wrong spelling is always noticed.
    """
    where, found = f" in {settings.OPTIONS}", {}
    for name, text in settings.options().items():
        if name not in _READERS:
            advice = "; CSD_OPTIM_DEVICES names the devices" if name == "devices" else ""
            raise CSDValueError(
                f"Invalid {settings.OPTIONS}: there is no option {name!r}; it takes {', '.join(_READERS)}{advice}"
            )
        read, what = _READERS[name]
        try:
            value = read(text)
        except (KeyError, ValueError):
            raise CSDValueError(f"Invalid {name}{where}: {text!r}; it is {what}") from None
        _check(name, value, where, None if name in given else rule)
        if name not in given:
            found[name] = value
        elif given[name] != value:
            warnings.warn(
                f"{name}={text}{where} has no effect: the argument {name}={given[name]!r} counts",
                CSDWarning,
                stacklevel=4,  # the caller of the optimizer's class
            )
    return found


def _check(name: str, value: Any, where: str = "", rule: UpdateRule | None = None) -> None:
    """Raise CSDValueError if this value of an option is invalid by itself. `where`: for the message."""
    wrong: str | None = None  # the end of the message, after the value
    if name == "grad_dtype":
        grad_dtype_of(value, where)
    elif name == "state_dtype":
        check_state_dtype(value, where, rule)
    elif name == "topk":
        check_topk(value, where)
    elif name in ("error_feedback", "sharded"):
        wrong = None if isinstance(value, bool) else "; it is True or False"
    elif name == "topk_warmup":
        wrong = None if type(value) is int and value >= 0 else "; it is a number of steps"
    elif name == "max_grad_norm":
        wrong = None if value is None or (isinstance(value, (int, float)) and value > 0) else ""
    elif name == "tile_size":
        wrong = None if value is None or (type(value) is int and value > 0) else ""
    if wrong is not None:
        raise CSDValueError(f"Invalid {name}{where}: {value!r}{wrong}")


def check_options(a: Any, tile_size: Any, *, resume: bool, resume_from: object, overwrite: bool) -> None:
    """Raise CSDValueError for an invalid option. `a`: the optimizer, with the other options as attributes."""
    for name in ("topk", "error_feedback", "topk_warmup", "max_grad_norm"):
        _check(name, getattr(a, name))
    _check("tile_size", tile_size)
    _check("sharded", a.sharded)
    beside = f" ({settings.OPTIONS} is {text!r})" if (text := os.environ.get(settings.OPTIONS)) else ""
    if resume and overwrite:
        raise CSDValueError(f"resume=True and overwrite=True exclude each other{beside}")
    if resume_from is not None and not resume:
        raise CSDValueError(
            f"resume_from needs resume=True: it says from which other stores these are to continue{beside}"
        )


def check_group(groups: Groups, k: int, optimizer: str, rule: UpdateRule, state_dtype: str) -> None:
    """Raise CSDRuntimeError, CSDValueError or CSDTypeError if group `k` asks for something that no back end can do.

    Warns if the group names another rule by a key of other libraries. `optimizer`: its name, for messages.
    `state_dtype`: the optimizer's argument.
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
    if (elsewhere := named_elsewhere(group)) and elsewhere[1] != rule.name:
        key, named = elsewhere
        text = f"group {k} has {key!r}, which csd_optim does not read: its parameters are updated by {rule.name}"
        warnings.warn(f'{text}. For {named}, write "rule": "{named}"', CSDWarning, users_stacklevel())
