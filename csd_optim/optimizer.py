"""CSDAdam: torch's AdamW contract on one side, an engine of devices on the other."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim import AdamW

from .adamw import hyper
from .bindings import DTYPE_CODES, FROM_PARAM, HYPER, IN_PARAM, IN_SECTION, PARAM
from .bound import Bound, check_entry, check_param, manifest, numel
from .devices import parse_devices
from .engine import SECTIONS, Engine
from .errors import CSDError, CSDRuntimeError, CSDValueError
from .images import SLOTS_PER_DEVICE, ImageRing, Source
from .signals import signals_held


@dataclass(frozen=True)
class _Plan:
    """What stays the same from step to step while the same parameters take part."""

    params: list[torch.Tensor]
    bounds: list[Bound]
    rows: np.ndarray[Any, Any]  # their rows in the table
    sections: np.ndarray[Any, Any]
    table: np.ndarray[Any, Any]  # dtype PARAM, without gradients and hyperparameters
    grad_dtype: torch.dtype | None  # the optimizer's option when this was made


class CSDAdam(AdamW):
    """AdamW whose fp32 weights and moments live on computational storage devices.

    One step, three overlapped phases, tile by tile:
        push    gradients leave for the device that owns the tile, in the parameter's precision
        update  the device reads the tile's state, applies AdamW's rule in fp32, writes the state to its other slot
        pull    the updated parameters come back

    Positional arguments, defaults and results are those of :class:`torch.optim.AdamW`; ``foreach`` and ``fused`` are
    accepted and mean nothing here, ``capturable`` and ``differentiable`` are refused.

    Args:
        params: parameters of dtype float32, float16, bfloat16 or complex64, on the CPU or a CUDA device.
        devices: one device string or several: a directory (an emulated CSD, durable), ``"file:"`` (one in a nameless
            file, gone with the process), ``"ram:"``, ``"null:"``. None reads ``CSD_OPTIM_DEVICES``, else ``"file:"``.
        grad_dtype: push gradients rounded to this dtype (float16, bfloat16 or float32) instead of their own.
        max_grad_norm: scale gradients so that their global 2-norm, in fp32, is at most this.
        overwrite: erase a store that a named directory already holds.
        tile_size: elements per tile (unit of I/O and update), rounded up to whole pages; None chooses.

    Raises:
        CSDValueError, CSDTypeError: an argument is wrong (each is also the builtin).
        CSDStoreExistsError: a directory already holds a store.
        CSDBusyError: a store is in use.
        CSDOSError: from the constructor or step(): disk full, I/O error. The step is undone.

    ``state[p]`` holds ``step``, ``exp_avg``, ``exp_avg_sq`` (``max_exp_avg_sq`` with amsgrad) and ``master``, as plain
    CPU tensors that are mapped from the devices: they cost no memory until read. Read ``optimizer.state`` again after
    a step rather than keeping a tensor from before.

    A parameter that was set from outside becomes its new master, if torch counts the change: write under
    ``torch.no_grad()``. What goes through ``p.data`` or NumPy is noticed for fp32 parameters in host memory only.

    Rule: Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; see native/include/adamw.h.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        grad_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        overwrite: bool = False,
        tile_size: int | None = None,
    ) -> None:
        if grad_dtype is not None and grad_dtype not in DTYPE_CODES:
            raise CSDValueError(f"Invalid grad_dtype: {grad_dtype}; it is one of {', '.join(map(str, DTYPE_CODES))}")
        if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise CSDValueError(f"Invalid max_grad_norm: {max_grad_norm!r}")
        if tile_size is not None and not (type(tile_size) is int and tile_size > 0):
            raise CSDValueError(f"Invalid tile_size: {tile_size!r}")
        self._unbind()
        self._options = {"overwrite": overwrite, "tile_size": tile_size}
        self.devices = devices
        self.grad_dtype = grad_dtype
        self.max_grad_norm = max_grad_norm
        specs = parse_devices(devices)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        # Declares that step() handles the loss scale itself; GradScaler then accepts fp16 gradients.
        self._step_supports_amp_scaling = True
        self._attach(Engine(specs, overwrite=overwrite, tile_elems=tile_size))

    def _unbind(self) -> None:
        self._engine: Engine | None = None
        self._ring: ImageRing | None = None
        self._bound: dict[int, Bound] = {}  # by id(param); each holds its parameter, so ids stay unique
        self._by_index: list[Bound] = []
        self._unfilled: dict[Bound, bool] = {}  # places still to be filled; do they read as zero?
        self._shown: list[Any] = []  # every value in `state`, as we left it
        self._plan: _Plan | None = None
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._in_flight = False
        # Of the last step
        self._seconds = 0.0
        self._moved = False
        self._skipped = False
        self._grad_norm: float | None = None

    def _attach(self, engine: Engine) -> None:
        self._engine = engine
        # Dropped, or forgotten at exit: closes without a word.
        self._finalizer = weakref.finalize(self, _close_quietly, engine)

    # ---- torch's contract ------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """A plain dict of plain tensors. Reading it first waits for states still on their way to a device."""
        engine = self._engine
        if self._in_flight and engine is not None and not engine.closed:
            engine.check_open()
            with engine.lock:
                engine.drain()
                self._in_flight = False
        return self._state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        k = len(self.param_groups) - 1
        group = self.param_groups[k]
        try:
            for name in ("capturable", "differentiable"):
                if group[name]:
                    raise CSDRuntimeError(
                        f"CSDAdam does not support `{name}`: its state is not on the parameter's device"
                    )
            for p in group["params"]:
                # A frozen one is none of our business: it may be quantized, or not even made yet.
                if p.requires_grad and not is_lazy(p):
                    check_param(p, self._name(p, k))
        except BaseException:
            self.param_groups.pop()
            raise

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimization step. Returns what ``closure`` returns.

        Raises CSDOSError when a device fails; parameters and state are then those before the step, and the next
        call works once the cause is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        start = time.perf_counter()
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        engine = self._engine
        assert engine is not None
        engine.check_open()
        with signals_held(), engine.lock:
            self._moved, self._grad_norm = False, None
            self._skipped = found_inf is not None and bool(found_inf.item())
            if not self._skipped:
                self._update(engine, 1.0 if scale is None else 1.0 / float(scale))
            self._seconds = time.perf_counter() - start
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads AdamW's checkpoints and ours into the devices, never cast. A missing ``master`` is the parameter."""
        assert self._engine is not None
        self._engine.check_open()
        # The base class would cast every entry to the parameter's dtype and copy it; in a box it does neither.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, d: {**d, "state": {k: _Box(v) for k, v in d["state"].items()}}
        )
        kept = self._state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            for k, group in enumerate(self.param_groups):
                for p in group["params"]:
                    check_entry(self._state.get(p) or {}, p, self._name(p, k))
        except BaseException:
            self._state, self.param_groups = kept  # refused: nothing was touched
            raise
        finally:
            handle.remove()
        with signals_held(), self._engine.lock:
            self._adopt(self._engine)

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None and self._engine.durable:
            raise CSDRuntimeError(
                "a CSDAdam on named devices cannot be copied or pickled: two optimizers would own one store. "
                "Use state_dict(), and load_state_dict() in an optimizer with devices of its own."
            )
        public = ("devices", "grad_dtype", "max_grad_norm", "_options", "_step_supports_amp_scaling")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in public}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        fresh = "_options" in state  # a copy or a pickle: __init__ has not run
        if fresh:
            self._unbind()
        if "state" in state:
            entries = state.pop("state")
            self._state = defaultdict(dict, {k: v.value if isinstance(v, _Box) else v for k, v in entries.items()})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if fresh:
            engine = Engine(parse_devices(self.devices), tile_elems=self._options["tile_size"])
            self._attach(engine)

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self._engine.specs)) if self._engine and not self._engine.closed else "closed"
        return f"{super().__repr__()} on [{devices}]"

    # ---- the step ----------------------------------------------------------------

    def _update(self, engine: Engine, grad_scale: float) -> None:
        params, grads, groups = self._members()
        if not self._state_intact():
            self._adopt(engine)
        if not params:
            return
        plan = self._plan_for(engine, params)
        if self._unfilled:
            self._fill(engine)
        # The parameters that somebody wrote, moved or converted since the last step.
        written = [b for b in plan.bounds if b.version != b.param._version or b.pointer != b.param.data_ptr()]
        if self.grad_dtype is not plan.grad_dtype:
            written = plan.bounds
        if written:
            for bound in written:
                bound.look(self.grad_dtype)
                self._show(bound)
            self._remember()
            self._plan = None
            plan = self._plan_for(engine, params)
        if self.max_grad_norm is not None:
            grad_scale *= self._clip_scale(grads, grad_scale)
        steps = np.concatenate(engine.steps)
        steps[plan.rows] += 1
        hypers, hyper_of = self._hypers(plan, groups, steps[plan.rows], grad_scale)

        table = plan.table.copy()
        table["hyper"][plan.rows] = hyper_of
        prepared: dict[int, Source] = {}  # what the engine cannot take as it stands
        pointers = []
        for bound, g in zip(plan.bounds, grads, strict=True):
            if g.dtype is bound.direct and g.numel() == bound.numel and g.is_contiguous() and not g.is_neg():
                pointers.append(g.data_ptr())
                continue
            source = prepared[bound.index] = bound.source(g, self.grad_dtype)
            pointers.append(source.grad.data_ptr())
            row = table[bound.index]
            row["param"] = source.param.data_ptr()
            row["grad_dtype"], row["param_dtype"] = DTYPE_CODES[source.grad_dtype], DTYPE_CODES[source.param.dtype]
        table["grad"][plan.rows] = np.array(pointers, np.uint64)

        # From here on something changes.
        if written and engine.keeps_state:
            engine.drain()
            for bound in written:
                bound.reseed(always=not engine.synced)
            engine.sync()
        self._run(engine, table, hypers, prepared)
        for source in prepared.values():
            if source.back:
                source.back[0].copy_(source.back[1])
        torch.autograd.graph.increment_version(params)
        for bound in plan.bounds:
            bound.version = bound.param._version
        for extent, own in zip(engine.extents, engine.steps, strict=True):
            own[:] = steps[extent.first_param : extent.first_param + len(own)]

    def _members(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
        """Parameters that take part in this step, their gradients, the indices of their groups."""
        params, grads, groups, strided = [], [], [], torch.strided
        for k, group in enumerate(self.param_groups):
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                if g.layout is not strided:
                    raise CSDRuntimeError(
                        "CSDAdam does not support sparse gradients, please consider SparseAdam instead"
                    )
                params.append(p)
                grads.append(g)
                groups.append(k)
        return params, grads, groups

    def _plan_for(self, engine: Engine, params: list[torch.Tensor]) -> _Plan:
        """What stays the same from step to step while the same parameters take part. Binds those that are new."""
        if (
            self._plan is not None
            and len(params) == len(self._plan.params)
            and all(map(is_, params, self._plan.params))
        ):
            return self._plan
        if new := [p for p in params if id(p) not in self._bound]:
            group_of = {id(p): k for k, group in enumerate(self.param_groups) for p in group["params"]}
            self._bind(engine, [(p, group_of[id(p)]) for p in new])
        bounds = [self._bound[id(p)] for p in params]
        table = np.zeros(engine.n_params, PARAM)
        for b in bounds:
            if b.direct:
                table[b.index] = (0, b.pointer, DTYPE_CODES[b.direct], DTYPE_CODES[b.param.dtype], 0, 0)
        pointers, times = np.unique([b.param.data_ptr() for b in bounds], return_counts=True)
        if (twice := pointers[(times > 1) & (pointers > 0)]).size:
            names = " and ".join(b.name for b in bounds if b.param.data_ptr() == twice[0])
            raise CSDRuntimeError(
                f"parameters {names} share their memory, and would be updated at the same time; "
                "to tie weights, let the modules share the parameter itself (b.weight = a.weight)"
            )
        rows = np.array([b.index for b in bounds])
        table["master"][rows] = [IN_PARAM if b.in_place else FROM_PARAM if b.is_master else IN_SECTION for b in bounds]
        self._plan = _Plan(params, bounds, rows, np.array([b.sections for b in bounds]), table, self.grad_dtype)
        return self._plan

    def _hypers(
        self, plan: _Plan, groups: list[int], steps: np.ndarray[Any, Any], grad_scale: float
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """This step's constants (dtype HYPER), a set per group and step count, and which of them each parameter has."""
        pairs, hyper_of = np.unique(np.array(groups) * 2.0**32 + steps, return_inverse=True)
        ks, ts = np.divmod(pairs, 2.0**32)
        hypers = np.array(
            [hyper(self.param_groups[int(k)], t, grad_scale) for k, t in zip(ks, ts.tolist(), strict=True)], HYPER
        )
        lacking = (hypers["amsgrad"][hyper_of] == 1) & (plan.sections == 3)
        if lacking.any():
            name = plan.bounds[int(lacking.argmax())].name
            raise CSDRuntimeError(
                f"amsgrad was turned on after the state of parameter {name} was made; "
                "load a state dict with max_exp_avg_sq, or turn it on before the first step"
            )
        return hypers, hyper_of

    def _clip_scale(self, grads: list[torch.Tensor], grad_scale: float) -> float:
        """What brings the gradients down to max_grad_norm; as torch.nn.utils.clip_grad_norm_, but in fp32."""
        assert self.max_grad_norm is not None
        norms = [torch.linalg.vector_norm(g, dtype=torch.complex64 if g.is_complex() else torch.float32) for g in grads]
        norm = float(torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))) * abs(grad_scale)
        self._grad_norm = norm
        return min(1.0, self.max_grad_norm / (norm + 1e-6)) if norm == norm else norm

    def _run(
        self, engine: Engine, table: np.ndarray[Any, Any], hypers: np.ndarray[Any, Any], prepared: dict[int, Source]
    ) -> None:
        """The step proper. On any failure parameters and state are put back."""
        tiles = engine.tiles_with(table["grad"] != 0)
        if not len(tiles):
            return
        travels = np.zeros(len(table), bool)
        travels[[i for i, s in prepared.items() if s.grad.is_cuda or s.grad.dtype is not s.grad_dtype]] = True
        by_image = engine.tiles_with(travels).tolist() if travels.any() else []
        ring = self._image_ring(engine, prepared) if by_image else None
        # A tile goes as a whole: what shares it with a travelling parameter travels too.
        for tile in by_image:
            for row in engine.pieces_of(tile)["param"].tolist():
                if table["grad"][row] and row not in prepared:
                    bound = self._by_index[row]
                    assert bound.param.grad is not None
                    prepared[row] = bound.source(bound.param.grad, self.grad_dtype)
        engine.begin(table, hypers, tiles)
        self._in_flight = self._moved = True
        try:
            for tile in np.setdiff1d(tiles, by_image, assume_unique=True).tolist():
                engine.push(tile)
            if ring is not None:
                ring.run(engine, by_image, prepared)
            engine.finish()
        except BaseException:
            with contextlib.suppress(CSDError):
                engine.finish(keep=False)  # a finish() that failed has undone the step already
            self._restore(engine, table["grad"] != 0)
            raise

    def _image_ring(self, engine: Engine, prepared: dict[int, Source]) -> ImageRing:
        tile_elems = max(e.tile_elems for e in engine.extents)
        pinned = any(s.grad.is_cuda for s in prepared.values())
        if self._ring is None or self._ring.tile_elems < tile_elems or pinned > self._ring.pinned:
            self._ring = ImageRing(tile_elems, SLOTS_PER_DEVICE * len(engine.specs), pinned=pinned)
        return self._ring

    def _restore(self, engine: Engine, took_part: np.ndarray[Any, Any]) -> None:
        """Gives the parameters of an undone step the values they had: those of the masters, back in their place."""
        engine.drain()  # the windows show the masters as they were
        for tile in engine.undone().tolist():
            for row, _, first, _, n in engine.pieces_of(tile).tolist():
                if took_part[row]:
                    self._by_index[row].restore(first, n)

    # ---- binding: parameters to places, `state` to windows --------------------------

    def _bind(self, engine: Engine, new: Iterable[tuple[torch.Tensor, int]]) -> None:
        """Gives parameters their place on the devices, to be filled."""
        by_sections: dict[int, list[tuple[torch.Tensor, int]]] = {}
        for p, k in new:
            check_param(p, self._name(p, k))
            if p.is_meta:
                raise CSDRuntimeError(f"parameter {self._name(p, k)} is on the meta device: it has no data yet")
            check_entry(self._state.get(p) or {}, p, self._name(p, k))
            amsgrad = self.param_groups[k]["amsgrad"] or "max_exp_avg_sq" in self._state.get(p, {})
            by_sections.setdefault(4 if amsgrad else 3, []).append((p, k))
        for sections, members in by_sections.items():
            extent = engine.extend([numel(p) for p, _ in members], sections)
            step_tensors = torch.from_numpy(engine.steps[-1])
            for i, (p, k) in enumerate(members):
                dtype = torch.complex64 if p.is_complex() else torch.float32
                stride = torch.empty_like(p, device="meta").stride()
                windows = {"step": step_tensors[i]}
                for s in (1, 2, 3, 0) if sections == 4 else (1, 2, 0):
                    windows[SECTIONS[s]] = engine.window(extent, i, s, dtype).as_strided(p.shape, stride)
                bound = Bound(
                    p,
                    self._name(p, k),
                    index=extent.first_param + i,
                    sections=sections,
                    stride=stride,
                    windows=windows,
                    own_master=windows["master"],
                    numel=numel(p),
                    in_place=engine.resident and p.dtype is torch.float32,  # in host memory, need not be kept twice
                )
                bound.look(self.grad_dtype)
                self._bound[id(p)] = bound
                self._by_index.append(bound)
                self._unfilled[bound] = True
            self._plan = None
            engine.describe(manifest(self._by_index, engine.extents, self.param_groups))

    def _fill(self, engine: Engine) -> None:
        """Copies what parameters and `state` hold to their places: again, until it is known to have got there."""
        for bound, fresh in self._unfilled.items():
            self._unfilled[bound] = False
            bound.fill(self._state.get(bound.param) or {}, seed=engine.keeps_state, fresh=fresh)
        engine.sync()
        for bound in self._unfilled:
            self._show(bound)
        self._unfilled.clear()
        self._remember()

    def _show(self, bound: Bound) -> None:
        """Puts our tensors into `state`, beside whatever else is there."""
        self._state[bound.param] = {**bound.windows, **self._state.get(bound.param, {}), **bound.windows}

    def _values(self) -> list[Any]:
        return [*chain.from_iterable(entry.values() for entry in self._state.values() if isinstance(entry, dict))]

    def _remember(self) -> None:
        self._shown = self._values()

    def _state_intact(self) -> bool:
        """Does `state` hold exactly what it held when we last looked?"""
        values = self._values()
        return len(values) == len(self._shown) and all(map(is_, values, self._shown))

    def _adopt(self, engine: Engine) -> None:
        """Takes in what somebody put into `state`: load_state_dict, ZeRO's consolidation, a plain assignment."""
        places = [(p, k) for k, group in enumerate(self.param_groups) for p in group["params"]]
        for p, k in places:
            check_entry(self._state.get(p) or {}, p, self._name(p, k))
        engine.drain()
        new = []
        for p, k in places:
            bound, held = self._bound.get(id(p)), self._state.get(p)
            if bound is not None and bound.sections == 3 and held and "max_exp_avg_sq" in held:
                self._bound.pop(id(p)).alive = False  # needs more room than it has
                bound = None
            if bound is None:
                if held:
                    new.append((p, k))
            elif not held or any(held.get(key) is not window for key, window in bound.windows.items()):
                self._unfilled[bound] = False
        if new:
            self._bind(engine, new)
        self._fill(engine)

    def _name(self, p: torch.Tensor, k: int) -> str:
        """The parameter's name where it has one, else its group and position."""
        group = self.param_groups[k]
        at = next((i for i, q in enumerate(group["params"]) if q is p), -1)
        names = group.get("param_names")
        return str(names[at]) if names else f"{k}.{at}"

    # ---- what users ask ----------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Describes the last step: waits until its last states are on their devices.

        ``push_bytes``, ``pull_bytes``: gradients and parameters over the link. ``flash_read_bytes``,
        ``flash_write_bytes``: to and from storage. ``params``: elements updated. ``skipped``: an overflow was found.
        ``grad_norm``: with max_grad_norm. ``buffer_bytes``: host memory that the engine holds, fixed.
        ``seconds``: ``step``, wall time of step(); ``read``, ``update``, ``write``: time in which at least one
        operation of that kind was going on, on the busiest device. ``devices``: the same for each.
        """
        engine = self._engine
        assert engine is not None
        engine.check_open()
        with engine.lock:
            engine.drain()
            counted = engine.stats()
        happened = int(self._moved)  # a step that was skipped, or had no gradients, never came to the engine
        devices = [
            {
                "device": d["device"],
                "backend": d["backend"],
                "direct_io": d["direct_io"],
                "push_bytes": happened * d["push_bytes"],
                "pull_bytes": happened * d["pull_bytes"],
                "flash_read_bytes": happened * d["read_bytes"],
                "flash_write_bytes": happened * d["write_bytes"],
                "params": happened * d["updated"],
                "buffer_bytes": d["buffer_bytes"],
                "seconds": {kind: happened * d[f"{kind}_seconds"] for kind in ("read", "update", "write")},
            }
            for d in counted
        ]
        counts = ("push_bytes", "pull_bytes", "flash_read_bytes", "flash_write_bytes", "params", "buffer_bytes")
        totals: dict[str, Any] = {name: sum(d[name] for d in devices) for name in counts}
        totals["buffer_bytes"] += self._ring.bytes if self._ring else 0
        seconds = {
            kind: max((d["seconds"][kind] for d in devices), default=0.0) for kind in ("read", "update", "write")
        }
        seconds["step"] = self._seconds
        totals["skipped"] = self._skipped
        if self._grad_norm is not None:
            totals["grad_norm"] = self._grad_norm
        return {**totals, "seconds": seconds, "devices": devices}

    def close(self) -> None:
        """Waits for the last states, then lets go of the devices. Raises CSDOSError if one could not be written."""
        if self._engine is not None:
            self._finalizer.detach()
            self._engine.close()

    def __enter__(self) -> CSDAdam:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Box:
    """Hides a state entry from torch's load_state_dict, which would cast it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _close_quietly(engine: Engine) -> None:
    with contextlib.suppress(CSDError):
        engine.close()
