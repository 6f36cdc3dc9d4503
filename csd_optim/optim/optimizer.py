"""CSDOptimizer: connects the contract of torch's optimizers with an engine of devices."""

from __future__ import annotations

import contextlib
import inspect
import os
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..accelerator import check_not_capturing, is_on_accelerator
from ..bindings import DTYPE_CODES
from ..checkpoint import files
from ..checkpoint import snapshot as checkpoint
from ..checkpoint import state_dict as stored
from ..compression.policy import check_topk
from ..devices.spec import DeviceSpec, parse_devices
from ..devices.units import parse_bytes
from ..devices.xclbin import kernel_for
from ..distributed.ranks import Ranks, all_ranks_or_none, ranks_of
from ..distributed.sharding import whole_of
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..errors import CSDError, CSDRuntimeError, CSDValueError, CSDWarning, users_stacklevel
from ..finalize import call_at_end, close_quietly
from ..overlap.guards.fsdp import is_fsdp1
from ..overlap.in_backward import StepsInBackward, cannot_free
from ..overlap.overlap import Overlap
from ..overlap.together import check_ranks
from ..params.decoded_entry import DecodedEntry
from ..params.groups import Groups, check_state_dtype, hyperparameters_of, members, name_of, restore_hyperparameters
from ..params.memory_warnings import COPIED, DECODED, warn_if_large
from ..params.param_state import check_param
from ..params.state_map import StateMap
from ..params.update_rule import UpdateRule
from ..serve.early import mean_of
from ..serve.trainer import address_of, served
from ..signals import defer_signals
from ..step.agreement import agree_on_step
from ..step.joining import StepHook
from ..step.live import LiveStep
from ..step.mode import InStep
from ..step.prepare import clip_scale, participants
from ..step.prepared import PreparedStep
from ..step.spec import NO_SUMS, GradOptions, Participants, Sums
from ..step.steps import Steps
from ..store.file import Mode
from ..store.format import Record
from ..store.user_state import checked_user_state
from .resume import Resume
from .stats import describe

if TYPE_CHECKING:
    from typing_extensions import Self

# The attributes that a copy or pickle takes from the optimizer, besides those that torch copies.
_PUBLIC = (
    *("devices", "grad_dtype", "topk", "error_feedback", "topk_warmup", "max_grad_norm", "user_state", "sharded"),
    "state_dtype",
    *("_options", "_step_supports_amp_scaling"),
)


class Options(TypedDict, total=False):
    """The keyword arguments that every optimizer here takes in addition to torch's: see CSDAdam."""

    devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    grad_dtype: torch.dtype | None
    topk: float | None
    error_feedback: bool
    topk_warmup: int
    max_grad_norm: float | None
    resume: bool
    overwrite: bool
    shadow: bool
    tile_size: int | None
    process_group: Any
    sharded: bool
    state_dtype: str


_Init = TypeVar("_Init", bound=Callable[..., None])


