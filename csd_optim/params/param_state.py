"""One parameter and its place on the devices: the present parameter, its states, and how a step accesses both."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..accelerator import accelerator_type, is_accelerator, is_on_accelerator
from ..bindings import DTYPE_CODES, IN_SECTION
from ..distributed.sharding import UNSHARDED, Partition
from ..engine.accelerator_codes import ParamCodes
from ..engine.accelerator_copies import AcceleratorCopy
from ..engine.decoded_states import DecodedStates
from ..errors import CSDRuntimeError, CSDTypeError, CSDValueError
from ..grad_modes import no_autograd
from .decoded_entry import DecodedEntry
from .grad_source import GradSource
from .reach import Reach
from .strides import flat, numel, ordered, same_order

DTYPES = (*DTYPE_CODES, torch.complex64)
# Elements that reseed() processes at a time, to limit temporary memory.
RESEED_CHUNK = 1 << 22
CPU = torch.device("cpu")
MOST_RATIO = 15.5  # the largest ratio of exp_avg to the root of exp_avg_sq that 8-bit states can hold


@dataclass(eq=False)
class ParamState:
    """A parameter with a place (tiles' elements for its states) on the devices, or the part that this process updates.

    Here "elements" means the elements of that part. "With codes": the devices keep the states as 8-bit codes.
    "Decoded": the states have no windows, and are read on demand, as with codes. `reach` is what a write to the
    parameter from outside may change, and only refresh() replaces it; the StateMap writes `is_new` and `alive`.
    """

    param: torch.Tensor
    part: Partition
    name: str
    index: int  # over all extents; the row in the step's table
    sections: tuple[str, ...]  # names of its states
    rule: str  # name of the update rule of the states
    stride: tuple[int, ...]  # of the states, as in torch.zeros_like(param)
    windows: dict[str, torch.Tensor]  # the states; master may be the parameter itself. Decoded: only step, residual
    shown: dict[str, torch.Tensor]  # the windows, as `state` shows them
    own_master: torch.Tensor  # storage of the master unless in_place; on meta if decoded, or not allocated yet
    numel: int  # number of fp32 values; a complex number counts as two
    reach: Reach  # what the devices can access of `param` as it is now
    reachable: bool  # the devices can read the master from the parameter
    images_only: bool = False  # the devices access neither parameter nor gradient: both travel as images
    state_device: torch.device = CPU  # where the states are: the host (the devices' windows), or the accelerator
    accelerator_copy: AcceleratorCopy | None = None  # of its states, in addition to the devices'
    decoded: DecodedStates | None = None  # access to decoded states; None: states have windows
    codes: ParamCodes | None = None  # its states, if they are codes on the accelerator alone
    kept_dtype: torch.dtype | None = None  # with codes: the parameter's dtype, on which codes depend
    is_new: bool = False  # no states yet: the step in flight starts from the parameter
    alive: bool = True  # False: the parameter has moved to another place
    initial: Mapping[str, float] = field(default_factory=dict)  # initial values of states, where not zero
    version: int = -1  # of `param` when it last agreed with the master, to notice writes; -1: counts as written
    _entry: weakref.ref[DecodedEntry] | None = None  # of the last entry()

    @property
    def local(self) -> torch.Tensor:
        """The part of the parameter at the last refresh()."""
        return self.reach.local

    @property
    def in_place(self) -> bool:
        """Whether the parameter is its own only master; `windows["master"]` is then an alias of the parameter."""
        return self.reach.in_place

    @property
    def master_source(self) -> int:
        """Where a step finds the master unless Truth.master_of() knows better: a csd_master."""
        return self.reach.master_source

    @property
    def residual(self) -> torch.Tensor | None:
        """The unsent rest of the gradients (see policy.py): bfloat16, on the parameter's device, strides of the states.

        None: the parameter has no residual.
        """
        return self.windows.get("residual")

    @property
    def is_coded(self) -> bool:
        """Whether the devices keep its states as codes."""
        return self.kept_dtype is not None

    @property
    def on_accelerator(self) -> bool:
        """Whether the states are torch tensors on the accelerator, and not on the devices."""
        return self.state_device != CPU

    @property
    def master(self) -> torch.Tensor:
        """The master's current value, in the shape of the part."""
        return self._view(self.decoded.state(self.index, "master")) if self.decoded else self.windows["master"]

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Free states decoded inside at exit: for loops over all parameters, whose states would fill the memory."""
        was_decoded = self.decoded is None or self.index in self.decoded.in_memory
        try:
            yield
        finally:
            if self.decoded and not was_decoded:
                self.decoded.forget_unwritten([self.index])

    def _view(self, state: torch.Tensor) -> torch.Tensor:
        values = torch.view_as_complex(state.view(-1, 2)) if self.param.is_complex() else state
        return values.as_strided(self.own_master.shape, self.stride)

    @no_autograd()
    def decode(self) -> dict[str, torch.Tensor]:
        """Return the decoded states as `state` shows them, by name: the same dict until they change.

        Raises CSDRuntimeError if the parameter has left.
        """
        if self.decoded is None:
            raise CSDRuntimeError(f"{self.name} has left the optimizer, and its states were freed")
        return self.decoded.views(self.index, lambda state: self.part.show(self._view(state)))

    def entry(self, others: Mapping[str, Any]) -> DecodedEntry:
        """Return the entry in `state` of decoded states. `others`: the program's own values, to keep in the entry."""
        entry = DecodedEntry(("step", *self.sections[1:], self.sections[0]), self.decode)
        entry.set_plain({**others, **self.shown})
        self._entry = weakref.ref(entry)
        return entry

    def shown_entry(self) -> DecodedEntry | None:
        """Return the last entry() if the program still holds it."""
        return self._entry() if self._entry else None

    def shown_windows(self) -> list[torch.Tensor]:
        """Return the tensors of windows that `state` shows: no tensors on the accelerator, nor the parameter itself."""
        keys = () if self.on_accelerator or self.decoded else self.sections[self.in_place :]
        return [self.shown[key] for key in keys if key in self.shown]

    def is_shown_by(self, entry: Mapping[str, Any]) -> bool:
        """Return whether this entry of `state` holds exactly our tensors: none was replaced."""
        shown = isinstance(entry, DecodedEntry) and entry.all_decoded_by(self.decode) if self.decoded else True
        return shown and all(entry.get(key) is self.shown.get(key) for key in {*self.shown, "residual"})

    def set_window(self, key: str, window: torch.Tensor) -> None:
        if self.windows.get(key) is not window:
            self.windows[key], self.shown[key] = window, self.part.show(window)

    def drop_window(self, key: str) -> None:
        del self.windows[key], self.shown[key]

    def mark_synced(self) -> None:
        """Declare that parameter and master agree. Any later write to the parameter comes from outside."""
        self.version = self.version_now

    def leave(self) -> None:
        """Drop everything that takes memory: the parameter has left. Only the manifest's facts about its place stay."""
        self.param = torch.empty(self.own_master.shape, dtype=self.param.dtype, device="meta")
        self.part, self.alive, self.windows, self.shown = UNSHARDED, False, {}, {}
        self.decoded = self.codes = None
        self.own_master = self.own_master.to("meta")
        self.reach = replace(self.reach, local=self.own_master)

    @property
    def nbytes(self) -> int:
        """Bytes of the states on the accelerator, without the parameter if it is its own master."""
        tensors = (self.windows[name] for name in self.sections[self.in_place :])
        return self.codes.nbytes if self.codes else sum(tensor.nbytes for tensor in tensors)

    def move_to(self, p: torch.Tensor, part: Partition) -> None:
        """Give the place to `p`, which has replaced the present parameter in the model. Call `refresh()` next."""
        self.param, self.part = p, part
        self.shown = {k: w if k == "step" else part.show(w) for k, w in self.windows.items()}

    @property
    def is_dirty(self) -> bool:
        """Whether the parameter was written, moved or converted from outside since mark_synced(), or may have been."""
        part, param, reach = self.part, self.param, self.reach  # each step asks this about each parameter
        if self.version != part.version(param) or reach.pointer != part.pointer(param):
            return True
        # torch does not count writes (see grad_modes.py), and no step notices them.
        return param.is_inference() and reach.master_source == IN_SECTION and not self.is_compared

    @property
    def is_section(self) -> bool:
        """With codes: whether the parameter itself serves as its master section, so that the tile has none."""
        return self.decoded is not None and self.decoded.is_own_master(self.index)

    @property
    def is_compared(self) -> bool:
        """With codes: whether each step with this parameter detects elements that were set from outside."""
        return self.is_coded and self.reachable

    @property
    def version_now(self) -> int:
        """Torch's count of writes to the parameter."""
        return self.part.version(self.param)

    @property
    def pointer_now(self) -> int:
        return self.part.pointer(self.param)

    def fits(self) -> bool:
        """Return whether the parameter's dtype, layout, device and shape still fit its states."""
        p = self.param
        right = p.dtype in ((self.kept_dtype,) if self.is_coded else DTYPES)
        right = right and p.layout is torch.strided and not p.is_meta
        local = self.part.of(p) if right else p
        is_on_state_device = not self.on_accelerator or local.device == self.state_device
        return right and is_on_state_device and local.shape == self.own_master.shape

    def refresh(self, grad_dtype: torch.dtype | None) -> None:
        """Examine the parameter again after it was written, moved or converted. `grad_dtype`: the optimizer's option.

        Raises CSDTypeError, CSDValueError or CSDRuntimeError if the states no longer fit the parameter.
        """
        self._check_fits()
        before, now = self.reach, Reach.of(self, grad_dtype)
        if now.pointer != before.pointer:
            self.version = -1  # counts as written until a step is complete
        if self.is_coded and self.decoded:
            in_place = flat(now.local) if now.direct_dtype else None
            in_order = partial(_in_order, now.local, self.stride)
            self.decoded.relocate(self.index, in_place, in_order, fresh=before.pointer == -1)
        if now.in_place:
            self.set_window("master", now.local)
        elif before.in_place:  # move the master, which may have more bits, to its own storage
            if self.own_master.is_meta:
                self.own_master = torch.empty_like(self.own_master, device=self.state_device)
            self.set_window("master", self.own_master.copy_(self.windows["master"]))
        self.reach = now

    def _check_fits(self) -> None:
        """Raise what refresh() raises. See also fits()."""
        check_param(self.param, self.name)
        p, shape = self.part.of(self.param), self.own_master.shape
        if self.is_coded and p.dtype is not self.kept_dtype:
            raise CSDTypeError(
                f"parameter {self.name} is {p.dtype} now; its 8-bit states were made with {self.kept_dtype}, and have "
                "its bits. Convert the model before the first step, or take state_dtype='fp32'"
            )
        if p.shape != shape or numel(p) != self.numel:
            raise CSDValueError(f"parameter {self.name} is {tuple(p.shape)} {p.dtype} now, its state {tuple(shape)}")
        if self.on_accelerator and p.device != self.state_device:
            raise CSDRuntimeError(
                f"parameter {self.name} is on {p.device} now, and its states are on {self.state_device}, where gpu: "
                "keeps them: move it back, or load its state dict into another optimizer"
            )

    def fill(self, entry: Mapping[str, Any], *, seed: bool, fresh: bool = False) -> int:
        """Copy the states in `entry` (the parameter's in `state`) into the parameter's place.

        Missing states get the rule's initial values. `fresh`: the place already reads as zero. `seed`: set a missing
        master to the parameter. Returns the number of elements of exp_avg that are too large for 8-bit states.
        """
        clipped = self._encode(entry, seed=seed, fresh=fresh) if self.decoded else 0
        for key, window in self.windows.items():
            value = entry.get(key)
            if value is self.shown[key] or (key == "master" and self.in_place):
                continue
            if value is not None and key == "step":
                window.fill_(float(value))  # a number, or a one-element tensor of any shape
            elif value is not None:
                window.copy_(self.part.of_state(value))
            elif key == "master":
                if seed:
                    window.copy_(self.local)
            elif not fresh or key in self.initial:
                first = self.initial.get(key, 0.0)
                window.fill_(complex(first, first) if window.is_complex() else first)
        # A loaded master need not round to the parameter: the next step compares the two.
        self.version = self.version_now if "master" not in entry else -1
        return clipped

    def _encode(self, entry: Mapping[str, Any], *, seed: bool, fresh: bool) -> int:
        """Fill the place as fill() does, for decoded states: the next step or flush writes them."""
        assert self.decoded
        states: dict[str, torch.Tensor] = {}
        dtype = torch.complex64 if self.param.is_complex() else torch.float32
        for key in self.sections:
            if isinstance(entry, DecodedEntry) and entry.is_decoded_by(key, self.decode):
                continue
            value = entry.get(key)
            if value is not None:
                value = self.part.of_state(value).detach()
            elif key == "master" and seed:
                if fresh and self.is_section:
                    continue
                value = self.local
            elif key != "master" and (not fresh or key in self.initial):
                first = self.initial.get(key, 0.0)
                filling = complex(first, first) if self.param.is_complex() else first
                value = torch.full(self.own_master.shape, filling, dtype=dtype, device="cpu")
            else:
                continue
            own = torch.empty_strided(self.own_master.shape, self.stride, dtype=dtype, device="cpu").copy_(value)
            states[key] = flat(own)
        if not states:
            return 0
        self.decoded.replace(self.index, states)
        if not self.is_coded or states.keys().isdisjoint(("exp_avg", "exp_avg_sq")):
            return 0
        decoded = self.decoded.states(self.index)
        return int((decoded["exp_avg"].abs() > MOST_RATIO * decoded["exp_avg_sq"].sqrt()).sum())

    def reseed(self, *, always: bool, takes_part: bool) -> None:
        """Set the master to the parameter wherever it was set from outside, that is, is not the rounded master.

        Elsewhere the master keeps the bits that the parameter's precision cannot hold. `always`: write the master even
        if nothing differs. `takes_part`: the parameter takes part in the next step.
        """
        if self.in_place or self.numel == 0:
            return
        # A step that compares does this itself. But a parameter that is its own section cannot be compared in the step,
        # so a written master (`loaded`) has to be handled here.
        loaded = self.decoded is not None and self.is_section and self.decoded.is_master_written(self.index)
        if not loaded and (self.is_section or (self.is_compared and takes_part)):
            return
        master = flat(self.master)
        p = flat(ordered(self.local, self.stride))
        for first in range(0, self.numel, RESEED_CHUNK):
            chunk, now = master[first : first + RESEED_CHUNK], p[first : first + RESEED_CHUNK].to(master.device)
            same = chunk.to(now.dtype) == now
            if always or not same.all():
                chunk.copy_(torch.where(same, chunk, self._beside(chunk, now)))
        if self.decoded:
            self.decoded.note_rounded(self.index)

    def _beside(self, master: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return the new masters of elements where the parameter is not the rounded master.

        In general these are the parameters. But 8-bit codes written without the parameter store a master just above a
        tie as 127/256 of the last place above the lower number, although it rounds to the upper one: such a master
        becomes 129/256. Where devices can access parameters, the step does this; see adopt_user_params() in
        device_cpu.cpp.
        """
        exact = param.float()
        if not self.is_coded or self.reachable or param.dtype is torch.float32:
            return exact
        above = master + (exact - master) * (2 / 129)
        return torch.where(above.to(param.dtype) == param, above, exact)

    def restore(self, first: int, values: torch.Tensor, *, is_outside: bool) -> None:
        """Undo a step's changes: set elements from `first` on, in the order of the states, to `values` (1-D).

        `values`: masters; or, with `is_outside`, values set by the program, which still count as written.
        """
        p = self.part.of(self.param)  # not `local`: the parameter may have new memory since the step
        in_order = ordered(p, self.stride)
        flat(in_order)[first : first + len(values)].copy_(values)
        if in_order is not p:
            p.copy_(in_order)
        if not is_outside:
            self.mark_synced()

    def set_from_master(self, grad_dtype: torch.dtype | None) -> None:
        """Set the parameter to the value of its master. `grad_dtype`: see refresh()."""
        with no_autograd(), self.decoding():
            self.part.of(self.param).copy_(self.master)
        self.refresh(grad_dtype)
        self.mark_synced()

    def source(self, g: torch.Tensor, grad_dtype: torch.dtype | None) -> GradSource:
        """Return gradient and parameter as flat arrays in the order of the states: views where possible, else copies.

        `g`: the gradient of the part.
        """
        p = self.local
        if g.shape != p.shape:
            raise CSDValueError(
                f"the gradient of {self.name} has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}"
            )
        if g.dtype not in DTYPES:
            raise CSDTypeError(f"the gradient of {self.name} is {g.dtype}; taken are {', '.join(map(str, DTYPES))}")
        grad = flat(ordered(g.detach().resolve_conj().resolve_neg(), self.stride))
        target, param_and_copy = p, None
        if not same_order(p.stride(), self.stride, p.shape):
            target = torch.empty_strided(p.shape, self.stride, dtype=p.dtype, device=p.device)
            if self.is_new or self.is_coded or self.images_only:  # Watcher.param_arrives() gets pieces of images
                target.copy_(p)
            param_and_copy = (p, target)
        dtype = grad_dtype or grad.dtype
        source = GradSource(grad, flat(target), dtype, self.images_only, param_and_copy=param_and_copy)
        if self.is_coded:  # the engine reads the parameter in place if it can
            source.param_is_read = self.is_new or (self.reachable and source.is_far)
        else:
            source.param_is_read = self.is_new or self.master_source != IN_SECTION
        return source


def _in_order(local: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    return flat(ordered(local.detach(), stride))


def check_param(p: torch.Tensor, name: str) -> None:
    """Raise CSDTypeError or CSDRuntimeError for a parameter that no back end can take."""
    if p.dtype not in DTYPES:
        advice = ": states are fp32; convert the model, for example by model.float()" if p.is_floating_point() else ""
        raise CSDTypeError(
            f"csd_optim does not support {p.dtype} parameters{advice}. {name} is one, of shape {tuple(p.shape)}; "
            f"supported are {', '.join(map(str, DTYPES))}"
        )
    if p.layout is not torch.strided:
        raise CSDRuntimeError(f"csd_optim does not support {p.layout} parameters, such as {name}")
    if is_on_accelerator(p) and not is_accelerator(p.device):
        own = accelerator_type()
        too = f" and on {own}, the accelerator of this process" if own else "; torch has no accelerator here"
        raise CSDRuntimeError(
            f"csd_optim does not support parameters on {p.device}, such as {name}: it takes those on the CPU{too}"
        )
    if any(s == 0 and n > 1 for s, n in zip(p.stride(), p.shape, strict=True)):
        raise CSDRuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            f"Please clone() the parameter {name}."
        )


def check_entry(entry: Mapping[str, Any], p: torch.Tensor, name: str, sections: Sequence[str]) -> None:
    """Raise CSDValueError if an entry of `state` does not fit its parameter. `sections`: names of the states."""
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
            what = "is not possible: gradients of complex parameters are sent dense, without a residual"
        else:
            continue
        raise CSDValueError(f"state {key!r} of parameter {name} {what}")


def left_behind(entry: Mapping[str, Any], p: torch.Tensor, sections: Sequence[str]) -> list[str]:
    """Return which of our own states ("master", "residual") in an entry of `state` have another shape than `p`.

    Code that resizes a parameter resizes the states of torch's optimizer, and moves the entry to the new parameter with
    a `master` and `residual` that the code does not know. If torch's states fit the new shape, these two are out of
    date.
    """
    of_torch = [entry[key] for key in sections if key != "master" and entry.get(key) is not None]
    if not of_torch or any(getattr(state, "shape", None) != p.shape for state in of_torch):
        return []
    own = (key for key in ("master", "residual") if isinstance(entry.get(key), torch.Tensor))
    return [key for key in own if entry[key].shape != p.shape]
