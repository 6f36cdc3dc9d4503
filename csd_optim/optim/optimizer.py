"""CSDOptimizer: connects the contract of torch's optimizers with an engine of devices."""

from __future__ import annotations

import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable

from ..accelerator import check_not_capturing
from ..devices.spec import DeviceSpec, count_optimizer, parse_devices
from ..distributed.ranks import Ranks, ranks_of
from ..engine.engine import Engine
from ..errors import CSDRuntimeError
from ..finalize import call_at_end, close_quietly
from ..grad_modes import no_autograd
from ..overlap.choice import choose, hold_bytes
from ..params.groups import check_state_dtype, members
from ..params.memory_warnings import COPIED, warn_if_large
from ..params.state_map import StateMap
from ..params.update_rule import UpdateRule
from ..serve.trainer.address import Owners, owners_named
from ..signals import defer_signals
from ..step.mode import InStep
from ..step.steps import Steps
from ..store.existing import Mode
from .joinable import JoinableSteps
from .kernels import check_kernels
from .loaded import Box
from .made_again import make_way, register
from .matrices import check_devices, check_matrices
from .opening import engine_for
from .options import Options, check_group, check_options, grad_dtype_of, takes_environment
from .rules import fill_in_defaults, rule_of
from .saving import warn_of_saving
from .states import StatesOnDevices
from .stats import LastStep, describe
from .torch_version import check_torch

if TYPE_CHECKING:
    from typing_extensions import Self

check_torch(torch.__version__)

# The attributes that a copy or pickle takes from the optimizer, besides torch's.
_PUBLIC = (
    *("devices", "grad_dtype", "topk", "error_feedback", "topk_warmup", "max_grad_norm", "user_state", "sharded"),
    "state_dtype",
    *("_options", "_step_supports_amp_scaling", "_warns_of_saving"),
)


_Init = TypeVar("_Init", bound=Callable[..., None])


def takes_options(init: _Init) -> _Init:
    """Make inspect.signature() of an ``__init__(self, ..., **options: Unpack[Options])`` list the options by name."""
    signature, ours = inspect.signature(init), inspect.signature(CSDOptimizer.__init__).parameters
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [*own, *(ours[name] for name in Options.__annotations__)]
    setattr(init, "__signature__", signature.replace(parameters=parameters))  # noqa: B010
    return init


