"""One parameter and its place on the devices: what it is now, what its state is, how a step reaches both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..bindings import DTYPE_CODES, FROM_PARAM, IN_PARAM, IN_SECTION, UNLESS_SET
from ..distributed.sharding import Partition
from ..errors import CSDRuntimeError, CSDTypeError, CSDValueError
from .grad_source import GradSource
from .strides import flat, numel, ordered, same_order

DTYPES = (*DTYPE_CODES, torch.complex64)
# Elements re-seeded at a time: bounds the temporaries of a check that touches whole parameters.
RESEED_CHUNK = 1 << 22


@dataclass(eq=False)
class ParamState:
    """A parameter that has its place on the devices: it, or the part of it that this process updates.

    All that is said of elements here is said of the part. What is known of `param` changes by `look()`, `is_ours()` and
    `move_to()`; `is_new` and `alive` are its state map's to write.
    """

    param: torch.Tensor
    part: Partition
    name: str
    index: int  # over all extents; the row in the step's table
    sections: tuple[str, ...]  # names of its states
    stride: tuple[int, ...]  # of its states, as torch.zeros_like(param) has them
    windows: dict[str, torch.Tensor]  # the states; master may be the parameter itself
    shown: dict[str, torch.Tensor]  # the same as `state` shows them
    own_master: torch.Tensor  # the engine's place for the master, used unless in_place
    numel: int  # fp32 values; a complex number counts two
    in_place: bool  # the parameter is its own master and the only one, windows["master"] an alias of it
    reachable: bool  # the devices can take the master from a parameter
    is_master: bool = False  # an fp32 parameter in host memory: its own master at the beginning of a step
    unless_set: bool = False  # a 16-bit one there that may be set uncounted: where it is not the rounded master
    is_new: bool = False  # its place is empty: the step under way begins with the parameter
    alive: bool = True  # no: the parameter got another place
    # What was true of `param` after the last step; anything else is looked at closely.
    version: int = -1
    pointer: int = -1
    local: torch.Tensor = field(init=False)  # the part itself, when it was last looked at
    # The dtype a contiguous gradient must have for the engine to reach it and the parameter by itself, else None.
    direct: torch.dtype | None = None

    @property
    def residual(self) -> torch.Tensor | None:
        """What is owed of the gradient (see topk.py): bfloat16, on the parameter's device, strides as its states'.

        None: nothing.
        """
        return self.windows.get("residual")

    def set_window(self, key: str, window: torch.Tensor) -> None:
        if self.windows.get(key) is not window:
            self.windows[key], self.shown[key] = window, self.part.show(window)

    def drop_window(self, key: str) -> None:
        del self.windows[key], self.shown[key]

    def is_ours(self) -> None:
        """Parameter and master belong together as they are now: what is written from here on is written by others."""
        self.version = self.version_now

    def move_to(self, p: torch.Tensor, part: Partition) -> None:
        """Another parameter takes the place: that of a model which was exchanged. To be looked at next."""
        self.param, self.part = p, part
        self.shown = {k: w if k == "step" else part.show(w) for k, w in self.windows.items()}

    @property
    def is_written(self) -> bool:
        """Has somebody written, moved or converted the parameter since it was ours?"""
        return self.version != self.version_now or self.pointer != self.pointer_now

    @property
    def master_in(self) -> int:
        """Where a step finds the master, once it has its place: see csd_master."""
        if self.in_place:
            return int(IN_PARAM)
        return int(FROM_PARAM if self.is_master else UNLESS_SET if self.unless_set else IN_SECTION)

    @property
    def version_now(self) -> int:
        """Counts what was written to the parameter."""
        return self.part.version(self.param)

    @property
    def pointer_now(self) -> int:
        return self.part.pointer(self.param)

    def fits(self) -> bool:
        """Is the parameter still one whose state this could be?"""
        p = self.param
        right = p.dtype in DTYPES and p.layout is torch.strided and not p.is_meta
        return right and self.part.of(p).shape == self.own_master.shape

    def look(self, grad_dtype: torch.dtype | None) -> None:
        """Somebody wrote, moved or converted the parameter: what is it now? `grad_dtype`: the optimizer's option."""
        check_param(self.param, self.name)
        p = self.part.of(self.param)
        shape = self.own_master.shape
        if p.shape != shape or numel(p) != self.numel:
            raise CSDValueError(f"parameter {self.name} is {tuple(p.shape)} {p.dtype} now, its state {tuple(shape)}")
        if self.pointer != self.pointer_now:
            self.version = -1  # it counts as written until a step has come to its end
        self.pointer, self.local = self.pointer_now, p
        on_host, in_order = p.device.type == "cpu", same_order(p.stride(), self.stride, p.shape)
        self.is_master = self.reachable and on_host and in_order and p.dtype is torch.float32
        half = p.dtype in (torch.float16, torch.bfloat16)
        self.unless_set = self.part.writes_uncounted and self.reachable and on_host and in_order and half
        reachable = on_host and in_order and p.is_contiguous() and p.dtype in DTYPE_CODES
        self.direct = p.dtype if reachable and grad_dtype in (None, p.dtype) else None
        if self.in_place:
            self.in_place = reachable and p.dtype is torch.float32
            if self.in_place:
                self.set_window("master", p)
            else:  # no longer: what it was moves to the engine, with the bits that the parameter may have lost
                self.set_window("master", self.own_master.copy_(self.windows["master"]))

    def fill(self, entry: Mapping[str, Any], *, seed: bool, fresh: bool = False) -> None:
        """Copies into the parameter's place what `entry` (that of `state`) has of it.

        What is missing starts at zero; `fresh`: it reads as zero already. `seed`: the master too.
        """
        for key, window in self.windows.items():
            value = entry.get(key)
            if value is self.shown[key] or (key == "master" and self.in_place):
                continue
            if value is not None and key == "step":
                window.fill_(float(value))  # a number, or a tensor of whatever shape with one
            elif value is not None:
                window.copy_(self.part.of_state(value))
            elif key == "master":
                if seed:
                    window.copy_(self.local)
            elif not fresh:
                window.zero_()
        # A master that came with the state may not round to the parameter: the next step compares them.
        self.version = self.version_now if "master" not in entry else -1

    def reseed(self, *, always: bool) -> None:
        """Where the parameter is not its rounded master, somebody has set it: it becomes the master there.

        Elsewhere the master keeps the bits that the parameter's precision cannot show. `always`: write it in any case.
        """
        if self.in_place or self.numel == 0:
            return
        master = flat(self.windows["master"])
        p = flat(ordered(self.local, self.stride))
        for first in range(0, self.numel, RESEED_CHUNK):
            chunk, now = master[first : first + RESEED_CHUNK], p[first : first + RESEED_CHUNK].cpu()
            same = chunk.to(now.dtype) == now
            if always or not same.all():
                chunk.copy_(torch.where(same, chunk, now.float()))

    def restore(self, first: int, n: int) -> None:
        """Elements [first, first + n) of the parameter get the value of their master: an undone step wrote them."""
        p = self.local
        if self.in_place:  # the only master
            return
        in_order = ordered(p, self.stride)
        flat(in_order)[first : first + n].copy_(flat(self.windows["master"])[first : first + n])
        if in_order is not p:
            p.copy_(in_order)
        self.is_ours()

    def source(self, g: torch.Tensor, grad_dtype: torch.dtype | None) -> GradSource:
        """Gradient and parameter as flat arrays in the order of the state: views where memory has it, else copies.

        `g`: of the part.
        """
        p = self.local
        if g.shape != p.shape:
            raise CSDValueError(
                f"the gradient of {self.name} has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}"
            )
        if g.dtype not in DTYPES:
            raise CSDTypeError(f"the gradient of {self.name} is {g.dtype}; CSDAdam takes {', '.join(map(str, DTYPES))}")
        grad = flat(ordered(g.detach().resolve_conj().resolve_neg(), self.stride))
        target, back = p, None
        if not same_order(p.stride(), self.stride, p.shape):
            target = torch.empty_strided(p.shape, self.stride, dtype=p.dtype, device=p.device)
            if self.is_new:
                target.copy_(p)
            back = (p, target)
        read = self.is_master or self.unless_set or self.is_new
        return GradSource(grad, flat(target), grad_dtype or grad.dtype, read, back)


