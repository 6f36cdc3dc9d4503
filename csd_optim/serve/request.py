"""The request for a session, with which trainers describe their model and optimizer, and how owners parse it."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..distributed.sharding import is_replicated
from ..errors import CSDError, CSDRankError, CSDRuntimeError, CSDStoreError
from ..params.groups import Groups, check_state_dtype, hyperparameters_of, name_of
from ..params.param_state import DTYPES
from ..params.update_rule import UpdateRule
from .values import dtype_named
from .wire import PROTOCOL

MAX_TRAINERS = 4096
MAX_DIMS = 64  # torch's own limit
MAX_TILE = 1 << 30  # elements
MODES = ("new", "resume", "overwrite")


@dataclass(frozen=True)
class Param:
    name: str
    named: bool  # whether the user named it; otherwise `name` is made of group and position
    shape: tuple[int, ...]  # of the whole parameter
    stride: tuple[int, ...]
    dtype: torch.dtype
    trains: bool  # requires_grad


@dataclass(frozen=True)
class Group:
    hyper: dict[str, Any] = field(compare=False)  # as hyperparameters_of() returns them
    params: tuple[Param, ...]


@dataclass(frozen=True)
class Request:
    """The request for one session. Equal requests describe the same model and optimizer; hyperparameters may differ."""

    optimizer: str  # class name in this package
    defaults: dict[str, Any] = field(compare=False)
    options: dict[str, Any]  # the optimizer's state_dtype and tile_size
    mode: str = field(compare=False)
    trainers: int = field(compare=False)
    who: str = field(compare=False)
    groups: tuple[Group, ...]

    @property
    def params(self) -> list[Param]:
        return [p for group in self.groups for p in group.params]

    def message(self) -> dict[str, Any]:
        return {"protocol": PROTOCOL, **asdict(self), "groups": [group_message(g) for g in self.groups]}


def process_name() -> str:
    return f"{platform.node()}, process {os.getpid()}"


def describe_group(
    groups: Groups,
    k: int,
    hyperparameters: Sequence[str],
    shape_of: Callable[[torch.Tensor], torch.Size],
    *,
    star: bool,
) -> Group:
    """Describe parameter group `k` of an optimizer.

    `shape_of` returns the shape of the whole parameter of which a tensor may be a shard. `star`: owners sum gradients.
    Raises CSDRuntimeError for parameters that owners cannot serve.
    """
    group = groups[k]
    params = []
    for i, p in enumerate(group["params"]):
        name = name_of(groups, k, i)
        if is_lazy(p):
            raise CSDRuntimeError(f"parameter {name} has no shape yet: run the model once before the optimizer is made")
        if star and not is_replicated(p):
            raise CSDRuntimeError(
                f"parameter {name} is divided among the trainers: ?route=star is for parameters that all of them have"
            )
        shape = shape_of(p)
        stride = p.stride() if shape == p.shape else torch.empty(shape, device="meta").stride()
        params.append(
            Param(name, bool(group.get("param_names")), tuple(shape), tuple(stride), p.dtype, p.requires_grad)
        )
    return Group(hyperparameters_of(group, hyperparameters), tuple(params))


def group_message(group: Group) -> dict[str, Any]:
    params = [{**vars(p), "dtype": str(p.dtype).removeprefix("torch.")} for p in group.params]
    return {"hyper": group.hyper, "params": params}


def read_request(message: dict[str, Any], optimizers: Sequence[str]) -> Request:
    """Parse a request. Raises CSDRankError if it is malformed or cannot be served; `optimizers`: known class names."""
    if message.get("protocol") != PROTOCOL:
        raise CSDRankError(
            f"trainers speak protocol {message.get('protocol')!r} and optimizer ranks {PROTOCOL}: install the same "
            "csd_optim on both"
        )
    with _Reading():
        if message["optimizer"] not in optimizers:
            raise CSDRankError(
                f"optimizer ranks do not know the optimizer {message['optimizer']!r}, only {', '.join(optimizers)}"
            )
        if message["mode"] not in MODES:
            raise ValueError(f"mode {message['mode']!r}")
        if not (type(message["trainers"]) is int and 1 <= message["trainers"] <= MAX_TRAINERS):
            raise ValueError(f"{message['trainers']!r} trainers")
        options = {name: message["options"][name] for name in ("state_dtype", "tile_size")}
        return Request(
            message["optimizer"],
            _hyperparameters(message["defaults"]),
            options,
            message["mode"],
            message["trainers"],
            str(message["who"])[:200],
            tuple(read_group(group) for group in message["groups"]),
        )


def read_group(message: dict[str, Any]) -> Group:
    """Parse a parameter group. Raises CSDRankError if it is malformed."""
    with _Reading():
        return Group(_hyperparameters(message["hyper"]), tuple(_read_param(p) for p in message["params"]))


def _read_param(fields: dict[str, Any]) -> Param:
    shape, stride, dtype = tuple(fields["shape"]), tuple(fields["stride"]), dtype_named(fields["dtype"])
    if len(shape) > MAX_DIMS or len(shape) != len(stride):
        raise ValueError(f"a shape of {len(shape)} and a stride of {len(stride)} dimensions")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, *stride)):
        raise ValueError(f"shape {shape} and stride {stride}")
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if max(math.prod(shape), span) * dtype.itemsize >= 1 << 48:
        raise ValueError(f"shape {shape} and stride {stride}")
    if fields["trains"] and dtype not in DTYPES:
        raise ValueError(f"a parameter of dtype {dtype}")
    return Param(str(fields["name"])[:1000], bool(fields["named"]), shape, stride, dtype, bool(fields["trains"]))


def read_hyper(groups_hyper: Any, groups: int, rule: UpdateRule | None) -> None:
    """Check the hyperparameters of all groups (or None), with `rule` also that a step can be made with them.

    Raises ValueError, TypeError, AttributeError, KeyError.
    """
    if groups_hyper is None:
        return
    if len(groups_hyper) != groups:
        raise ValueError(f"hyperparameters of {len(groups_hyper)} groups, not {groups}")
    for group in map(_hyperparameters, groups_hyper):
        if rule:
            rule.check(group)


def check_groups(groups: Sequence[Group], rule: UpdateRule, request: Request) -> None:
    """Check for what an optimizer of this rule would refuse new groups. Raises CSDRankError, CSDValueError."""
    with _Reading():
        for group in groups:
            rule.check(group.hyper)
            check_state_dtype(group.hyper.get("state_dtype", request.options["state_dtype"]), rule=rule)
            if group.hyper.keys() & {"params", "param_names"} or group.hyper.get("differentiable"):
                raise ValueError(f"hyperparameters {', '.join(group.hyper)}")
            decays = [of.get("decoupled_weight_decay", True) for of in (request.defaults, group.hyper)]
            if not all(isinstance(decay, bool) for decay in decays) or decays == [True, False]:
                raise ValueError(f"decoupled_weight_decay {decays}")
        if len({any(p.named for p in group.params) for group in groups}) > 1:
            raise ValueError("the parameters of some groups have names, and those of others have none")


def check_request(request: Request, rule: UpdateRule) -> None:
    """Check all of a request that needs no store, before it ends the session under way.

    `rule`: of the optimizer that is requested. Raises CSDRankError, CSDValueError.
    """
    with _Reading():
        if not request.groups:
            raise ValueError("no parameter groups")
        if "decoupled_weight_decay" in request.defaults and rule.name != "adamw":
            raise ValueError(f"decoupled_weight_decay for the rule {rule.name}")
        check_state_dtype(request.options["state_dtype"], rule=rule)
        tile_size = request.options["tile_size"]
        if not (tile_size is None or (type(tile_size) is int and 0 < tile_size <= MAX_TILE)):
            raise ValueError(f"tile_size {tile_size!r}")
    check_groups(request.groups, rule, request)


def _hyperparameters(hyper: dict[str, Any]) -> dict[str, Any]:
    """Check and return hyperparameters: numbers, strings, None and lists, which become tuples as torch's betas are.

    Raises ValueError for any other value.
    """
    for value in hyper.values():
        if not all(
            isinstance(v, (int, float, str, type(None))) for v in (value if isinstance(value, list) else [value])
        ):
            raise ValueError(f"a hyperparameter {value!r}")
    return {str(name): tuple(v) if isinstance(v, list) else v for name, v in hyper.items()}


class _Reading:
    """Context manager that turns errors from parsing a message into CSDRankError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, e: BaseException | None, __: Any) -> None:
        if isinstance(e, (KeyError, TypeError, ValueError, AttributeError)) and not isinstance(e, CSDError):
            raise CSDRankError(f"the trainers' request cannot be read: {type(e).__name__}: {e}") from e


