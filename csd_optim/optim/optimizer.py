"""CSDOptimizer: the contract of torch's optimizers on one side, an engine of devices on the other."""

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

from ..accelerator import check_not_capturing, is_far
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
from ..errors import CSDRuntimeError, CSDValueError, CSDWarning, users_stacklevel
from ..finalize import close_quietly
from ..overlap.fsdp import is_fsdp1
from ..overlap.in_backward import StepsInBackward, cannot_free
from ..overlap.overlap import Overlap
from ..overlap.together import check_ranks
from ..params.decoded_entry import DecodedEntry
from ..params.groups import Groups, check_state_dtype, members, name_of, plain, put_back
from ..params.memory_warnings import COPIED, DECODED, warn_if_large
from ..params.param_state import check_param
from ..params.state_map import StateMap
from ..params.update_rule import UpdateRule
from ..serve.early import mean_of
from ..serve.trainer import address_of, served
from ..signals import defer_signals
from ..step.agreement import agree_on_step
from ..step.joining import StepHook
from ..step.mode import InStep
from ..step.prepare import (
    NO_SUMS,
    GradOptions,
    Participants,
    PreparedStep,
    StepPlan,
    Sums,
    add_residuals,
    apply_outside_writes,
    bind,
    clip_scale,
    foresee,
    participants,
    prepare,
)
from ..step.run import StepRunner
from ..store.file import Mode
from ..store.format import Record
from ..store.user_state import checked_user_state
from .resume import Resume
from .stats import describe

if TYPE_CHECKING:
    from typing_extensions import Self

# What a copy has of the optimizer besides what torch knows of.
_PUBLIC = (
    *("devices", "grad_dtype", "topk", "error_feedback", "topk_warmup", "max_grad_norm", "user_state", "sharded"),
    "state_dtype",
    *("_options", "_step_supports_amp_scaling"),
)


