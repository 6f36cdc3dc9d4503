"""The update rules in torch operations, for states on an accelerator, with the same bits as native/include/rules.h.

Both round each operation to the nearest fp32 number, in the same order, and treat subnormal numbers as zero. A torch
kernel does one operation, and so cannot fuse a product with a sum. Devices differ in how they treat subnormal numbers,
so subnormal operands and results are set to zero explicitly. A product or quotient is computed in fp64, where products
are exact, to see whether it is subnormal when it is rounded to 24 bits; rounded to a subnormal fp32 number it might
become 2^-126. torch's fp32 square root need not be the nearest number (on CPUs it is MKL's), so the root, too, is taken
in fp64 and rounded to fp32. The result is the nearest number, as the root of a 24-bit number is at least 4 ulps of fp64
away from where fp32 rounds the other way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...bindings import GRAD_SCALE, RULES
from ...kernels.edge import edge_factors

SMALLEST = 2.0**-126  # the smallest normal fp32 number
LARGEST_SUBNORMAL = SMALLEST - 2.0**-149
# The largest fp64 number that is subnormal after rounding to 24 bits without a least exponent, as x86 flushes it.
LARGEST_FLUSHED = math.nextafter(SMALLEST - 2.0**-151, 0)
TRIED = 1 << 14  # how many numbers differing_roundings() tries per operation

Constants = Sequence[float]
StateTensors = Sequence[torch.Tensor]


@dataclass
class Scratch:
    """Scratch memory for update(): tensors of `n` elements each. With `exact` False nothing is computed in fp64."""

    g: torch.Tensor  # fp32, as the next three
    a: torch.Tensor
    b: torch.Tensor
    spare: torch.Tensor
    wide: torch.Tensor | None  # fp64

    @classmethod
    def of(cls, n: int, device: torch.device, *, exact: bool = True) -> Scratch:
        g, a, b, spare = (torch.empty(n, dtype=torch.float32, device=device) for _ in range(4))
        return cls(g, a, b, spare, torch.empty(n, dtype=torch.float64, device=device) if exact else None)

    def first(self, n: int) -> Scratch:
        """Return the first `n` elements of each tensor."""
        return Scratch(self.g[:n], self.a[:n], self.b[:n], self.spare[:n], None if self.wide is None else self.wide[:n])


class _Rounded:
    """Operations on fp32 tensors of one size, without subnormal results. Each writes to `out`, and returns it."""

    def __init__(self, scratch: Scratch) -> None:
        self._spare, self._wide = scratch.spare, scratch.wide

    def flush(self, x: torch.Tensor) -> torch.Tensor:
        """Set subnormal numbers in `x` to zero and keep their sign; return `x`."""
        torch.ops.aten.hardshrink.out(x, LARGEST_SUBNORMAL, out=self._spare)
        return torch.copysign(self._spare, x, out=x)

    def times(self, x: torch.Tensor, y: torch.Tensor | float, out: torch.Tensor) -> torch.Tensor:
        return self._rounded(torch.mul, x, y, out)

    def plus(self, x: torch.Tensor, y: torch.Tensor | float, out: torch.Tensor) -> torch.Tensor:
        return self.flush(torch.add(x, y, out=out))

    def minus(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.flush(torch.sub(x, y, out=out))

    def over(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._rounded(torch.div, x, y, out)

    def _rounded(
        self, operation: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor | float, out: torch.Tensor
    ) -> torch.Tensor:
        """Return a product or quotient. The quotient of two fp32 numbers is the same if it is rounded to fp64 first."""
        if self._wide is None:
            return self.flush(operation(x, y, out=out))
        sign = operation(x, y, out=self._spare)
        wide = operation(self._wide.copy_(x), y, out=self._wide)
        torch.ops.aten.hardshrink.out(wide, LARGEST_FLUSHED, out=wide)
        return torch.copysign(out.copy_(wide), sign, out=out)

    def root(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self._wide is None:
            return torch.sqrt(x, out=out)
        return out.copy_(torch.sqrt(self._wide.copy_(x), out=self._wide))

    def decay(self, g: torch.Tensor, weight_decay: float, weight: torch.Tensor, a: torch.Tensor) -> None:
        """Add the L2 decay to the gradient `g`, like decayed_grad() of weight_decay.h; `a` is scratch."""
        if weight_decay:
            self.plus(g, self.times(weight, weight_decay, a), g)

    def average(self, x: torch.Tensor, keep: float, y: torch.Tensor, add: float, a: torch.Tensor) -> None:
        """Set x to x * keep + y * add; `a` is scratch."""
        self.times(x, keep, x)
        self.plus(x, self.times(y, add, a), x)

    def square_average(self, x: torch.Tensor, keep: float, g: torch.Tensor, add: float, a: torch.Tensor) -> None:
        """Set x to x * keep + add * g * g; `a` is scratch."""
        self.times(x, keep, x)
        self.times(g, add, a)
        self.plus(x, self.times(a, g, a), x)


# Arguments of a rule: operations, constants, states, scaled gradient, two scratch tensors.
Rule = Callable[[_Rounded, Constants, StateTensors, torch.Tensor, torch.Tensor, torch.Tensor], None]


def _adam_step(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Update the moments and the master, after the weight decay: see adamw.h."""
    master, exp_avg, exp_avg_sq = s[:3]
    o.average(exp_avg, c[1], g, c[2], a)
    o.square_average(exp_avg_sq, c[3], g, c[4], a)
    b.copy_(torch.maximum(s[3], exp_avg_sq, out=s[3]) if len(s) > 3 else exp_avg_sq)
    o.root(o.flush(b), b)
    o.plus(o.times(b, c[6], b), c[7], b)
    o.minus(master, o.over(o.times(exp_avg, c[5], a), b, a), master)