def check_param(p: torch.Tensor, name: str) -> None:
    """Raises CSDTypeError or CSDRuntimeError for a parameter that no back end can take."""
    if p.dtype not in DTYPES:
        advice = ": states are fp32; convert the model, for example by model.float()" if p.is_floating_point() else ""
        raise CSDTypeError(
            f"CSDAdam does not support {p.dtype} parameters{advice}. {name} is one, of shape {tuple(p.shape)}; "
            f"supported are {', '.join(map(str, DTYPES))}"
        )
    if p.layout is not torch.strided:
        raise CSDRuntimeError(f"CSDAdam does not support {p.layout} parameters, such as {name}")
    if p.device.type not in ("cpu", "cuda", "meta"):
        raise CSDRuntimeError(f"CSDAdam does not support parameters on {p.device}, such as {name}: only cpu and cuda")
    if any(s == 0 and n > 1 for s, n in zip(p.stride(), p.shape, strict=True)):
        raise CSDRuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            f"Please clone() the parameter {name}."
        )


def check_entry(entry: Mapping[str, Any], p: torch.Tensor, name: str, sections: Sequence[str]) -> None:
    """Raises CSDValueError if an entry of `state`, whose states have these names, does not fit its parameter."""
    for key in (*sections, "residual", "step"):
        value = entry.get(key)
        if value is None or (key == "step" and isinstance(value, (int, float))):
            continue
        shape = () if key == "step" else p.shape
        if not isinstance(value, torch.Tensor):
            what = f"is a {type(value).__name__}"
        elif value.shape != shape and not (key == "step" and value.numel() == 1):
            what = f"has shape {tuple(value.shape)}, not {tuple(shape)}"
        elif value.is_meta:
            what = "is on the meta device: it has no data"
        elif value.is_complex() and not p.is_complex():
            what = f"is {value.dtype}"
        elif key == "residual" and p.is_complex():
            what = "is one too many: complex ones go dense, and are owed nothing"
        else:
            continue
        raise CSDValueError(f"state {key!r} of parameter {name} {what}")
