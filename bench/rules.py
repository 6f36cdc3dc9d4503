"""Each optimizer, compared with the class of torch that it replaces: bench/step.py --optimizer.

The two are timed by turns: ours over 16-bit parameters with its states on the devices, each step followed by a
measurement of the limit; torch's over as many fp32 parameters in memory, fused if possible, otherwise foreach. There is
no Lion in torch: ours is compared with the paper's algorithm in torch operations.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from csd_optim import CSDSGD, CSDAdagrad, CSDAdam, CSDLion, CSDRMSprop
from csd_optim.cli.benchmark import DTYPES, TENSOR, WARM_UP, scratch
from csd_optim.devices.spec import DeviceSpec
from csd_optim.optim.optimizer import CSDOptimizer

Row = dict[str, Any]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023, algorithm 2) in foreach operations."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), params = group["betas"], group["params"]
            grads = [p.grad for p in params]
            moments = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in params]
            between = torch._foreach_mul(moments, beta1)
            torch._foreach_add_(between, grads, alpha=1 - beta1)
            torch._foreach_sign_(between)
            torch._foreach_add_(params, between, alpha=-group["lr"])
            torch._foreach_mul_(moments, beta2)
            torch._foreach_add_(moments, grads, alpha=1 - beta2)


class Pair(NamedTuple):
    ours: Callable[..., Any]
    theirs: Callable[..., torch.optim.Optimizer]
    kwargs: dict[str, Any]


PAIRS = {
    "adamw": Pair(CSDAdam, torch.optim.AdamW, {}),
    "adam": Pair(partial(CSDAdam, decoupled_weight_decay=False), torch.optim.Adam, {"weight_decay": 0.01}),
    "sgd": Pair(CSDSGD, torch.optim.SGD, {}),
    "sgd-momentum": Pair(CSDSGD, torch.optim.SGD, {"momentum": 0.9}),
    "adagrad": Pair(CSDAdagrad, torch.optim.Adagrad, {}),
    "rmsprop": Pair(CSDRMSprop, torch.optim.RMSprop, {}),
    "rmsprop-all": Pair(CSDRMSprop, torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "lion": Pair(CSDLion, Lion, {}),
}


def fastest(pair: Pair) -> dict[str, bool]:
    """Return the argument that selects torch's fastest implementation; Lion above has only one."""
    names = inspect.signature(pair.theirs).parameters
    how = next((how for how in ("fused", "foreach") if how in names), None)
    return {how: True} if how else {}


class Limit(NamedTuple):
    """The limit that a step of ours is compared with, measured right after each step."""

    what: str
    seconds: Callable[[CSDOptimizer], float]


def row(name: str, specs: Sequence[DeviceSpec], place: str, params: int, runs: int, dtype: str, limit: Limit) -> Row:
    """Time our steps until all states are written, and torch's in memory, by turns."""
    pair = PAIRS[name]
    sizes = [min(TENSOR, params - first) for first in range(0, params, TENSOR)]
    tensors = [[torch.nn.Parameter(torch.randn(n).to(of)) for n in sizes] for of in (DTYPES[dtype], torch.float32)]
    for p in (*tensors[0], *tensors[1]):
        p.grad = torch.randn(p.shape).to(p.dtype)
    how = fastest(pair)
    theirs = pair.theirs(tensors[1], **pair.kwargs, **how)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    limits = []
    with pair.ours(tensors[0], devices=[scratch(s) for s in specs], **pair.kwargs) as opt:
        for i in range(WARM_UP + runs):
            for who in ("ours", "theirs") if i % 2 else ("theirs", "ours"):  # alternating: order may matter
                start = time.perf_counter()
                if who == "ours":
                    opt.step()
                    stats = opt.stats()  # waits until all states are written
                else:
                    theirs.step()
                elapsed = time.perf_counter() - start
                least = limit.seconds(opt) if who == "ours" else None
                if i >= WARM_UP:
                    seconds[who].append(elapsed)
                    limits += [least] if least else []
    reference = "Lion in torch's foreach operations"
    if how:
        reference = f"torch.optim.{type(theirs).__name__}({', '.join(how)}=True)"
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {
        "what": f"{name}, {dtype}, {place}",
        "params": params,
        "seconds": seconds["ours"],
        "bytes_per_param": {k: stats[f"{k}_bytes"] / params for k in ("push", "pull", "flash_read", "flash_write")},
        "ratio_to": {
            limit.what: [least / s for least, s in zip(limits, seconds["ours"], strict=True)],
            f"{reference} on fp32 parameters in memory": ratios,
        },
    }
