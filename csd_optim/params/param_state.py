"""One parameter and its place on the devices: what it is now, what its state is, how a step reaches both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..accelerator import is_far, is_ours, kind
from ..bindings import DTYPE_CODES, FROM_PARAM, IN_PARAM, IN_SECTION, UNCOMPARED, UNLESS_SET
from ..distributed.sharding import Partition
from ..engine.decoded import Decoded
from ..engine.near_copies import NearCopy
from ..errors import CSDRuntimeError, CSDTypeError, CSDValueError
from .decoded_entry import DecodedEntry
from .grad_source import GradSource
from .strides import flat, numel, ordered, same_order

DTYPES = (*DTYPE_CODES, torch.complex64)
# Elements re-seeded at a time: bounds the temporaries of a check that touches whole parameters.
RESEED_CHUNK = 1 << 22
CPU = torch.device("cpu")
MOST_RATIO = 15.5  # of exp_avg to the root of exp_avg_sq, that 8-bit states hold


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
    windows: dict[str, torch.Tensor]  # the states; master may be the parameter itself. Of codes only step and residual
    shown: dict[str, torch.Tensor]  # the same as `state` shows them
    own_master: torch.Tensor  # the place for the master, used unless in_place; meta of codes, and if there is none yet
    numel: int  # fp32 values; a complex number counts two
    in_place: bool  # the parameter is its own master and the only one, windows["master"] an alias of it
    reachable: bool  # the devices can take the master from a parameter
    home: torch.device = CPU  # where its states are: in host memory, as the devices show them, or on its accelerator
    copy: NearCopy | None = None  # of its states, on its accelerator, beside what the devices have
    decoded: Decoded | None = None  # its states, if the devices keep them as codes
    kept_dtype: torch.dtype | None = None  # then the parameter's, which is part of them
    is_master: bool = False  # an fp32 parameter in host memory, of codes anywhere: the master as a step begins
    unless_set: bool = False  # a 16-bit one there that may be set uncounted: where it is not the rounded master
    is_new: bool = False  # its place is empty: the step under way begins with the parameter
    alive: bool = True  # no: the parameter got another place
    initial: Mapping[str, float] = field(default_factory=dict)  # what states begin as, where that is not zero
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

    @property
    def on_accelerator(self) -> bool:
        """Are its states there, as tensors of torch's, and no element of it on the devices?"""
        return self.home != CPU

    @property
    def master(self) -> torch.Tensor:
        """As it is now, in the shape of the part."""
        return self._view(self.decoded.states(self.index)["master"]) if self.decoded else self.windows["master"]

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """What is decoded within is let go of at the end: for who goes through all parameters, one after another."""
        had = self.decoded is None or self.index in self.decoded.kept
        try:
            yield
        finally:
            if self.decoded and not had:
                self.decoded.forget_unwritten([self.index])

    def _view(self, state: torch.Tensor) -> torch.Tensor:
        values = torch.view_as_complex(state.view(-1, 2)) if self.param.is_complex() else state
        return values.as_strided(self.own_master.shape, self.stride)

    def decode(self) -> dict[str, torch.Tensor]:
        """Of codes: the states as `state` shows them, by name. The same dict until they are others."""
        assert self.decoded
        return self.decoded.shown(self.index, lambda state: self.part.show(self._view(state)))

    def entry(self, others: Mapping[str, Any]) -> DecodedEntry:
        """Of codes: what `state` has of it, beside what else somebody put there."""
        entry = DecodedEntry(("step", *self.sections[1:], self.sections[0]), self.decode)
        entry.keep({**others, **self.shown})
        return entry

    def is_shown_by(self, entry: Mapping[str, Any]) -> bool:
        """Has an entry of `state` our tensors, all of them?"""
        of_codes = isinstance(entry, DecodedEntry) and entry.shows(self.decode) if self.decoded else True
        return of_codes and all(entry.get(key) is self.shown.get(key) for key in {*self.shown, "residual"})

    def set_window(self, key: str, window: torch.Tensor) -> None:
        if self.windows.get(key) is not window:
            self.windows[key], self.shown[key] = window, self.part.show(window)

    def drop_window(self, key: str) -> None:
        del self.windows[key], self.shown[key]

    def is_ours(self) -> None:
        """Parameter and master belong together as they are now: what is written from here on is written by others."""
        self.version = self.version_now

    def let_go(self) -> None:
        """Of its states on the accelerator, which another place takes over."""
        self.windows, self.shown = {"step": self.windows["step"]}, {"step": self.shown["step"]}
        self.own_master = self.own_master.to("meta")

    @property
    def nbytes(self) -> int:
        """Of its states on the accelerator, without the parameter if that is its own master."""
        return sum(self.windows[name].nbytes for name in self.sections[self.in_place :])

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
        if self.in_place or self.is_section:
            return int(IN_PARAM)
        if self.decoded and self.reachable and self.index in self.decoded.apart and not self.is_written:
            return int(UNCOMPARED)
        # Of codes, what is in reach is compared in any case; but a master that was loaded may not fit it.
        unless_set = self.compares and self.is_written if self.decoded else self.unless_set
        return int(FROM_PARAM if self.is_master else UNLESS_SET if unless_set else IN_SECTION)

    @property
    def is_section(self) -> bool:
        """Of codes: is the parameter itself the section with its values, which is in no tile then?"""
        return self.decoded is not None and self.decoded.is_own(self.index)

    @property
    def compares(self) -> bool:
        """Of codes: does each step that it takes part in find by itself where somebody set the parameter?"""
        return self.decoded is not None and self.reachable

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
        right = p.dtype in ((self.kept_dtype,) if self.decoded else DTYPES)
        right = right and p.layout is torch.strided and not p.is_meta
        local = self.part.of(p) if right else p
        is_there = not self.on_accelerator or local.device == self.home
        return right and is_there and local.shape == self.own_master.shape

    def look(self, grad_dtype: torch.dtype | None) -> None:
        """Somebody wrote, moved or converted the parameter: what is it now? `grad_dtype`: the optimizer's option."""
        check_param(self.param, self.name)
        p = self.part.of(self.param)
        shape = self.own_master.shape
        if self.decoded and p.dtype is not self.kept_dtype:
            raise CSDTypeError(
                f"parameter {self.name} is {p.dtype} now; its 8-bit states were made with {self.kept_dtype}, and have "
                "its bits. Convert the model before the first step, or take state_dtype='fp32'"
            )
        if p.shape != shape or numel(p) != self.numel:
            raise CSDValueError(f"parameter {self.name} is {tuple(p.shape)} {p.dtype} now, its state {tuple(shape)}")
        if self.on_accelerator and p.device != self.home:
            raise CSDRuntimeError(
                f"parameter {self.name} is on {p.device} now, and its states are on {self.home}, where gpu: keeps "
                "them: move it back, or load its state dict into another optimizer"
            )
        fresh = self.pointer == -1
        if self.pointer != self.pointer_now:
            self.version = -1  # it counts as written until a step has come to its end
        self.pointer, self.local = self.pointer_now, p
        on_host, in_order = p.device.type == "cpu", same_order(p.stride(), self.stride, p.shape)
        half = p.dtype in (torch.float16, torch.bfloat16)
        # Of codes, source() puts it in order for a step to take, and an image has what is not in host memory.
        fp32_on_host = on_host and in_order and p.dtype is torch.float32
        self.is_master = self.reachable and (not half if self.decoded else fp32_on_host)
        self.unless_set = self.part.writes_uncounted and self.reachable and on_host and in_order and half
        reachable = on_host and in_order and p.is_contiguous() and p.dtype in DTYPE_CODES
        self.direct = p.dtype if reachable and grad_dtype in (None, p.dtype) else None
        if self.decoded and self.decoded.resident:
            self.decoded.lies_at(self.index, flat(p) if self.direct else None, fresh=fresh)
        if self.in_place:
            self.in_place = in_order and p.is_contiguous() and p.dtype is torch.float32 and p.device == self.home
            if self.in_place:
                self.set_window("master", p)
            else:  # no longer: what it was moves to the engine, with the bits that the parameter may have lost
                if self.own_master.is_meta:
                    self.own_master = torch.empty_like(self.own_master, device=self.home)
                self.set_window("master", self.own_master.copy_(self.windows["master"]))

    def fill(self, entry: Mapping[str, Any], *, seed: bool, fresh: bool = False) -> int:
        """Copies into the parameter's place what `entry` (that of `state`) has of it.

        What is missing starts as the rule has it; `fresh`: it reads as zero already. `seed`: the master too.
        Returns how many elements of exp_avg 8-bit states cannot hold.
        """
        lost = self._encode(entry, seed=seed, fresh=fresh) if self.decoded else 0
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
            elif not fresh or key in self.initial:
                first = self.initial.get(key, 0.0)
                window.fill_(complex(first, first) if window.is_complex() else first)
        # A master that came with the state may not round to the parameter: the next step compares them.
        self.version = self.version_now if "master" not in entry and not self._is_left(entry, fresh=fresh) else -1
        return lost

    def _is_left(self, entry: Mapping[str, Any], *, fresh: bool) -> bool:
        """Of codes: is the master left to the step that follows, which finds the parameter?"""
        found = self.decoded is not None and self.compares and self.param.grad is not None
        return found and fresh and not entry and not (self.decoded and self.decoded.durable)

    def _encode(self, entry: Mapping[str, Any], *, seed: bool, fresh: bool) -> int:
        """The same of codes: for the step, or the flush, that follows."""
        assert self.decoded
        states: dict[str, torch.Tensor] = {}
        dtype = torch.complex64 if self.param.is_complex() else torch.float32
        for key in self.sections:
            if isinstance(entry, DecodedEntry) and entry.has_own(key, self.decode):
                continue
            value = entry.get(key)
            if value is not None:
                value = self.part.of_state(value).detach()
            elif key == "master" and seed:
                if self._is_left(entry, fresh=fresh) or (fresh and self.is_section):
                    continue
                value = self.local
            elif key != "master" and not fresh:
                value = torch.zeros(self.own_master.shape, dtype=dtype)
            else:
                continue
            own = torch.empty_strided(self.own_master.shape, self.stride, dtype=dtype, device="cpu").copy_(value)
            states[key] = flat(own)
        if not states:
            return 0
        self.decoded.replace(self.index, states)
        held = self.decoded.states(self.index)
        return int((held["exp_avg"].abs() > MOST_RATIO * held["exp_avg_sq"].sqrt()).sum())

    def reseed(self, *, always: bool, takes_part: bool) -> None:
        """Where the parameter is not its rounded master, somebody has set it: it becomes the master there.

        Elsewhere the master keeps the bits that the parameter's precision cannot show. `always`: write it in any case.
        `takes_part`: in the step that follows.
        """
        if self.in_place or self.numel == 0:
            return
        # Who compares leaves it to the step; but a section that is the parameter has nothing to compare it with.
        loaded = self.decoded is not None and self.is_section and self.decoded.wrote_master(self.index)
        if not loaded and (self.is_section or (self.compares and takes_part)):
            return
        master = flat(self.master)
        p = flat(ordered(self.local, self.stride))
        for first in range(0, self.numel, RESEED_CHUNK):
            chunk, now = master[first : first + RESEED_CHUNK], p[first : first + RESEED_CHUNK].to(master.device)
            same = chunk.to(now.dtype) == now
            if always or not same.all():
                chunk.copy_(torch.where(same, chunk, now.float()))
        if self.decoded:
            self.decoded.is_rounded(self.index)

    def restore(self, first: int, n: int, set_to: torch.Tensor | None = None) -> None:
        """Elements [first, first + n) of the parameter get the value of their master: an undone step wrote them.

        `set_to`: somebody set the parameter to this, and it still counts as written.
        """
        p = self.local
        if self.in_place or self.is_section:  # the only master
            return
        in_order = ordered(p, self.stride)
        values = self.master if set_to is None else ordered(set_to, self.stride)
        flat(in_order)[first : first + n].copy_(flat(values)[first : first + n])
        if in_order is not p:
            p.copy_(in_order)
        if set_to is None:
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
            raise CSDTypeError(f"the gradient of {self.name} is {g.dtype}; taken are {', '.join(map(str, DTYPES))}")
        grad = flat(ordered(g.detach().resolve_conj().resolve_neg(), self.stride))
        target, back = p, None
        if not same_order(p.stride(), self.stride, p.shape):
            target = torch.empty_strided(p.shape, self.stride, dtype=p.dtype, device=p.device)
            if self.is_new or self.decoded:
                target.copy_(p)
            back = (p, target)
        source = GradSource(grad, flat(target), grad_dtype or grad.dtype, back=back)
        # Of codes the engine reads the parameter itself where it can.
        read = self.reachable and source.is_far if self.decoded else self.master_in != IN_SECTION
        source.is_read = self.is_new or read
        return source


def check_param(p: torch.Tensor, name: str) -> None:
    """Raises CSDTypeError or CSDRuntimeError for a parameter that no back end can take."""
    if p.dtype not in DTYPES:
        advice = ": states are fp32; convert the model, for example by model.float()" if p.is_floating_point() else ""
        raise CSDTypeError(
            f"csd_optim does not support {p.dtype} parameters{advice}. {name} is one, of shape {tuple(p.shape)}; "
            f"supported are {', '.join(map(str, DTYPES))}"
        )
    if p.layout is not torch.strided:
        raise CSDRuntimeError(f"csd_optim does not support {p.layout} parameters, such as {name}")
    if is_far(p) and not is_ours(p.device):
        too = f" and on {kind()}, the accelerator of this process" if kind() else "; torch has no accelerator here"
        raise CSDRuntimeError(
            f"csd_optim does not support parameters on {p.device}, such as {name}: it takes those on the CPU{too}"
        )
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