class Options(TypedDict, total=False):
    """What every optimizer here takes besides the arguments of torch's: see CSDAdam."""

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
    """Of an optimizer's ``__init__(self, ..., **options: Unpack[Options])``: its signature names them."""
    signature, ours = inspect.signature(init), inspect.signature(CSDOptimizer.__init__).parameters
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*own, *(ours[name] for name in Options.__annotations__)]
    setattr(init, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return init


class CSDOptimizer(Optimizer, Joinable):
    """An optimizer of torch's whose fp32 masters and states live on computational storage devices, whatever its rule.

    To be put before the optimizer whose hyperparameters and contract it has, as in
    ``class CSDSGD(CSDOptimizer, SGD)``. See CSDAdam for what the arguments and methods do.
    """

    param_groups: list[dict[str, Any]]
    _rule: UpdateRule
    _for_sparse = "SGD, Adagrad or SparseAdam of torch.optim"  # whom a message recommends
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
        self._unbind(ranks_of(process_group), sharded, state_dtype)
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
            self.__class__ = served(type(self))  # from here on, what it takes to have the states elsewhere
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

    def _unbind(self, ranks: Ranks | None, sharded: bool, state_dtype: str) -> None:
        self._engine: Engine | None = None
        self._ranks = ranks
        self.sharded = sharded
        self.state_dtype = state_dtype
        self._state_map = StateMap(self._rule, ranks, sharded=sharded, state_dtype=state_dtype)
        self._runner = StepRunner(self._state_map, ranks)
        self._resume = Resume(self._state_map, ranks)
        # Where this is the optimizer of an owner: a factor of trainers, beside the loss scale, and their gradients.
        self._grad_factor = 1.0
        self._sums: Sums = NO_SUMS
        self._descending = False  # what the ranks share of the step under way goes from the last to the first
        self._joined = False  # taking a step of the others: this rank has no more data
        self._consolidated: RemovableHandle | None = None  # of the hook that gives state_dict() everybody's states
        Joinable.__init__(self)
        self._plan: StepPlan | None = None
        self._mode = InStep()
        # Of the last step
        self._grad_scale = 1.0
        self._seconds = 0.0
        self._skipped = False
        self._grad_norm: float | None = None
        self._started: float | None = None  # when
        self._initial_groups: list[dict[str, Any]] = []  # hyperparameters of the groups when they were made
        self._trained = 0.0  # seconds of training, from step to step, since the store was made
        self.user_state: dict[str, Any] = {}

    def _adopt_store(self) -> None:
        engine = self._live_engine
        found = self._resume.adopt_store(engine, self.param_groups, self._initial_groups, self.grad_dtype)
        if found:
            record, self.user_state = found
            self._trained = record.seconds

    def _open(self, specs: Sequence[DeviceSpec], ranks: Ranks | None, mode: Mode = "new") -> None:
        kernel = kernel_for(self._rule.name, self.state_dtype)
        tile_elems, shadow = self._options["tile_size"], bool(self._options["shadow"])
        self._attach(open_engine(specs, mode=mode, tile_elems=tile_elems, shadow=shadow, ranks=ranks, kernels=[kernel]))

    def _attach(self, engine: Engine) -> None:
        self._engine = engine
        # Dropped, or forgotten at exit: closes without a word.
        self._finalizer = weakref.finalize(self, close_quietly, engine)

    @property
    def _live_engine(self) -> Engine:
        """With no step under way: with overlap a collective, for what changes states or keeps those of all ranks.

        Raises CSDRuntimeError if it is closed, or another process's; the step's failure.
        """
        assert self._engine is not None
        self._engine.check_open()
        self._settle(meets=True)
        return self._engine

    @contextlib.contextmanager
    def _settled(self, *, meets: bool = False) -> Iterator[Engine]:
        """The same with its lock, so that no other thread launches a step. `meets`: a collective."""
        assert self._engine is not None
        engine = self._engine
        while True:
            engine.check_open()
            self._settle(meets=meets)
            with engine.lock:
                if not engine.guessed and (engine.landing is None or engine.landing.is_set()):
                    yield engine
                    return

    def _settle(self, *, meets: bool = False) -> None:
        """Returns when no step is under way here; with `meets` on any rank. Raises CSDOSError if it failed."""
        self._mode.come_to_rest(meets=meets)

    # ---- torch's contract ------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """A plain dict of plain tensors. Reading it first waits for states still on their way to a device."""
        engine = self._engine
        if self._runner.in_flight and engine is not None and not engine.closed:
            with self._settled():
                engine.remap()
                self._runner.in_flight = False
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
                # A frozen one is none of our business: it may be quantized, or not even made yet.
                if p.requires_grad and not is_lazy(p):
                    check_param(p, name_of(self.param_groups, k, i))
        except BaseException:
            self.param_groups.pop()
            raise
        self._initial_groups[k:] = [plain(group, self._rule.hyperparameters)]

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
        if self._ranks:
            Join.notify_join_context(self)
        self._forget_consolidated()
        start = time.perf_counter()
        self._trained += 0.0 if self._started is None else start - self._started
        self._started = start
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None:
            check_not_capturing([found_inf])
        assert self._engine is not None
        engine = self._engine
        engine.check_open()
        self._skipped = found_inf is not None and bool(found_inf.item())
        self._mode.before_step(skips=self._skipped, scaled=found_inf is not None or grad_scale is not None)
        with defer_signals(), self._arriving(), engine.lock:
            engine.confirm()
            self._runner.moved, self._grad_norm = self._mode.under_way, None
            scale = None if grad_scale is None else float(grad_scale)
            if self._ranks:
                agreed = agree_on_step(
                    self._ranks,
                    self._placed,
                    self.param_groups,
                    sharded=self.sharded,
                    descending=engine.descending,
                    skips=self._skipped,
                    taken=self._runner.taken,
                    joined=self._joined,
                    overlaps=self._mode.overlaps,
                    scale=scale,
                )
                self._skipped, self._descending, scale = agreed.skips, agreed.descending, agreed.scale
            if not self._skipped:
                self._update(engine, self._grad_factor if scale is None else self._grad_factor / scale)
            self._seconds = time.perf_counter() - start
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's. States that are kept as codes are decoded, which takes as much memory as they do in fp32."""
        state_dict = super().state_dict()
        decoded = {k: {**entry} for k, entry in state_dict["state"].items() if isinstance(entry, DecodedEntry)}
        if not decoded:
            return state_dict
        tensors = (t for entry in decoded.values() for t in entry.values() if isinstance(t, torch.Tensor))
        warn_if_large(sum(t.nbytes for t in tensors), DECODED)
        return {**state_dict, "state": {**state_dict["state"], **decoded}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads torch's checkpoints and ours into the devices, never cast. A missing ``master`` is the parameter.

        Raises CSDValueError, with nothing touched, if it does not fit: other shapes, or of another optimizer.

        Of ranks with named directories, or with overlap(), all call it, and it is durable on all of them or on none.
        """
        engine = self._live_engine
        with engine.all_ranks_or_none():
            self._check_and_take(engine, state_dict)
        # Some trainers load the model first and make the optimizer then, and resume put the store's values there.
        resumed = self._resume.unwritten() if self._resume.pending else []
        with defer_signals(), engine.lock, engine.loading(self._record(engine) if engine.durable else None):
            if engine.durable:
                self._state_map.describe(engine, self.param_groups)
            self._state_map.adopt(engine, self.param_groups, self.grad_dtype, loaded=True)
        if self._resume.pending:
            resumed = [self._state_map.param_states[id(b.param)] for b in resumed]
            self._resume.give_values(engine, self.param_groups, resumed, self.grad_dtype)

    def _check_and_take(self, engine: Engine, state_dict: dict[str, Any]) -> None:
        """Puts a state dict into `state` and `param_groups`, if it fits; nothing is changed otherwise."""
        if engine.durable:
            self._record(engine)  # raises if there is something that it could not commit
        self._forget_consolidated()
        # The base class would cast every entry to the parameter's dtype and copy it; in a box it does neither.
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
                group.pop("state_dtype", None)  # how states are kept goes with the optimizer, not with the checkpoint
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
        """What is written to the tensors of ``state`` within goes to the devices.

        On named devices it would stay in memory until the next step: right for an edit, too much for a checkpoint that
        is read into them, as torch.distributed.checkpoint does::

            with optimizer.loading():
                dcp.load(state, checkpoint_id=...)

        Durable at the end, as a whole or not at all. Of ranks with named directories, or with overlap(), all call it,
        and it raises on all.
        """
        engine = self._live_engine
        with engine.lock, engine.loading():
            self._state_map.fill(engine)
            with engine.writing([b.index for b in self._state_map.param_states.values()]):
                yield

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Until the next step(), state_dict() of rank `to` has the states of all ranks: whole, as torch's has them.

        A collective, for torch.save() on one rank and for trainers that know it from ZeroRedundancyOptimizer. That
        rank needs memory for all of the states, the others for the largest one. Changes nothing of FSDP1's.

        `to=None`: state_dict() of each rank has its own part. Only with optimizer ranks it has to be asked for that,
        once, under DDP: there all ranks call state_dict() from then on.
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
            # Whoever asks for it may put other keys there: torch.distributed.checkpoint does.
            return {**state_dict, "state": {k: {**entry} for k, entry in states.items()}}

        self._consolidated = self.register_state_dict_post_hook(put, prepend=True)

    def _forget_consolidated(self) -> None:
        if self._consolidated:
            self._consolidated.remove()
            self._consolidated = None

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
            self._unbind(ranks_of(None), state["sharded"], state.get("state_dtype", "fp32"))
        if "state" in state:
            entries = state.pop("state")
            self.state = defaultdict(dict, {k: v.value if isinstance(v, _Box) else v for k, v in entries.items()})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if fresh:
            specs = parse_devices(self.devices)
            # Nameless, a copy has nothing to agree on with the other ranks, which need not make one.
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
        """From now on step() returns when all is handed over, and parameters arrive in the order of their next use.

        Whoever reads a parameter of `model` that has not arrived waits for it: its modules do, and so does whoever asks
        them, or this optimizer, for parameters. Every value that is read is the one that it would be without; see
        docs/overlap.md for what cannot be waited for, such as a list of parameters that was made before: call wait()
        then. Parameters that `model` does not have arrive before step() returns.

        To be called when `model` is as it will be used: wrapped, compiled. None: as without, from the next step on.

        If a device fails, the first who waits raises CSDOSError, once; parameters and state are those before the step.

        With `backward` a step begins in backward, as soon as gradients are final: a guess that no more of them come,
        and that learning rates, clipping and loss scale stay as they were. step() compares, and keeps it or begins
        anew; nothing changes before. `hold`: host memory for what is ready before step(), such as "1GB", the default,
        or in bytes; of parameters on an accelerator it is pinned.

        With `free_gradients` the step itself runs in backward: each gradient is used when it is there, and its memory
        is free again. So gradients take `hold` at most, "512MB" unless given, and the largest one. Parameters change in
        backward; step() ends that, and zero_grad() undoes it. What takes all gradients at once cannot be had, such as
        clipping, accumulation and a GradScaler, and raises CSDRuntimeError: see docs/overlap.md.

        Where ranks train together all of them call it, for FSDP2, DTensors or sharded=False. If a step fails on one of
        them, the others use what it made until the next step(), which raises on all, with that step undone on all.

        What `gpu:` has is updated on the accelerator's streams, for which nobody waits.

        Raises CSDValueError if a device has no second copy of the states (`ram:`, `null:`, `shadow=False`), which
        `backward` and `free_gradients` need (this one also with `gpu:` alone); and for what `free_gradients` cannot do.
        CSDRuntimeError for these two where ranks train together, or if they share updates.
        """
        if backward and free_gradients:
            raise CSDValueError("free_gradients=True runs the step in backward by itself: leave out backward=True")
        nbytes = parse_bytes(("512MB" if free_gradients else "1GB") if hold is None else str(hold))
        engine = self._live_engine
        if engine.accelerator and engine.accelerator.alone:
            backward = False  # a step is only queued there, behind backward
        if model is not None and self._ranks:
            check_ranks(self.param_groups, self._state_map, backward=backward or free_gradients)
        if model is not None and (backward or free_gradients) and (engine.slots == 1 or engine.devices.resident):
            raise CSDValueError(
                f"overlap({'backward' if backward else 'free_gradients'}=True) undoes steps, which takes a second copy "
                "of the states: ram:, null:, gpu: alone and shadow=False have none"
            )
        if model is not None and free_gradients:
            self._check_freeing()
        pinned = backward and any(is_far(p) for _, _, p in members(self.param_groups))
        lent = torch.empty(nbytes if backward else 0, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._mode.end()
        self._mode, engine.rank = InStep(), None
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
                self._mode = StepsInBackward(engine, self._runner, model, groups, prepare, nbytes, spans)
                return
            self._mode = Overlap(
                engine,
                self._runner,
                self._state_map,
                model,
                groups,
                ranks=self._ranks,
                foresee=foresee,
                hold=lent,
                spans=engine.model_spans,
            )

    def _check_freeing(self) -> None:
        """Raises CSDValueError if gradients cannot be freed in backward."""
        if why := cannot_free(self.param_groups, self._grad_options, self.max_grad_norm):
            raise CSDValueError(f"overlap(free_gradients=True) is not possible: {why}")

    def _take_bucket(self, bucket: Any) -> Any:
        """What push() does with a bucket of DDP's: the mean over the ranks, as without it."""
        return mean_of(self._ranks, bucket.buffer())

    def wait(self) -> None:
        """Returns when all parameters of this process are those of the last step. Raises CSDOSError if that failed.

        With overlap(free_gradients=True) CSDRuntimeError between backward and step().
        """
        self._mode.settle()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. A step under way goes on, unless gradients are to become zeros: then it has landed first."""
        if not self._mode.clears(set_to_none=set_to_none):
            super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def _arriving(self) -> Iterator[None]:
        """What is launched within, and nobody waits for, has arrived at the end."""
        yield
        self._mode.arrive_at_once()

    # ---- the step ----------------------------------------------------------------

    @property
    def _placed(self) -> Container[int]:
        """The ids of parameters that have taken part in a step."""
        return self._state_map.param_states

    def _update(self, engine: Engine, grad_scale: float) -> None:
        self._grad_scale = grad_scale
        if self._mode.under_way:
            return self._mode.end_step(self._record(engine) if engine.durable else None)
        with all_ranks_or_none(self._ranks):
            record = self._record(engine) if engine.durable else None
            self._resume.begin_step(engine, self.param_groups)
            taking_part = participants(self.param_groups, type(self).__name__, self._for_sparse)
            self._mode.check(taking_part)
            if self.max_grad_norm is None:
                step = self._prepare(engine, taking_part, grad_scale)
        if self.max_grad_norm is not None:  # a collective: not where a rank may have raised
            scale, self._grad_norm = clip_scale(
                self.param_groups, self._state_map, grad_scale, self.max_grad_norm, self._sums
            )
            with all_ranks_or_none(self._ranks):
                step = self._prepare(engine, taking_part, grad_scale * scale)
        if self._mode.launch(step, record):
            return
        if step is not None:
            self._runner.run(engine, step, record, descending=self._descending)
        elif self._ranks is not None:
            self._runner.run_without_gradients(engine, self.param_groups, record)

    def _foresee(self) -> tuple[PreparedStep, Record | None] | None:
        """The step that would follow if nothing changed but gradients: see foresee(). None: there cannot be one now."""
        engine, plan = self._engine, self._plan
        if engine is None or engine.closed or not engine.idle or plan is None or self._resume.pending:
            return None
        with engine.lock:
            options = self._grad_options
            step = foresee(engine, self._rule, self._state_map, plan, self.param_groups, self._grad_scale, options)
            if step is None:
                return None
            self._runner.make_ready(engine, step)
            if not len(step.not_given):  # the accelerator updates all of it
                return None
            return step, self._record(engine) if engine.durable else None

    def _prepare_in_backward(self) -> tuple[PreparedStep, Record | None]:
        """A step of all parameters that require gradients, and stand for them here. Raises as step() does."""
        engine = self._engine
        assert engine is not None
        engine.check_open()
        self._check_freeing()
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
        """The step of an owner, which begins before step() is called; as _prepare()."""
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
        """A step that is ready to run; None: there is no gradient. `one_by_one`: what has them only stands for them."""
        bound = bind(engine, self._state_map, self.param_groups, taking_part, self.grad_dtype, self._plan)
        if bound is None:
            return None
        self._plan = bound.plan
        step = prepare(engine, self._rule, bound, self.param_groups, grad_scale, self._grad_options)
        self._mode.compare(step)
        add_residuals(engine, self._state_map, step)
        apply_outside_writes(engine, step)
        self._runner.make_ready(engine, step)
        self._runner.make_near_ready(engine, step, one_by_one=one_by_one)
        return step

    # ---- commit and resume -------------------------------------------------------------

    @property
    def committed_step(self) -> int:
        """The last step that is durable on all devices, where a crash now would go back to; 0 if none is."""
        return self._engine.committed_step if self._engine else 0

    def synchronize(self) -> None:
        """Returns when the last step is durable; without named directories at once. Raises CSDOSError.

        Of ranks with named directories, or with overlap(), all call it: then the step is made, and durable, on all of
        them, or it raises on all.
        """
        with self._settled(meets=True) as engine:
            engine.wait()

    def _record(self, engine: Engine) -> Record:
        """What the next commit carries. Raises CSDTypeError, CSDValueError if `user_state` cannot be kept."""
        return Record(
            groups=[plain(group, self._rule.hyperparameters) for group in self.param_groups],
            given=[*self._initial_groups],
            user_state=checked_user_state(self.user_state, engine.record.user_state),
            seconds=self._trained,
        )

    def restore(self) -> None:
        """Gives parameters and hyperparameters once more the values of the step that was resumed.

        For whoever exchanges parameters after constructing the optimizer (some trainers do, when they move a model),
        or sets them. Without a resumed store nothing happens. Raises CSDRuntimeError after a step(), CSDStoreError if
        the parameters are no longer those of the store.
        """
        engine = self._live_engine
        with engine.lock:
            self._resume.restore(engine, self.param_groups, self.grad_dtype)

    # ---- torch.distributed.algorithms.Join -----------------------------------------------

    def join_hook(self, **_: Any) -> JoinHook:
        """With ``Join([ddp, optimizer])``, ranks that have run out of data go on to update their share."""
        return StepHook(self._step_of_others)

    @property
    def join_device(self) -> torch.device:
        return self._ranks.device if self._ranks else torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._ranks.group if self._ranks else torch.distributed.group.WORLD

    def _step_of_others(self) -> None:
        kept = [plain(group) for group in self.param_groups]
        self._joined = True
        try:
            self.step()
        finally:
            self._joined = False
            for group, own in zip(self.param_groups, kept, strict=True):
                put_back(group, own)

    # ---- what users ask ----------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Describes the last step: waits until its last states are on their devices.

        ``push_bytes``, ``pull_bytes``: gradients and parameters over the link. ``flash_read_bytes``,
        ``flash_write_bytes``: to and from storage. ``written_bytes``: states written since the stores were made.
        ``gathered_bytes``: parameters from the ranks that have updated them.
        ``days_left``, of a device with a rating (``tbw=600TB``): of training until that is used up, at the rate at
        which it was written so far. ``params``: elements updated. ``nonfinite_grads``: gradients pushed as inf
        or nan (their elements are updated all the same). ``skipped``: an overflow was found.
        ``grad_norm``: with max_grad_norm. ``buffer_bytes``: memory that the engine holds, fixed; a card's, if it has.
        ``residual_bytes``: memory, beside the parameters, of what Top-K owes them.
        ``block_bytes``, ``depth``, of a device with a store: size of its I/O requests, and how many are in flight at
        once. ``share``: of the parameters, relative to the other devices. ``huge_pages``: whether the system gave them
        to a device's buffers (None: it has none, or less than such a page); without, transfers cost 4 to 5 times the
        CPU time, see /sys/kernel/mm/transparent_hugepage/enabled. ``numa_node``: that its buffers come from (None: any;
        so it is where the machine has one only, or the system does not tell which is the drive's, or allows it).
        ``seconds``: ``step``, wall time of step(); ``read``, ``update``, ``write``: time in which at least one
        operation of that kind was going on, on the busiest device. ``devices``: the same for each.
        ``state_bytes``, of ``gpu:``: of states on the accelerator, and of the copy of them while a step runs.
        ``commit_bytes``, likewise: of states that went to the host in the step, for named directories to keep.
        ``placement``, where ``auto`` has made the store: what was chosen, see Placement.describe().
        ``overlap``, with overlap(): ``waited``, seconds that others waited for the step, or that backward did, with
        free_gradients; ``early_params``, elements updated before step(); ``redone``, of all steps, guesses that were
        wrong, by what was not as guessed.
        """
        with self._settled() as engine:
            engine.wait_writes()
            counted = engine.stats()
        gather = self._plan.gather if self._plan else None
        return describe(
            engine,
            counted,
            happened=self._runner.moved,
            trained=self._trained,
            seconds=self._seconds,
            ring_bytes=self._runner.ring.bytes if self._runner.ring else 0,
            gathered_bytes=gather.received_bytes if gather else 0,
            skipped=self._skipped,
            grad_norm=self._grad_norm,
            overlap=self._mode.stats(),
            near=self._runner.near,
        )

    def save(self, path: str | os.PathLike[str], *, wait: bool = True, progress: bool = False) -> Future[Path]:
        """Makes a snapshot of what is in named directories: `path/device-0`, `path/device-1` ..., each a store.

        Of ranks all call it, and each makes `path/rank-0/device-0` and so on, all of the same step.

        It holds the last step, with its hyperparameters and `user_state`, and works like the original: resume it,
        load() it. `path` must not exist; it is there as a whole, or not at all. Where the file system has
        reflinks that takes no time and no space. Elsewhere the states are copied, 12 bytes per parameter, and with
        wait=False training goes on meanwhile: the step after the next waits for the copy (with shadow=False, the
        next). `progress` shows a bar on stderr.

        Returns a future of the path; with wait=True it is done. Raises CSDStoreExistsError, CSDStoreError if a state
        is damaged, CSDOSError, CSDRuntimeError if there is nothing to save: with wait=False some of these through the
        future.
        """
        with defer_signals(), self._settled(meets=True) as engine:
            engine.confirm()
            with engine.all_ranks_or_none():
                if self._state_map.unfilled or not self._state_map.intact():
                    self._state_map.adopt(engine, self.param_groups, self.grad_dtype)
                bar = files.bar if progress else files.no_bar
                saving = checkpoint.save(engine, Path(path), bar, wait=wait)
        if wait:
            with engine.all_ranks_or_none():
                saving.wait()
        return saving.future

    @staticmethod
    def load(path: checkpoint.Paths) -> dict[str, Any]:
        """A store or snapshot as torch's state dict, for load_state_dict() here and there, and for torch.save().

        `path`: a snapshot, the directory of a store of one device, or the list of the directories of several. Beside
        its states there is ``master``, the parameter in fp32, and an entry ``csd_optim`` with names, dtypes, step
        and ``user_state``. The tensors are mapped from the files: they take memory when written to only, and as long
        as one of them is alive nobody may train on that store. Everything is read and checked once.

        Raises CSDStoreError if it is none, damaged or incomplete, CSDBusyError if it is in use, CSDOSError.
        """
        return stored.load(path)

    def close(self) -> None:
        """Waits for the last states, then lets go of the devices. Raises CSDOSError if one could not be written."""
        if self._engine is not None:
            self._finalizer.detach()
            try:
                self._mode.close()
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