class CSDOptimizer(StatesOnDevices, JoinableSteps):
    """Base of all optimizers here: fp32 masters and states live on computational storage devices, for any update rule.

    A subclass derives from this class first, then from the torch optimizer with the same hyperparameters and contract:
    ``class CSDSGD(CSDOptimizer, SGD)``. See CSDAdam for the arguments and methods.
    """

    _rule: UpdateRule
    _sparse_alternatives = "SGD, Adagrad or SparseAdam of torch.optim"  # for an error message
    _step_supports_amp_scaling: bool
    _owners: Owners | None  # the optimizer ranks, if any
    sharded: bool
    resumed_user_states: list[dict[str, Any]]

    @takes_environment
    @no_autograd()
    def __init__(
        self,
        *args: Any,
        devices: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        grad_dtype: torch.dtype | str | None = None,
        topk: float | None = None,
        error_feedback: bool = True,
        topk_warmup: int = 0,
        max_grad_norm: float | None = None,
        resume: bool = False,
        resume_from: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        overwrite: bool = False,
        tile_size: int | None = None,
        process_group: Any = None,
        sharded: bool = True,
        state_dtype: str = "fp32",
        **kwargs: Any,
    ) -> None:
        """`args`, `kwargs`: the arguments of torch's optimizer."""
        self.devices = devices
        self.grad_dtype: torch.dtype | None = grad_dtype_of(grad_dtype)
        self.topk = topk
        self.error_feedback = error_feedback
        self.topk_warmup = topk_warmup
        self.max_grad_norm = max_grad_norm
        self.sharded = sharded
        self._options = {"tile_size": tile_size}
        check_options(self, tile_size, resume=resume, resume_from=resume_from, overwrite=overwrite)
        check_state_dtype(state_dtype, rule=self._rule)
        self._init_attributes(ranks_of(process_group), sharded, state_dtype)
        specs: list[DeviceSpec] = []
        self._owners = owners_named(devices, self._ranks)
        if self._owners is None:
            specs = parse_devices(devices)
        super().__init__(*args, **kwargs)
        if self._ranks:
            self._ranks.use_device_of(p for _, _, p in members(self.param_groups))
        # Declares that step() handles the loss scale itself; GradScaler then accepts fp16 gradients.
        self._step_supports_amp_scaling = True
        mode: Mode = "resume" if resume else "overwrite" if overwrite else "new"
        way = functools.partial(make_way, self, specs, mode)
        user_states = [] if resume_from is None else self._make_stores(resume_from, specs, way)
        self._open(specs, self._ranks, mode, way)
        if resume:
            try:
                self._adopt_store()
                self.resumed_user_states = user_states or [self.user_state]
            except BaseException:
                self.close()
                raise
        register(self, specs)
        count_optimizer(devices)

    def _init_attributes(self, ranks: Ranks | None, sharded: bool, state_dtype: str) -> None:
        self._engine: Engine | None = None
        self._owners = None
        self._ranks = ranks
        self.sharded = sharded
        self.state_dtype = state_dtype
        # These two have no reference to this object, as hooks in a model hold them: see Steps.
        rule_of_group = functools.partial(rule_of, self._rule)
        self._state_map = StateMap(rule_of_group, ranks, sharded=sharded, state_dtype=state_dtype)
        self._steps = Steps(self, self._state_map, ranks, self._sparse_alternatives)
        self._joined = False  # this rank has no more data and takes part in a step of the other ranks
        self._consolidated_hook = None
        Joinable.__init__(self)
        self._mode = InStep()
        self._is_stepping = False  # within step(): no newer optimizer may replace this one
        self._last_step = LastStep()
        self.user_state: dict[str, Any] = {}
        self.resumed_user_states = [self.user_state]

    def _open(
        self,
        specs: Sequence[DeviceSpec],
        ranks: Ranks | None,
        mode: Mode = "new",
        make_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = self._steps.engine = engine_for(
            self._owners or specs,
            self.param_groups,
            self._state_map,
            mode=mode,
            tile_elems=self._options["tile_size"],
            ranks=ranks,
            make_way=make_way,
        )
        # Closes the engine silently if the optimizer is garbage-collected or still open at exit.
        self._finalizer = call_at_end(self, close_quietly, self._engine)

    # ---- torch's contract ------------------------------------------------------

    @property  # type: ignore[override]
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        if schedules := self._steps.resume.schedules:
            schedules.note_read(groups, inspect.currentframe())
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):  # else torch raises
            fill_in_defaults(self._rule, param_group, self.defaults)
        if self._engine and self._engine.replaced:
            self._engine.check_open()
        self._steps.initial_groups.of(self.param_groups)
        super().add_param_group(param_group)
        k = len(self.param_groups) - 1
        try:
            rule = self._state_map.rule_of(self.param_groups[k])
            check_group(self.param_groups, k, type(self).__name__, rule, self.state_dtype)
            if rule.orthogonal:
                check_matrices(self.param_groups, k, rule, self.topk, self._state_map.part_of, self._ranks)
                if self._engine:
                    check_devices(self._engine.devices.specs, resident=self._engine.devices.resident)
            if self._engine:
                check_kernels(self._engine.devices.specs, self.param_groups[k:], self._state_map)
        except BaseException:
            self.param_groups.pop()
            raise
        self._steps.initial_groups.of(self.param_groups)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimization step. Returns what ``closure`` returns.

        Raises CSDOSError if a device fails; parameters and state are then as before the step, and the next call works
        once the cause is gone. Raises CSDTornError if the device fails again when the step is undone: parameters are
        then a mix of old and new, until the next call, or the next read of a parameter, restores them.
        """
        self._is_stepping = True
        try:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._take_step()
        finally:
            self._is_stepping = False
        return loss

    @no_autograd()
    def _take_step(self) -> None:
        """As step(), without a closure."""
        if self._ranks:
            Join.notify_join_context(self)
        self._forget_consolidated()
        self._steps.trained_seconds += self._last_step.begin()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None:
            check_not_capturing([found_inf])
        assert self._engine is not None
        engine = self._engine
        engine.check_open()
        self._last_step.skipped = skips = found_inf is not None and bool(found_inf.item())
        failure = self._mode.before_step(scaled=found_inf is not None or grad_scale is not None)
        if failure and not self._ranks:
            raise failure
        with defer_signals(), engine.devices.interruptible(), self._mode.around_step(), engine.lock:
            self._last_step.skipped = self._steps.step(
                self._mode,
                None if grad_scale is None else float(grad_scale),
                failure,
                sharded=self.sharded,
                skips=skips,
                joined=self._joined,
                unscaled=found_inf is not None and grad_scale is None,
            )
            self._last_step.end()
        if self._warns_of_saving and self._ranks:
            self._warns_of_saving = not warn_of_saving(self._ranks, self._steps)

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
        mapped = sum(w.nbytes for state in self._state_map.param_states.values() for w in state.windows.values())
        decoded = sum(4 * state.numel * len(state.sections) for state in self._state_map.decoded)
        warn_if_large(mapped + decoded, COPIED)
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _PUBLIC}}

    @no_autograd()
    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        fresh = "_options" in state  # a copy or an unpickled optimizer, without __init__
        if fresh:
            self._init_attributes(ranks_of(None), state["sharded"], state.get("state_dtype", "fp32"))
        if "state" in state:
            entries = state.pop("state")
            self.state = defaultdict(dict, {k: v.value if isinstance(v, Box) else v for k, v in entries.items()})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if fresh:
            specs = parse_devices(self.devices)
            # Without named directories a copy needs no agreement with other ranks, which may not be copied.
            ranks = self._ranks if any(spec.durable for spec in specs) else None
            self._open(specs, ranks)

    def __repr__(self) -> str:
        engine = self._engine
        devices = ", ".join(map(str, engine.devices.named)) if engine and not engine.closed else "closed"
        return f"{super().__repr__()} on [{devices}]"

    # ---- overlap -----------------------------------------------------------------

    @no_autograd()
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

        Call this once `model` is ready for use: wrapped, compiled. None turns overlap off from the next step on.

        If a device fails, the first code that waits gets the CSDOSError, once; parameters and state are as before the
        step.

        With `backward`, the step begins in backward, as soon as gradients are final. It speculates that no further
        gradients follow, and that learning rates, clipping and loss scale do not change. step() compares, and keeps
        the result or begins anew; nothing visible changes before. `hold`: host memory for results that are ready before
        step(), in bytes or as "1GB", the default; pinned, if there are parameters on an accelerator.

        With `free_gradients`, the step itself runs in backward: each gradient is used as soon as it is ready, and its
        memory is freed. So gradients take at most `hold` ("512MB" by default) plus the largest gradient. Parameters
        change in backward; step() completes the step, and zero_grad() undoes it. Anything that needs all gradients at
        once, such as clipping, accumulation and a GradScaler, is not possible and raises CSDRuntimeError: see
        docs/overlap.md.

        If ranks train together, all call this. If a step fails on one rank, other ranks go on with the step's result
        until the next step(), which undoes the failed step and raises, on all ranks. Steps begun in backward are kept
        or undone on each rank independently.

        Parameters whose states `gpu:` keeps are updated on the accelerator's streams, and nothing waits for them.

        Raises CSDValueError if a device has no second copy of the states (`ram:`, `null:`), which `backward` and
        `free_gradients` need (the latter also with `gpu:` alone), and if `free_gradients` is not possible. Raises
        CSDRuntimeError with DistributedDataParallel for `free_gradients`, and for `backward` without csd_optim.push.
        """
        nbytes = hold_bytes(hold, backward=backward, free_gradients=free_gradients)
        engine = self._settled_engine()
        self._steps.finish_undo()
        make = choose(self._steps, model, nbytes, backward=backward, free_gradients=free_gradients)
        self._mode.close()
        self._mode, engine.tile_rank = InStep(), None
        self._mode = make()

    def _reduce_bucket(self, bucket: Any) -> Any:
        """Reduce a DDP bucket for push(): this rank gets its rows of the mean gradients."""
        if self._engine is not None and self._engine.replaced:  # else a newer optimizer would get some of the gradients
            self._engine.check_open()
        return self._steps.reduce_bucket(bucket)

    def wait(self) -> None:
        """Return once all parameters of this process are up to date with the last step. Raises CSDOSError if it failed.

        With overlap(free_gradients=True), raises CSDRuntimeError between backward and step().
        """
        if self._engine is not None and self._engine.replaced:
            self._engine.check_open()
        self._mode.settle()
        self._steps.finish_undo()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as in torch. With `set_to_none=False`, first waits for a step in flight."""
        self._steps.reduced.clear()
        if not self._mode.clear_gradients(set_to_none=set_to_none):
            super().zero_grad(set_to_none)

    # ---- what users ask ----------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return statistics of the last step. Waits until its last states are on their devices.

        ``push_bytes``, ``pull_bytes``: gradients and parameters over the link. ``flash_read_bytes``,
        ``flash_write_bytes``: from and to storage. ``written_bytes``: states written since the stores were made.
        ``free_bytes``, for each device: space in its store left by parameters that are no longer in the optimizer, to
        be reused by new parameters. ``gathered_bytes``: updated parameters received from other ranks.
        ``days_left``, for a device with a rating (``tbw=600TB``): days of training until the rating is used up, at the
        average write rate so far. ``params``: elements updated. ``nonfinite_grads``: gradients pushed as inf or nan
        (their elements are updated all the same). ``skipped``: an overflow was found. ``grad_norm``: with
        max_grad_norm. ``buffer_bytes``: fixed memory of the engine's buffers; a card's memory, where the device has
        one. ``residual_bytes``: memory of the Top-K residuals, beside the parameters. ``block_bytes``, ``depth``, for a
        device with a store: size of its I/O requests and queue depth. ``share``: the device's share of the parameters,
        relative to the other devices. ``huge_pages``: whether the system backs the device's buffers with huge pages
        (None: it has no buffers, or less than one huge page); without them transfers cost 4 to 5 times the CPU time,
        see /sys/kernel/mm/transparent_hugepage/enabled. ``numa_node``: the NUMA node of the device's buffers (None:
        any, as on machines with a single node, or if the system does not tell the drive's node or does not allow
        binding). ``seconds``: ``step``, wall time of step(); ``read``, ``update``, ``write``: time in which at least
        one operation of that kind was in flight, on the busiest device. ``devices``: the same for each device.
        ``state_bytes``, for ``gpu:``: states on the accelerator, including their copy during a step. ``commit_bytes``,
        for ``gpu:``: states copied to the host in the step, for named directories. ``kernels``, for ``gpu:``: by
        accelerator, what updates there and whether it has the CPU's bits. ``placement``, where ``auto`` has
        made the store: the choice, see Placement.describe(). ``overlap``, with overlap(): ``waited``, seconds for which
        the program, or backward with free_gradients, waited for the step; ``early_params``, elements updated before
        step(); ``redone``, over all steps, the number of wrong guesses, by the cause. ``energy``: ``machine_joules``
        used by the processors and the memory of this machine, for all programs together (RAPL, without drives and
        GPUs): in the last ``step``, in all ``steps``, and in the ``training``, from the first step() to the end of the
        last, forward and backward included. None if there are no counters, or only root may read them: see ``problem``.
        ``domains``: the counters that were added up. Ranks on one machine see the same joules.
        """
        with self._settled() as engine:
            engine.native.wait_writes()
            counters = engine.committer.stats()
        return describe(self._steps, counters, self._last_step, overlap=self._mode.stats())

    @no_autograd()
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