def takes_options(init: _Init) -> _Init:
    """Make inspect.signature() of an ``__init__(self, ..., **options: Unpack[Options])`` list the options by name."""
    signature, ours = inspect.signature(init), inspect.signature(CSDOptimizer.__init__).parameters
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*own, *(ours[name] for name in Options.__annotations__)]
    setattr(init, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return init


class CSDOptimizer(Optimizer, Joinable):
    """Base of all optimizers here: fp32 masters and states live on computational storage devices, for any update rule.

    A subclass names it before the torch optimizer whose hyperparameters and contract it takes over, as in
    ``class CSDSGD(CSDOptimizer, SGD)``. See CSDAdam for the arguments and methods.
    """

    param_groups: list[dict[str, Any]]
    _rule: UpdateRule
    _sparse_alternatives = "SGD, Adagrad or SparseAdam of torch.optim"  # what an error message recommends
    _step_supports_amp_scaling: bool

    def __init__(
        self,
        *of_torch: Any,
        devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        grad_dtype: torch.dtype | None = None,
        topk: float | None = None,
        error_feedback: bool = True,
        topk_warmup: int = 0,
        max_grad_norm: float | None = None,
        resume: bool = False,
        overwrite: bool = False,
        shadow: bool = True,
        tile_size: int | None = None,
        process_group: Any = None,
        sharded: bool = True,
        state_dtype: str = "fp32",
        **named_of_torch: Any,
    ) -> None:
        """`of_torch`, `named_of_torch`: the arguments of torch's optimizer."""
        if grad_dtype is not None and grad_dtype not in DTYPE_CODES:
            raise CSDValueError(f"Invalid grad_dtype: {grad_dtype}; it is one of {', '.join(map(str, DTYPE_CODES))}")
        check_topk(topk)
        if not isinstance(error_feedback, bool):
            raise CSDValueError(f"Invalid error_feedback: {error_feedback!r}; it is True or False")
        if not (type(topk_warmup) is int and topk_warmup >= 0):
            raise CSDValueError(f"Invalid topk_warmup: {topk_warmup!r}; it is a number of steps")
        if max_grad_norm is not None and not (isinstance(max_grad_norm, (int, float)) and max_grad_norm > 0):
            raise CSDValueError(f"Invalid max_grad_norm: {max_grad_norm!r}")
        if tile_size is not None and not (type(tile_size) is int and tile_size > 0):
            raise CSDValueError(f"Invalid tile_size: {tile_size!r}")
        if not isinstance(sharded, bool):
            raise CSDValueError(f"Invalid sharded: {sharded!r}; it is True or False")
        if resume and overwrite:
            raise CSDValueError("resume=True and overwrite=True exclude each other")
        check_state_dtype(state_dtype, rule=self._rule)
        self._init_attributes(ranks_of(process_group), sharded, state_dtype)
        self._options = {"tile_size": tile_size, "shadow": shadow}
        self.devices = devices
        self.grad_dtype = grad_dtype
        self.topk = topk
        self.error_feedback = error_feedback
        self.topk_warmup = topk_warmup
        self.max_grad_norm = max_grad_norm
        specs: list[DeviceSpec] = []
        if address := address_of(devices):
            self._address = address
            self.__class__ = served(type(self))  # the subclass whose states live on optimizer ranks
        else:
            specs = parse_devices(devices)
        for spec in specs:
            if spec.kind.rules is not None and self._rule.name not in spec.kind.rules:
                raise CSDValueError(
                    f"{spec} has no kernel for {self._rule.name}, the rule of this {type(self).__name__}, but for "
                    f"{', '.join(sorted(spec.kind.rules))}: take devices that the CPU updates, such as a directory"
                )
        super().__init__(*of_torch, **named_of_torch)
        if self._ranks:
            self._ranks.use_device_of(p for _, _, p in members(self.param_groups))
        # Declares that step() handles the loss scale itself; GradScaler then accepts fp16 gradients.
        self._step_supports_amp_scaling = True
        mode: Mode = "resume" if resume else "overwrite" if overwrite else "new"
        self._open(specs, self._ranks, mode)
        if resume:
            try:
                self._adopt_store()
            except BaseException:
                self.close()
                raise

    def _init_attributes(self, ranks: Ranks | None, sharded: bool, state_dtype: str) -> None:
        self._engine: Engine | None = None
        self._ranks = ranks
        self.sharded = sharded
        self.state_dtype = state_dtype
        self._state_map = StateMap(self._rule, ranks, sharded=sharded, state_dtype=state_dtype)
        self._steps = Steps(self._state_map, self._rule, ranks)
        self._resume = Resume(self._state_map, ranks)
        # Set if this is an owner's optimizer: the trainers' factor on gradients beside the loss scale; their gradients.
        self._grad_factor = 1.0
        self._sums: Sums = NO_SUMS
        self._descending = False  # the ranks exchange updated parameters of this step from the last to the first
        self._joined = False  # this rank has no more data and takes part in a step of the other ranks
        self._consolidated_hook: RemovableHandle | None = None  # puts all ranks' states into state_dict()
        Joinable.__init__(self)
        self._mode = InStep()
        # The next five describe the last step.
        self._grad_scale = 1.0
        self._step_seconds = 0.0
        self._skipped = False
        self._grad_norm: float | None = None
        self._last_start: float | None = None  # when it began
        self._initial_groups: list[dict[str, Any]] = []  # each group's hyperparameters when it was added
        self._trained_seconds = 0.0  # seconds of training, from step to step, since the store was made
        self.user_state: dict[str, Any] = {}

    def _adopt_store(self) -> None:
        engine = self._settled_engine()
        found = self._resume.adopt_store(engine, self.param_groups, self._initial_groups, self.grad_dtype)
        if found:
            record, self.user_state = found
            self._trained_seconds = record.seconds

    def _open(self, specs: Sequence[DeviceSpec], ranks: Ranks | None, mode: Mode = "new") -> None:
        kernel = kernel_for(self._rule.name, self.state_dtype)
        tile_elems, shadow = self._options["tile_size"], bool(self._options["shadow"])
        self._set_engine(
            open_engine(specs, mode=mode, tile_elems=tile_elems, shadow=shadow, ranks=ranks, kernels=[kernel])
        )

    def _set_engine(self, engine: Engine) -> None:
        self._engine = engine
        # Closes the engine silently if the optimizer is garbage-collected or still open at exit.
        self._finalizer = call_at_end(self, close_quietly, engine)

    def _settled_engine(self) -> Engine:
        """Return the engine once no step is in flight: to change states, or to save those of all ranks.

        A collective if overlap() is on. Raises CSDRuntimeError if the engine is closed or belongs to another process,
        or the error with which the step in flight failed. Call Steps.finish_undo() next.
        """
        assert self._engine is not None
        self._engine.check_open()
        self._mode.drain(collective=True)
        return self._engine

    @contextlib.contextmanager
    def _settled(self, *, meets: bool = False) -> Iterator[Engine]:
        """Yield the engine, locked, with no step in flight: no other thread can launch one. `meets`: a collective."""
        assert self._engine is not None
        engine = self._engine
        while True:
            engine.check_open()
            self._settle(meets=meets)
            with engine.lock:
                landed = engine.completed_event is None or engine.completed_event.is_set()
                if landed and not engine.is_speculative and not self._steps.undoing:  # it may fail as we wait here
                    yield engine
                    return

    def _settle(self, *, meets: bool = False) -> None:
        """Return once no step is in flight or half undone on this rank, or with `meets` on any.

        Raises CSDOSError if a step failed, CSDTornError if it cannot be undone yet.
        """
        self._mode.drain(collective=meets)
        engine = self._engine
        together = bool(meets and engine and (engine.durable or self._mode.overlaps))
        with engine.all_ranks_or_none() if engine and together else contextlib.nullcontext():
            self._steps.finish_undo(collective=together)

    # ---- torch's contract ------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """A plain dict of plain tensors. Reading it first waits for states that are still being written to a device."""
        engine = self._engine
        self._steps.finish_undo()
        if self._steps.in_flight and engine is not None and not engine.closed:
            with self._settled():
                engine.remap()
                self._steps.in_flight = False
        return self._state_map.state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self._state_map.state = value

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        k = len(self.param_groups) - 1
        group = self.param_groups[k]
        try:
            for name in ("capturable", "differentiable"):
                if group.get(name):
                    raise CSDRuntimeError(
                        f"{type(self).__name__} does not support `{name}`: its state is not on the parameter's device"
                    )
            check_topk(group.get("topk"), f" of group {k}")
            check_state_dtype(group.get("state_dtype", self.state_dtype), f" of group {k}", self._rule)
            for i, p in enumerate(group["params"]):
                # A frozen parameter is not checked: it may be quantized, or not even allocated yet.
                if p.requires_grad and not is_lazy(p):
                    check_param(p, name_of(self.param_groups, k, i))
        except BaseException:
            self.param_groups.pop()
            raise
        self._initial_groups[k:] = [hyperparameters_of(group, self._rule.hyperparameters)]

    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimization step. Returns what ``closure`` returns.

        Raises CSDOSError if a device fails; parameters and state are then those before the step, and the next call
        works once the cause is gone. Raises CSDTornError if the device fails again when the step is undone: parameters
        are then a mix, which the next call, and whatever else reads them, restores first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._ranks:
            Join.notify_join_context(self)
        self._forget_consolidated()
        start = time.perf_counter()
        self._trained_seconds += 0.0 if self._last_start is None else start - self._last_start
        self._last_start = start
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None:
            check_not_capturing([found_inf])
        assert self._engine is not None
        engine = self._engine
        engine.check_open()
        self._skipped = found_inf is not None and bool(found_inf.item())
        self._mode.before_step(skips=self._skipped, scaled=found_inf is not None or grad_scale is not None)
        with defer_signals(), self._noting_undo(), self._awaiting_params(), engine.lock:
            engine.confirm()
            self._steps.has_updated, self._grad_norm = self._mode.under_way, None
            scale = None if grad_scale is None else float(grad_scale)
            failure = self._why_undo_fails()
            if failure and not self._ranks:
                raise failure
            if self._ranks:
                agreed = agree_on_step(
                    self._ranks,
                    self._placed,
                    self.param_groups,
                    sharded=self.sharded,
                    descending=engine.descending,
                    skips=self._skipped,
                    taken=self._steps.steps_taken,
                    joined=self._joined,
                    overlaps=self._mode.overlaps,
                    scale=scale,
                    failure=failure,
                )
                self._skipped, self._descending, scale = agreed.skips, agreed.descending, agreed.scale
            if not self._skipped:
                self._update(engine, self._grad_factor if scale is None else self._grad_factor / scale)
            self._step_seconds = time.perf_counter() - start
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, as in torch. 8-bit states are decoded, which takes as much memory as fp32 states."""
        state_dict = super().state_dict()
        decoded = {k: {**entry} for k, entry in state_dict["state"].items() if isinstance(entry, DecodedEntry)}
        if not decoded:
            return state_dict
        tensors = (t for entry in decoded.values() for t in entry.values() if isinstance(t, torch.Tensor))
        warn_if_large(sum(t.nbytes for t in tensors), DECODED)
        return {**state_dict, "state": {**state_dict["state"], **decoded}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's checkpoints and ours into the devices, without casts. A missing ``master`` is the parameter.

        Raises CSDValueError, before anything is touched, if the shapes do not fit or it is of another optimizer.

        With named directories or overlap(), all ranks call it, and it is durable on all of them or on none.
        """
        engine = self._settled_engine()
        with engine.all_ranks_or_none():
            self._steps.finish_undo(collective=engine.durable)
            self._check_and_load(engine, state_dict)
        # Some trainers load the model before they construct the optimizer. Then resume has overwritten the loaded
        # parameters with the store's; those not written to since get the values of the loaded masters below.
        resumed = self._resume.unwritten() if self._resume.pending else []
        with defer_signals(), engine.lock, engine.loading(self._record(engine) if engine.durable else None):
            if engine.durable:
                self._state_map.describe(engine, self.param_groups)
            self._state_map.adopt(engine, self.param_groups, self.grad_dtype, loaded=True)
        if self._resume.pending:
            resumed = [self._state_map.param_states[id(b.param)] for b in resumed]
            self._resume.set_from_masters(engine, self.param_groups, resumed, self.grad_dtype)

    def _check_and_load(self, engine: Engine, state_dict: dict[str, Any]) -> None:
        """Put a state dict into `state` and `param_groups`; if it does not fit, nothing is changed."""
        if engine.durable:
            self._record(engine)  # raises if the record holds something that cannot be committed
        self._forget_consolidated()
        # The base class would cast every entry to the parameter's dtype and copy it; a _Box prevents both.
        handle = self.register_load_state_dict_pre_hook(
            lambda _, d: {**d, "state": {k: _Box(v) for k, v in d["state"].items()}}
        )
        kept = self._state_map.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            for k, (before, group) in enumerate(zip(kept[1], self.param_groups, strict=True)):
                if missing := [name for name in self._rule.hyperparameters if name not in group]:
                    raise CSDValueError(
                        f"the state dict is of another optimizer: its group {k} has no {missing[0]}, which "
                        f"{type(self).__name__} needs"
                    )
                if "topk" in before:  # torch's checkpoints do not have it
                    group.setdefault("topk", before["topk"])
                group.pop("state_dtype", None)  # how states are stored is the optimizer's choice, not the checkpoint's
                if "state_dtype" in before:
                    group["state_dtype"] = before["state_dtype"]
            self._state_map.check(self.param_groups)
        except BaseException:
            self._state_map.state, self.param_groups = kept  # refused: nothing was touched
            raise
        finally:
            handle.remove()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Make writes to the tensors of ``state`` inside this context go to the devices directly.

        Outside, writes stay in memory on named devices until the next step. That suits an edit, but not a whole
        checkpoint that is read into these tensors, as torch.distributed.checkpoint does::

            with optimizer.loading():
                dcp.load(state, checkpoint_id=...)

        At the end all of it is durable, or none of it. With named directories or overlap(), all ranks call it, and an
        error is raised on all of them.
        """
        engine = self._settled_engine()
        with engine.all_ranks_or_none():
            self._steps.finish_undo(collective=engine.durable)
        with engine.lock, engine.loading():
            self._state_map.fill(engine)
            with engine.writing([b.index for b in self._state_map.param_states.values()]):
                yield

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Make state_dict() of rank `to` hold the whole states of all ranks, as torch's does, until the next step().

        A collective, for torch.save() on one rank and for trainers that know it from ZeroRedundancyOptimizer. Rank `to`
        needs memory for all states, the others for the largest one. States of FSDP1 stay as they are.

        `to=None`: state_dict() of each rank has that rank's part. That is the default except with optimizer ranks under
        DDP: there, call this once, and all ranks call state_dict() together from then on.
        """
        self._forget_consolidated()
        if to is None:
            return
        whole: dict[int, dict[str, Any]] = {}
        self._settle(meets=True)
        with all_ranks_or_none(self._ranks):
            own = self.state_dict()["state"]
        for k, entry in own.items():
            for name, value in entry.items():
                value = whole_of(value) if hasattr(value, "full_tensor") else value
                if self._ranks and self._ranks.rank == to:
                    whole.setdefault(k, {})[name] = value
        if whole:
            self._show_consolidated(whole)

    def _show_consolidated(self, states: dict[int, dict[str, Any]]) -> None:
        def put(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            # Return copies: a caller may replace the keys, as torch.distributed.checkpoint does.
            return {**state_dict, "state": {k: {**entry} for k, entry in states.items()}}

        self._consolidated_hook = self.register_state_dict_post_hook(put, prepend=True)

    def _forget_consolidated(self) -> None:
        if self._consolidated_hook:
            self._consolidated_hook.remove()
            self._consolidated_hook = None

    def __getstate__(self) -> dict[str, Any]:
        if self._engine is not None and self._engine.durable:
            raise CSDRuntimeError(
                f"a {type(self).__name__} on named devices cannot be copied or pickled: two optimizers would own one "
                "store. Use state_dict(), and load_state_dict() in an optimizer with devices of its own."
            )
        if self._ranks and not self._ranks.is_world:
            raise CSDRuntimeError(
                f"a {type(self).__name__} with a process_group cannot be copied or pickled: the group cannot"
            )
        mapped = sum(w.nbytes for b in self._state_map.param_states.values() for w in b.windows.values())
        decoded = sum(4 * b.numel * len(b.sections) for b in self._state_map.coded)
        warn_if_large(mapped + decoded, COPIED)
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _PUBLIC}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        fresh = "_options" in state  # a copy or a pickle: __init__ has not run
        if fresh:
            self._init_attributes(ranks_of(None), state["sharded"], state.get("state_dtype", "fp32"))
        if "state" in state:
            entries = state.pop("state")
            self.state = defaultdict(dict, {k: v.value if isinstance(v, _Box) else v for k, v in entries.items()})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if fresh:
            specs = parse_devices(self.devices)
            # Without named directories a copy has nothing to agree on with other ranks, and they need not copy theirs.
            ranks = self._ranks if any(spec.durable for spec in specs) else None
            self._open(specs, ranks)

    def __repr__(self) -> str:
        engine = self._engine
        devices = ", ".join(map(str, engine.specs)) if engine and not engine.closed else "closed"
        return f"{super().__repr__()} on [{devices}]"

    # ---- overlap -----------------------------------------------------------------

    def overlap(
        self,
        model: torch.nn.Module | None,
        *,
        backward: bool = False,
        free_gradients: bool = False,
        hold: str | int | None = None,
    ) -> None:
        """Make step() return as soon as the devices have the gradients; parameters arrive in the order of their use.

        A module of `model` waits until the parameters that it reads have arrived, and so does code that asks a module
        or this optimizer for parameters. Every value read is the same as without overlap. docs/overlap.md says which
        uses cannot be waited for, such as a list of parameters that was made before: call wait() first. Parameters that
        are not in `model` arrive before step() returns.

        Call it once `model` is as it will be used: wrapped, compiled. None turns overlap off from the next step on.

        If a device fails, the first to wait gets the CSDOSError, once; parameters and state are those before the step.

        With `backward`, the step begins in backward, as soon as gradients are final. It speculates that no further
        gradients follow, and that learning rates, clipping and loss scale do not change. step() compares, and keeps
        the result or begins anew; nothing visible changes before. `hold`: host memory for results that are ready before
        step(), in bytes or as "1GB", the default; pinned, if there are parameters on an accelerator.

        With `free_gradients`, the step itself runs in backward: each gradient is used as soon as it is there, and its
        memory is freed. So gradients take at most `hold` ("512MB" by default) plus the largest one. Parameters change
        in backward; step() completes that, and zero_grad() undoes it. What needs all gradients at once, such as
        clipping, accumulation and a GradScaler, is not possible and raises CSDRuntimeError: see docs/overlap.md.

        Where ranks train together, all of them call it; it supports FSDP2, DTensors and sharded=False. If a step fails
        on one rank, the others go on with its result until the next step(), which raises on all, with the failed step
        undone on all.

        Parameters whose states `gpu:` keeps are updated on the accelerator's streams, and nothing waits for them.

        Raises CSDValueError if a device has no second copy of the states (`ram:`, `null:`, `shadow=False`), which
        `backward` and `free_gradients` need (the latter also with `gpu:` alone), and if `free_gradients` is not
        possible. Raises CSDRuntimeError for these two where ranks train together, and if ranks share updates.
        """
        if backward and free_gradients:
            raise CSDValueError("free_gradients=True runs the step in backward by itself: leave out backward=True")
        nbytes = parse_bytes(("512MB" if free_gradients else "1GB") if hold is None else str(hold))
        engine = self._settled_engine()
        self._steps.finish_undo()
        if engine.accelerator and engine.accelerator.alone:
            backward = False  # no gain: on the accelerator the step is queued behind backward in any case
        if model is not None and self._ranks:
            check_ranks(self.param_groups, self._state_map, backward=backward or free_gradients)
        if model is not None and (backward or free_gradients) and (engine.slots == 1 or engine.devices.resident):
            raise CSDValueError(
                f"overlap({'backward' if backward else 'free_gradients'}=True) undoes steps, which takes a second copy "
                "of the states: ram:, null:, gpu: alone and shadow=False have none"
            )
        if model is not None and free_gradients:
            self._check_free_gradients()
        pinned = backward and any(is_on_accelerator(p) for _, _, p in members(self.param_groups))
        lent = torch.empty(nbytes if backward else 0, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._mode.end()
        self._mode, engine.tile_rank = InStep(), None
        if model is not None:
            if any(map(is_fsdp1, model.modules())):
                warnings.warn(
                    "overlap() hides nothing of FSDP1's parameters, which arrive within step(): use fully_shard",
                    CSDWarning,
                    users_stacklevel(),
                )
            foresee = self._foresee if backward else None
            owner = weakref.ref(self)

            def groups() -> Groups:
                return opt.param_groups if (opt := owner()) else []

            if free_gradients:
                prepare, spans = self._prepare_in_backward, engine.model_spans
                self._mode = StepsInBackward(engine, self._steps, model, groups, prepare, nbytes, spans)
                return
            self._mode = Overlap(
                engine,
                self._steps,
                self._state_map,
                model,
                groups,
                ranks=self._ranks,
                foresee=foresee,
                hold=lent,
                spans=engine.model_spans,
            )

    def _check_free_gradients(self) -> None:
        """Raise CSDValueError if gradients cannot be freed in backward."""
        if why := cannot_free(self.param_groups, self._grad_options, self.max_grad_norm):
            raise CSDValueError(f"overlap(free_gradients=True) is not possible: {why}")

    def _reduce_bucket(self, bucket: Any) -> Any:
        """Reduce a DDP bucket for push() to the mean over the ranks, as DDP does without a hook."""
        return mean_of(self._ranks, bucket.buffer())

    def wait(self) -> None:
        """Return once all parameters of this process are those of the last step. Raises CSDOSError if it failed.

        With overlap(free_gradients=True), raises CSDRuntimeError between backward and step().
        """
        self._mode.settle()
        self._steps.finish_undo()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as in torch. A step in flight goes on; with `set_to_none=False` this first waits for it."""
        if not self._mode.clear_gradients(set_to_none=set_to_none):
            super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def _awaiting_params(self) -> Iterator[None]:
        """Wait on exit for parameters of a step launched inside for which no module would wait."""
        yield
        self._mode.wait_for_unguarded()

    @contextlib.contextmanager
    def _noting_undo(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._mode.note_undo()

    # ---- the step ----------------------------------------------------------------

    def _why_undo_fails(self) -> CSDError | None:
        """Finish the undo of an earlier step. Returns why that is not possible, None if it is. A collective."""
        try:
            self._steps.finish_undo(collective=True)
        except CSDError as e:
            return e
        return None

    @property
    def _placed(self) -> Container[int]:
        """The ids of the parameters that have taken part in a step."""
        return self._state_map.param_states

    def _update(self, engine: Engine, grad_scale: float) -> None:
        self._grad_scale = grad_scale
        if self._mode.under_way:
            return self._mode.end_step(self._record(engine) if engine.durable else None)
        with all_ranks_or_none(self._ranks):
            record = self._record(engine) if engine.durable else None
            self._resume.begin_step(engine, self.param_groups)
            taking_part = participants(self.param_groups, type(self).__name__, self._sparse_alternatives)
            self._mode.check(taking_part)
            if self.max_grad_norm is None:
                step = self._prepare(engine, taking_part, grad_scale)
        if self.max_grad_norm is not None:  # clip_scale() is a collective: call it only when no rank has raised
            scale, self._grad_norm = clip_scale(
                self.param_groups, self._state_map, grad_scale, self.max_grad_norm, self._sums
            )
            with all_ranks_or_none(self._ranks):
                step = self._prepare(engine, taking_part, grad_scale * scale)
        if self._mode.launch(step, record):
            return
        if step is not None:
            LiveStep(self._steps, engine, step, record).run(descending=self._descending)
        elif self._ranks is not None:
            self._steps.without_gradients(engine, self.param_groups, record)

    def _foresee(self) -> tuple[PreparedStep, Record | None] | None:
        """Prepare the next step, assuming that only gradients will change: see foresee(). None: not possible now."""
        engine = self._engine
        if engine is None or engine.closed or not engine.idle or self._resume.pending:
            return None
        with engine.lock:
            step = self._steps.foresee(engine, self.param_groups, self._grad_scale, self._grad_options)
            if step is None:
                return None
            return step, self._record(engine) if engine.durable else None

    def _prepare_in_backward(self) -> tuple[PreparedStep, Record | None]:
        """Prepare a step of all parameters that require gradients, before there are gradients. Raises as step().

        The parameters themselves stand in for their gradients.
        """
        engine = self._engine
        assert engine is not None
        engine.check_open()
        self._check_free_gradients()
        self._steps.finish_undo()
        engine.confirm()
        record = self._record(engine) if engine.durable else None
        self._resume.begin_step(engine, self.param_groups)
        taking_part = Participants([], [], [])
        for k, _, p in members(self.param_groups):
            if p.requires_grad:
                taking_part.params.append(p)
                taking_part.grads.append(p.detach())
                taking_part.groups_of.append(k)
        step = self._prepare(engine, taking_part, 1.0, one_by_one=True)
        assert step is not None
        return step, record

    def _prepare_early(self, taking_part: Participants) -> PreparedStep | None:
        """Prepare a step as _prepare(), for an owner, whose step begins before step() is called."""
        assert self._engine is not None
        self._grad_scale = self._grad_factor
        self._resume.begin_step(self._engine, self.param_groups)
        return self._prepare(self._engine, taking_part, self._grad_factor)

    @property
    def _grad_options(self) -> GradOptions:
        return GradOptions(self.grad_dtype, self.topk, self.topk_warmup, self.error_feedback, self._sums)

    def _prepare(
        self, engine: Engine, taking_part: Participants, grad_scale: float, *, one_by_one: bool = False
    ) -> PreparedStep | None:
        """Return a step that is ready to run; None if there is no gradient: see Steps.prepare()."""
        compare = self._mode.compare
        return self._steps.prepare(
            engine, self.param_groups, taking_part, grad_scale, self._grad_options, compare, one_by_one=one_by_one
        )

    # ---- commit and resume -------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        """The last step that is durable on all devices, to which a crash now would go back; 0 if there is none."""
        return self._engine.committed_step if self._engine else 0

    def synchronize(self) -> None:
        """Return once the last step is durable; at once without named directories. Raises CSDOSError.

        With named directories or overlap(), all ranks call it: the step is then complete and durable on all of them,
        or an error is raised on all.
        """
        with self._settled(meets=True) as engine:
            engine.wait()

    def _record(self, engine: Engine) -> Record:
        """Build the next commit's record. Raises CSDTypeError or CSDValueError if `user_state` cannot be stored."""
        return Record(
            groups=[hyperparameters_of(group, self._rule.hyperparameters) for group in self.param_groups],
            given=[*self._initial_groups],
            user_state=checked_user_state(self.user_state, engine.record.user_state),
            seconds=self._trained_seconds,
        )

    def restore(self) -> None:
        """Set parameters and hyperparameters again to the values of the step that was resumed.

        Call it after replacing parameters (some trainers do so when they move a model) or changing their values once
        the optimizer is constructed. A no-op if no store was resumed. Raises CSDRuntimeError after a step(),
        CSDStoreError if the parameters no longer fit the store.
        """
        engine = self._settled_engine()
        self._steps.finish_undo()
        with engine.lock:
            self._resume.restore(engine, self.param_groups, self.grad_dtype)

    # ---- torch.distributed.algorithms.Join -----------------------------------------------

    def join_hook(self, **_: Any) -> JoinHook:
        """Let ranks that have run out of data go on updating their share, with ``Join([ddp, optimizer])``."""
        return StepHook(self._step_of_others)

    @property
    def join_device(self) -> torch.device:
        return self._ranks.device if self._ranks else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._ranks.group if self._ranks else torch.distributed.group.WORLD

    def _step_of_others(self) -> None:
        kept = [hyperparameters_of(group) for group in self.param_groups]
        self._joined = True
        try:
            self.step()
        finally:
            self._joined = False
            for group, own in zip(self.param_groups, kept, strict=True):
                restore_hyperparameters(group, own)

    # ---- what users ask ----------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return statistics of the last step. Waits until its last states are on their devices.

        ``push_bytes``, ``pull_bytes``: gradients and parameters over the link. ``flash_read_bytes``,
        ``flash_write_bytes``: from and to storage. ``written_bytes``: states written since the stores were made.
        ``gathered_bytes``: parameters received from the ranks that have updated them.
        ``days_left``, for a device with a rating (``tbw=600TB``): days of training until the rating is used up, at
        the average write rate so far. ``params``: elements updated. ``nonfinite_grads``: gradients pushed as inf
        or nan (their elements are updated all the same). ``skipped``: an overflow was found.
        ``grad_norm``: with max_grad_norm. ``buffer_bytes``: fixed memory of the engine's buffers; a card's memory,
        where the device has one. ``residual_bytes``: memory of the Top-K residuals, beside the parameters.
        ``block_bytes``, ``depth``, for a device with a store: size of its I/O requests and queue depth. ``share``: the
        device's share of the parameters, relative to the other devices. ``huge_pages``: whether the system backs the
        device's buffers with huge pages (None: it has no buffers, or less than one huge page); without them transfers
        cost 4 to 5 times the CPU time, see /sys/kernel/mm/transparent_hugepage/enabled. ``numa_node``: the NUMA node
        of its buffers (None: any, as on machines with a single node, or where the system does not tell the drive's
        node or does not allow binding to it).
        ``seconds``: ``step``, wall time of step(); ``read``, ``update``, ``write``: time in which at least one
        operation of that kind was in flight, on the busiest device. ``devices``: the same for each device.
        ``state_bytes``, for ``gpu:``: states on the accelerator, including the copy of them while a step runs.
        ``commit_bytes``, for ``gpu:``: states copied to the host in the step, to be kept in named directories.
        ``placement``, where ``auto`` has made the store: the choice, see Placement.describe().
        ``overlap``, with overlap(): ``waited``, seconds for which the program, or backward with free_gradients, waited
        for the step; ``early_params``, elements updated before step(); ``redone``, over all steps, the number of wrong
        guesses, by the cause.
        """
        with self._settled() as engine:
            engine.wait_writes()
            counters = engine.stats()
        gather = self._steps.gather
        return describe(
            engine,
            counters,
            reached_engine=self._steps.has_updated,
            trained=self._trained_seconds,
            seconds=self._step_seconds,
            ring_bytes=self._steps.ring.bytes if self._steps.ring else 0,
            gathered_bytes=gather.received_bytes if gather else 0,
            skipped=self._skipped,
            grad_norm=self._grad_norm,
            overlap=self._mode.stats(),
            near=self._steps.near,
        )

    def save(self, path: str | os.PathLike[str], *, wait: bool = True, progress: bool = False) -> Future[Path]:
        """Make a snapshot of the named directories: `path/device-0`, `path/device-1` ..., each a store.

        All ranks call it, and each makes `path/rank-0/device-0` and so on, all of the same step.

        The snapshot holds the last step, with its hyperparameters and `user_state`, and works like the original:
        resume it or load() it. `path` must not exist; it appears as a whole, or not at all. On a file system with
        reflinks this takes no time and no space. Elsewhere the states are copied, 12 bytes per parameter; with
        wait=False training goes on meanwhile, and the step after the next waits for the copy (with shadow=False, the
        next). `progress` shows a bar on stderr.

        Returns a future of the path; with wait=True it is done. Raises CSDStoreExistsError, CSDStoreError if a state
        is damaged, CSDOSError, CSDRuntimeError if there is nothing to save; with wait=False some of these through the
        future.
        """
        with defer_signals(), self._settled(meets=True) as engine:
            engine.confirm()
            with engine.all_ranks_or_none():
                if self._state_map.unfilled or not self._state_map.intact():
                    self._state_map.adopt(engine, self.param_groups, self.grad_dtype)
                bar = files.progress_bar if progress else files.no_progress
                saving = checkpoint.save(engine, Path(path), bar, wait=wait)
        if wait:
            with engine.all_ranks_or_none():
                saving.wait()
        return saving.future

    @staticmethod
    def load(path: checkpoint.Paths) -> dict[str, Any]:
        """Return a store or snapshot as a state dict for load_state_dict(), torch's or ours, and for torch.save().

        `path`: a snapshot, the directory of a store of one device, or the list of the directories of several. Beside
        the states there is ``master``, the parameter in fp32, and an entry ``csd_optim`` with names, dtypes, step and
        ``user_state``. The tensors are memory-mapped from the files: they take memory only when written to, and as long
        as one of them is alive, no optimizer can train on that store. All data is read and checked once.

        Raises CSDStoreError if there is no store, or it is damaged or incomplete, CSDBusyError if it is in use,
        CSDOSError.
        """
        return stored.load(path)

    def close(self) -> None:
        """Wait for the last writes, then release the devices. Raises CSDOSError if a state could not be written."""
        if self._engine is not None:
            self._finalizer.detach()
            try:
                self._mode.close()
                if not self._engine.closed and self._engine.pid == os.getpid():
                    self._steps.finish_undo()
            finally:
                self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Box:
    """Hides a state entry from torch's load_state_dict, which would cast it."""

    def __init__(self, value: Any) -> None:
        self.value = value