def check_same_model(owners: Request, trainers: Request) -> None:
    """Raise CSDStoreError if the model of `trainers` differs from that of `owners`."""
    if owners.optimizer != trainers.optimizer:
        raise CSDStoreError(f"optimizer ranks keep the states of a {owners.optimizer}, not of a {trainers.optimizer}")
    for what in ("decoupled_weight_decay", "state_dtype"):  # fixed for the lifetime of a store
        a, b = ({**of.defaults, **of.options}.get(what) for of in (owners, trainers))
        if a != b:
            raise CSDStoreError(f"{what} of the optimizer is {a} there and {b} here")
    if len(owners.groups) != len(trainers.groups):
        raise CSDStoreError(
            f"optimizer ranks have {len(owners.groups)} parameter groups, the model {len(trainers.groups)}"
        )
    for k, (a, b) in enumerate(zip(owners.groups, trainers.groups, strict=True)):
        if len(a.params) != len(b.params):
            raise CSDStoreError(f"group {k} has {len(a.params)} parameters there and {len(b.params)} here")
        for p, q in zip(a.params, b.params, strict=True):
            if p.named and q.named and p.name != q.name:
                raise CSDStoreError(f"a parameter of group {k} is {p.name} there and {q.name} here")
            for what in ("shape", "dtype"):
                if getattr(p, what) != getattr(q, what):
                    raise CSDStoreError(
                        f"{what} of parameter {q.name} is {getattr(p, what)} there and {getattr(q, what)} here"
                    )