def _adamw(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    o.times(s[0], c[0], s[0])
    _adam_step(o, c, s, g, a, b)


def _adam(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    o.decay(g, c[0], s[0], a)
    _adam_step(o, c, s, g, a, b)


def _sgd(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, _: torch.Tensor) -> None:
    o.decay(g, c[1], s[0], a)
    o.minus(s[0], o.times(g, c[0], a), s[0])


def _sgd_momentum(
    o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, _: torch.Tensor
) -> None:
    o.decay(g, c[1], s[0], a)
    o.average(s[1], c[2], g, c[3], a)
    o.minus(s[0], o.times(s[1], c[0], a), s[0])


def _sgd_nesterov(
    o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, _: torch.Tensor
) -> None:
    o.decay(g, c[1], s[0], a)
    o.average(s[1], c[2], g, c[3], a)
    o.plus(g, o.times(s[1], c[2], a), g)
    o.minus(s[0], o.times(g, c[0], a), s[0])


def _adagrad(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    o.decay(g, c[1], s[0], a)
    o.plus(s[1], o.times(g, g, a), s[1])
    o.plus(o.root(s[1], b), c[2], b)
    o.minus(s[0], o.over(o.times(g, c[0], a), b, a), s[0])


def _rmsprop(*, average: int | None = None, momentum: int | None = None) -> Rule:
    """Return RMSprop's rule. `average`, `momentum`: index of that state, or None if the rule does not have it."""

    def rule(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        o.decay(g, c[1], s[0], a)
        o.square_average(s[1], c[2], g, c[3], a)
        if average is None:
            o.root(s[1], b)
        else:
            o.average(s[average], c[2], g, c[3], a)
            o.root(o.minus(s[1], o.times(s[average], s[average], a), b), b)
        o.plus(b, c[5], b)
        if momentum is None:
            o.minus(s[0], o.over(o.times(g, c[0], a), b, a), s[0])
        else:
            moved = o.times(s[momentum], c[4], s[momentum])
            o.plus(moved, o.over(g, b, a), moved)
            o.minus(s[0], o.times(moved, c[0], a), s[0])

    return rule


def _lion(o: _Rounded, c: Constants, s: StateTensors, g: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    b.copy_(s[1])
    o.average(b, c[2], g, c[3], a)
    o.times(torch.sign(b, out=b), c[1], b)
    o.minus(o.times(s[0], c[0], s[0]), b, s[0])
    o.average(s[1], c[4], g, c[5], a)


# By the number of a rule: its function, and the indices of the states whose subnormal numbers become zero first. States
# that a rule does not use keep every bit. AMSGrad's fourth state is compared, not computed with, so it is not flushed.
_RULES: dict[int, tuple[Rule, tuple[int, ...]]] = {
    RULES[name]: rule
    for name, rule in {
        "adamw": (lambda o, c, s, *t: _adamw(o, c, s[:3], *t), (0, 1, 2)),
        "amsgrad": (_adamw, (0, 1, 2)),
        "adam": (lambda o, c, s, *t: _adam(o, c, s[:3], *t), (0, 1, 2)),
        "adam_amsgrad": (_adam, (0, 1, 2)),
        "sgd": (_sgd, (0,)),
        "sgd_momentum": (_sgd_momentum, (0, 1)),
        "sgd_nesterov": (_sgd_nesterov, (0, 1)),
        "adagrad": (_adagrad, (0, 1)),
        "rmsprop": (_rmsprop(), (0, 1)),
        "rmsprop_centered": (_rmsprop(average=2), (0, 1, 2)),
        "rmsprop_momentum": (_rmsprop(momentum=2), (0, 1, 2)),
        "rmsprop_both": (_rmsprop(average=2, momentum=3), (0, 1, 2, 3)),
        "rmsprop_uncentered": (_rmsprop(momentum=3), (0, 1, 3)),
        "lion": (_lion, (0, 1)),
    }.items()
}


def update(rule: int, constants: Constants, states: StateTensors, grad: torch.Tensor, scratch: Scratch) -> None:
    """Queue one step of a rule. Allocates no memory and does not wait for the device.

    `rule`, `constants`: as in csd_hyper. `states`: 1-D fp32 of one size, the master first, updated in place. `grad`: as
    many elements, of any dtype.
    """
    g, a, b = scratch.g, scratch.a, scratch.b
    o = _Rounded(scratch)
    c = [0.0 if abs(x) < SMALLEST else float(x) for x in constants]
    apply, read = _RULES[rule]
    for k in read:
        o.flush(states[k])
    g.copy_(grad)
    o.times(o.flush(g), c[GRAD_SCALE], g)
    apply(o, c, states, g, a, b)


def differing_roundings(device: torch.device) -> list[str]:
    """Return the operations of update() that `device` rounds differently from the CPU.

    The CPU rounds as IEEE 754 demands. Found by trying random numbers, and products at the edge of subnormal numbers.
    """
    host = torch.device("cpu")
    generator = torch.Generator(host).manual_seed(0)
    host_fp32: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": host}
    size = torch.exp2(60 * torch.randn(TRIED, **host_fp32).clamp(-1, 1))
    x, y = (torch.randn(TRIED, **host_fp32) * size for _ in range(2))
    for values, edge in zip((x, y), edge_factors(16), strict=True):
        values[: len(edge)] = torch.tensor(edge)
    operations: dict[str, Callable[[_Rounded, torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "multiplication": lambda o, x, y: o.times(x, y, x),
        "addition": lambda o, x, y: o.plus(x, y, x),
        "subtraction": lambda o, x, y: o.minus(x, y, x),
        "division": lambda o, x, y: o.over(x, y, x),
        "square root": lambda o, x, _: o.root(x.abs(), x),
        "rounding to fp16": lambda _, x, __: x.half().float(),
        "rounding to bf16": lambda _, x, __: x.bfloat16().float(),
    }

    def result_bits(operation: str, on: torch.device) -> torch.Tensor:
        operands = x.to(on, copy=True), y.to(on, copy=True)
        return operations[operation](_Rounded(Scratch.of(TRIED, on)), *operands).cpu().view(torch.int32)

    try:
        Scratch.of(1, device)
    except (TypeError, RuntimeError):  # the device has no fp64, for example MPS
        return ["square root, for which fp64 is missing there"]
    return [name for name in operations if not torch.equal(result_bits(name, device), result_bits(name, host))]
