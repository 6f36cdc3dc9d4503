"""The optimizer of a trainer whose states are with optimizer ranks: `devices="serve://host:port"`."""

from __future__ import annotations

import functools
import json
import math
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.join import JoinHook

from .. import settings
from ..accelerator import is_on_accelerator, record_event
from ..devices.spec import DeviceSpec, fill_in
from ..distributed.grad_norm import global_norm
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..distributed.sharding import is_replicated
from ..engine.engine import Engine
from ..errors import CSDError, CSDRankError, CSDRuntimeError, CSDStoreError, CSDTypeError, CSDValueError
from ..params.groups import hyperparameters_of, restore_hyperparameters
from ..params.param_state import DTYPES, check_param
from ..step.prepare import clip_to, participants
from ..step.spec import Participants
from ..store.file import Mode
from .answers import check_open_reply, grad_norm_in, reading
from .blocks import Part, ViewOf, send_buckets
from .early import EarlyPushes, all_finite, mark_overflow, mean_of
from .flow import GUESS_FIELDS
from .model import TrainerParam, views
from .remote import RemoteEngine
from .request import Request, process_name
from .star import Entries, Selection, Source
from .states import StatesElsewhere
from .values import packed, unpacked
from .wire import LONG_TIMEOUT, SCHEME, USER_STATE_BYTES, Address, Session, parse_address

OTHER_RANKS = (
    "FSDP1 pads its flat parameters for a number of ranks: use the same number as before, or one with the same padded "
    "sizes; with use_orig_params=True nothing is padded"
)
DIFFERENT_FORMATS = (
    "trainers send gradients in different ways: grad_dtype and topk are the same on all of them, and with ?route=star "
    "the loss scale (docs/optimizer-ranks.md)"
)


def address_of(devices: Any, ranks: Ranks | None) -> Address | None:
    """Return the owners' address if `devices` (or CSD_OPTIM_DEVICES, if it is None) names one. Raises CSDValueError.

    Several with protocol 4 are divided among the ranks.
    """
    named = settings.devices() if devices is None else [devices] if isinstance(devices, str) else devices
    if not isinstance(named, (list, tuple)):
        return None
    served = [fill_in(d.strip()) for d in named if isinstance(d, str) and d.strip().lower().startswith(SCHEME)]
    addresses = [*map(parse_address, served)]
    if 1 < len(addresses) == len(named) and all(address.protocol == 4 for address in addresses):
        rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
        if size < len(addresses):
            raise CSDValueError(
                f"Invalid devices: {len(addresses)} optimizer ranks and {size} trainer{'s' * (size > 1)}; each trainer "
                "has its states with one of them"
            )
        return addresses[rank % len(addresses)]
    if served and len(named) > 1:
        raise CSDValueError(f"Invalid devices: {served[0]!r} stands for all devices, so it is the only one")
    return addresses[0] if addresses else None


@functools.cache
def served(kind: type[Any]) -> type[Any]:
    """Return the subclass of an optimizer class that keeps its states with owners, under the same name."""
    return type(kind.__name__, (_Trainer, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


class _Trainer(StatesElsewhere):
    """Mixin before an optimizer's class, see served(). step() is CSDOptimizer's; this class replaces `_update`."""

    # ---- construction ------------------------------------------------------------------

    def _open(self, specs: Sequence[DeviceSpec], ranks: Ranks | None, mode: Mode = "new") -> None:
        self._check_topk()
        if ranks and not self.sharded:
            raise CSDValueError("Invalid sharded: False; to optimizer ranks (serve://) each trainer pushes its share")
        self._reset_model()
        self._reset_states()
        self._hyper_sent = self._user_states_sent = ""  # as sent last, JSON
        self._resumed = False  # resumed, and no step was made since
        self._route = "kept"  # of the last step
        self._guessed_message: dict[str, Any] | None = None  # the guess of the next step's message, if one is possible
        self._backwards = 0  # number of backwards up to the last step
        self._selection: Selection | None = None  # Top-K
        self._unreduced: list[torch.Tensor] = []  # gradients of the current backward that Top-K selects from
        self._last_traffic = (0, 0, 0)  # in the last step: elements updated, bytes pushed, bytes gathered
        self._exchange_shard_sizes()
        with all_ranks_or_none(ranks):
            request = self._request(mode)
        if ranks:
            checksum = zlib.crc32(json.dumps({**request.message(), "who": ""}).encode())
            if len({*ranks.gather(checksum)}) > 1:
                raise CSDRankError("trainers do not have the same parameters, hyperparameters and options")
        engine: RemoteEngine | None = None
        try:
            engine = RemoteEngine(self._address, ranks, request)
            self._register_params()
            reply = engine.call({"op": "open"}, blocks=self._blocks(0), timeout=LONG_TIMEOUT)
            check_open_reply(reply, len(self.param_groups), len(self._known))
        except BaseException as e:
            if engine:
                engine.abandon()
            if self._flat and isinstance(e, CSDStoreError):
                raise CSDStoreError(f"{e}. {OTHER_RANKS}") from e
            raise
        self._groups_sent = len(self.param_groups)
        self._open_reply = reply
        if self._is_star:
            self._selection = Selection(engine.owners)
        self._set_engine(engine)

    def _request(self, mode: Mode) -> Request:
        ours = (c for c in type(self).__mro__ if c.__module__.startswith("csd_optim") and c.__name__.startswith("CSD"))
        kind = next(ours).__name__
        return Request(
            kind,
            hyperparameters_of(self.defaults),
            {"state_dtype": self.state_dtype, **self._options},
            mode,
            self._ranks.size if self._ranks else 1,
            process_name(),
            tuple(self._describe_group(k) for k in range(len(self.param_groups))),
        )

    def _check_topk(self) -> None:
        """Raise CSDValueError if Top-K is requested on a route other than star."""
        shares = [self.topk, *(group.get("topk") for group in self.param_groups)]
        if not self._is_star and shares != [None] * len(shares):
            raise CSDValueError(
                "Invalid topk: optimizer ranks (serve://) take sparse gradients only with ?route=star "
                "(docs/optimizer-ranks.md)"
            )

    def _adopt_store(self) -> None:
        reply = self._open_reply
        if not reply["recovered"]:
            return
        with reading("hyperparameters"):
            for group, kept in zip(self.param_groups, reply["groups"], strict=True):
                restore_hyperparameters(group, kept)
        states = unpacked(reply["user_states"]) or [{}]
        rank, size = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
        self.user_state = states[rank] if len(states) == size else states[0]
        for known, steps in zip(self._known.values(), reply["steps"], strict=True):
            known.steps = float(steps)
        self._resumed = True
        self._pull()

    def restore(self) -> None:
        engine = self._settled_engine()
        if self._resumed:
            with engine.lock:
                self._register_params()
                for group, kept in zip(self.param_groups, self._open_reply["groups"], strict=False):
                    restore_hyperparameters(group, kept)
                self._pull()
        elif self._open_reply["recovered"]:
            raise CSDRuntimeError("restore() goes before the first step()")

    def _pull(self) -> None:
        """Set parameters to the owners' values, except those on the meta device."""
        params = [known for known in self._known.values() if known.steps and not known.param.is_meta]
        if params:
            self._pull_values(params)
        self._show([known for known in self._known.values() if known.steps])

    def _pull_values(self, params: Sequence[TrainerParam]) -> None:
        self._remote.call({"op": "pull", "params": [known.index for known in params]}, timeout=LONG_TIMEOUT)
        self._receive(params, self._remote.fetch)

    # ---- a step --------------------------------------------------------------------------

    @property
    def _placed(self) -> Any:
        return {key for key, known in self._known.items() if known.version != -1}

    def _update(self, engine: Engine, grad_scale: float) -> None:
        remote = self._remote
        with all_ranks_or_none(self._ranks) as exchanged:
            self._check_topk()
            for group in self.param_groups:
                self._rule.check(group, grad_scale)
            self._register_params()
            taking_part = participants(self.param_groups, type(self).__name__, self._sparse_alternatives)
            grads = self._grads(taking_part)
            pushed = self._pushed_backwards(taking_part)
            selected = self._select(taking_part, grads, pushed, grad_scale)
            user_state = packed(self.user_state)
            hyper = [hyperparameters_of(group, self._rule.hyperparameters) for group in self.param_groups]
            written = [known.index for known in self._dirty_params(grads)]
            exchanged.own = (pushed, written, user_state, self._grad_formats(grads, selected, grad_scale))
        differ = "trainers have gradients of different parameters, or not all have pushed the same"
        pushed = self._agreed([of_rank for of_rank, *_ in exchanged.by_ranks], differ)
        self._agreed([of_rank for *_, of_rank in exchanged.by_ranks], DIFFERENT_FORMATS)
        written = sorted({index for _, of_rank, *_ in exchanged.by_ranks for index in of_rank})
        user_states = [of_rank for _, _, of_rank, _ in exchanged.by_ranks]
        params = [known for known in self._known.values() if known.index in pushed]
        if self.max_grad_norm is not None and not self._is_star:
            norm = self._norm(params, pushed) * abs(grad_scale)
            grad_scale, self._steps.grad_norm = grad_scale * clip_to(norm, self.max_grad_norm), norm
            self._rule.check(self.param_groups[0], grad_scale)  # raises on all trainers alike
        if not params:
            return
        if len(self.param_groups) > self._groups_sent:
            self._send_new_groups()
        hyper_now, states_now = json.dumps(hyper), json.dumps(user_states)
        if len(states_now) > USER_STATE_BYTES:  # raised on all trainers alike, before anything is sent
            raise CSDValueError(
                f"user_state of all trainers has {len(states_now)} bytes as JSON; {USER_STATE_BYTES} are the limit"
            )
        # The order in which parameters travel: roughly that in which backward produces gradients. Scalars, which every
        # owner keeps, come last.
        params.sort(key=lambda known: (not known.shape, -known.index))
        parts = [known.as_part(self._wire_dtype(known)) for known in params]
        tensors = {k.index: (grads[k.index], k.block) for k in params if k.index in grads}
        message = {
            "op": "step",
            "scale": grad_scale,
            "params": [known.index for known in params],
            "dtypes": [str(self._wire_dtype(known)).removeprefix("torch.") for known in params],
            "pushed": [pushed[known.index] for known in params],
            "backwards": remote.early.backwards if remote.early else 0,
            "written": written,
            "hyper": None if hyper_now == self._hyper_sent else hyper,
            "user_states": None if states_now == self._user_states_sent else user_states,
        }
        self._hyper_sent = self._user_states_sent = ""  # if the step fails, they are sent again
        self._guessed_message = None
        by_index = {known.index: known for known in self._known.values()}
        if self._is_star:
            message |= self._summing_fields(params, selected, grad_scale)
            parts = [selected[part.key].part if part.key in selected else part for part in parts]
            tensors |= {index: (entries.values, entries.part.block) for index, entries in selected.items()}
        sent_in_step = [part for part in parts if not pushed[part.key]]
        from_outside = [by_index[index] for index in written]
        send = self._make_sender(
            [self._value_parts(from_outside), (sent_in_step, views(tensors))],
            [*(known.local for known in from_outside), *(tensor for tensor, _ in tensors.values())],
        )
        versions = [known.version for known in from_outside]
        try:
            reply, gathered = self._receive(params, functools.partial(remote.make_step, message, send))
        except CSDError:
            if not remote.closed:  # parameters of the failed step may have arrived
                self._pull_values(params)
                for known, version in zip(from_outside, versions, strict=True):
                    known.version = version
            raise
        self._hyper_sent, self._user_states_sent, self._resumed = hyper_now, states_now, False
        self._guess_next_step(message)
        if self._selection:
            self._steps.grad_norm = grad_norm_in(reply)
            self._selection.end(feeds_back=self.error_feedback)
        for known in params:
            known.steps += 1
        self._steps.steps_taken += 1
        for known in from_outside:
            known.mark_synced()
        self._show(params)
        self._last_traffic = (
            sum(known.block.numel for known in params),
            sum(part.block.numel * part.dtype.itemsize for part in parts),
            gathered,
        )
        self._route = "star" if self._is_star else "slices" if any(pushed.values()) else "kept"

    def _make_sender(
        self, sends: Sequence[tuple[Sequence[Part], ViewOf]], tensors: Sequence[torch.Tensor]
    ) -> Callable[[Session], None]:
        """Return the function that sends these parts to the owners, and waits for gradients that leave in backward.

        It runs on a thread of its own; `tensors` are those that it reads.
        """
        remote = self._remote
        devices = {tensor.device for tensor in tensors if is_on_accelerator(tensor)}
        ready = [record_event(torch.accelerator.current_stream(device)) for device in devices]

        def send(session: Session) -> None:
            for event in ready:
                torch.accelerator.current_stream(event.device).wait_event(event)
            for parts, view_of in sends:
                send_buckets(session, remote.buckets_with_owners(parts), view_of)
            if remote.early:
                remote.early.flush()

        return send

    # ---- gradients that leave in backward: see push() ---------------------------------------

    def _reduce_bucket(self, bucket: Any) -> Any:
        engine = self._engine
        if self._address.route == "kept" or engine is None or engine.closed:
            return mean_of(self._ranks, bucket.buffer())  # if the engine is closed, step() raises
        remote = self._remote
        if self._selection and self._selection.is_used(self.topk, self.param_groups):
            return self._leave_for_step(bucket, remote.early)
        if remote.early is None:
            with all_ranks_or_none(self._ranks), engine.lock:
                remote.call({"op": "listen"})
            remote.begin_early(sum(known.param.nbytes for known in self._known.values()), star=self._is_star)
        assert remote.early
        if bucket.index() == 0:
            self._announce(remote)
        return remote.early.handle_bucket(bucket, self._part_to_push)

    def _guess_next_step(self, message: dict[str, Any]) -> None:
        """Set the guess of the next step: one like this, if all its gradients left in the only backward before it."""
        early = self._remote.early
        before, self._backwards = self._backwards, early.backwards if early else 0
        if self._backwards == before + 1 and all(message["pushed"]) and self.max_grad_norm is None:
            self._guessed_message = {name: message[name] for name in GUESS_FIELDS if name in message}

    def _announce(self, remote: RemoteEngine) -> None:
        """Let owners begin the guessed step, in backward. A wrong guess costs the work that they have done for it."""
        assert remote.early
        has_new_groups = len(self.param_groups) > self._groups_sent
        if (
            not (self._guessed_message and remote.is_leader)
            or has_new_groups
            or self.max_grad_norm is not None
            or self._dirty_params({})
        ):
            return
        try:
            for group in self.param_groups:
                self._rule.check(group)
        except CSDValueError:
            return  # step() raises it
        hyper = [hyperparameters_of(group, self._rule.hyperparameters) for group in self.param_groups]
        n = len(self._guessed_message["params"])
        remote.announce(
            {
                **self._guessed_message,
                "op": "guess",
                "pushed": [remote.early.backwards + 1] * n,
                "backwards": remote.early.backwards + 1,
                "hyper": None if json.dumps(hyper) == self._hyper_sent else hyper,
            }
        )

    def _leave_for_step(self, bucket: Any, early: EarlyPushes | None) -> Any:
        """Handle a bucket under Top-K: gradients from which step() selects stay unreduced, the others are averaged."""
        own = self._unreduced
        others: list[torch.Tensor] = []
        if bucket.index() == 0:
            own.clear()
            if early:
                early.clear()  # gradients that an earlier backward has pushed
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            (others if self._part_to_push(p, grad) is None else own).append(grad)
        future = mean_of(self._ranks, bucket.buffer(), others)
        if bucket.is_last():
            if not all_finite(self._ranks, all(bool(grad.isfinite().all()) for grad in own)):
                mark_overflow(own)
            own.clear()
        return future

    def _part_to_push(self, p: torch.Tensor, grad: torch.Tensor) -> Part | None:
        """Return the part that this trainer pushes of a gradient in a DDP bucket; None: it does not leave in backward.

        The decision is the same on all trainers.
        """
        known = self._known.get(id(p))
        n_sent = sum(len(group["params"]) for group in self.param_groups[: self._groups_sent])
        if known is None or known.param is not p or known.index >= n_sent or not grad.numel():
            return None
        if not is_replicated(p) or (grad.dtype, grad.shape) != (known.dtype, known.shape):
            return None
        return known.as_part(self._wire_dtype(known))

    def _pushed_backwards(self, taking_part: Participants) -> dict[int, int]:
        """Return, by parameter number, the backward in which its gradient has left; 0: it leaves in the step.

        Raises CSDRuntimeError if a gradient was changed after it has left.
        """
        known = [self._known[id(p)] for p in taking_part.params]
        early = self._remote.early
        if early is None:
            return dict.fromkeys((k.index for k in known), 0)
        unscaled = getattr(self, "found_inf", None) is not None and getattr(self, "grad_scale", None) is None
        return {
            k.index: early.backward_of(k.index, k.name, g, joined=self._joined, unscaled=unscaled)
            for k, g in zip(known, taking_part.grads, strict=True)
        }

    def _norm(self, params: Sequence[TrainerParam], pushed: dict[int, int]) -> float:
        """Return the 2-norm of all gradients, the same on all trainers. A collective."""
        norm = global_norm((known.param, known.part) for known in params if not pushed[known.index])
        early = self._remote.early
        if early is None or not any(pushed.values()):
            return norm
        counts = [k for k in params if pushed[k.index] and (k.shape or not self._ranks or not self._ranks.rank)]
        square = sum(early.sum_of_squares(known.index) for known in counts)
        squares = self._ranks.gather(square, dtype=torch.float64) if self._ranks else [(square,)]
        return math.sqrt(sum(of_rank for (of_rank,) in squares) + norm**2)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if isinstance(self._engine, RemoteEngine) and self._engine.early:
            self._engine.early.clear()
        super().zero_grad(set_to_none)

    def _select(
        self, taking_part: Participants, grads: dict[int, torch.Tensor], pushed: dict[int, int], grad_scale: float
    ) -> dict[int, Entries]:
        """Return the Top-K entries to send, by parameter number. Raises CSDValueError for an invalid `topk`."""
        if self._selection is None:
            return {}
        sources = []
        for p, group in zip(taking_part.params, taking_part.groups_of, strict=True):
            known = self._known[id(p)]
            if not pushed[known.index]:
                step = int(known.steps) + 1
                sources.append(Source(known.index, known.param, known.stride, grads[known.index], group, step))
        return self._selection.select(sources, self.param_groups, self._steps.options, grad_scale)

    def _grad_formats(
        self, grads: dict[int, torch.Tensor], selected: dict[int, Entries], grad_scale: float
    ) -> dict[int, tuple[Any, ...]]:
        """Return, by parameter number, how its gradient is sent: dtype, Top-K ratio and, with the route star, scale.

        Owners learn this from trainer 0's message only, so all trainers must agree.
        """
        own = grad_scale if self._is_star else None  # on other routes it applies to the mean: trainer 0's counts
        params = [known for known in self._known.values() if known.index in grads]
        formats = {known.index: (str(self._wire_dtype(known)), 0.0, own) for known in params}
        return formats | {index: (str(e.dtype), e.ratio, own) for index, e in selected.items()}

    def _summing_fields(
        self, params: Sequence[TrainerParam], selected: dict[int, Entries], grad_scale: float
    ) -> dict[str, Any]:
        """Return the fields of a step's message for owners that sum gradients, and so compute the mean and its norm."""
        sent = [selected.get(known.index) for known in params]
        dtypes = [e.dtype if e else self._wire_dtype(known) for known, e in zip(params, sent, strict=True)]
        return {
            "scale": grad_scale / (self._ranks.size if self._ranks else 1),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shares": [e.ratio if e else 0.0 for e in sent],
            "max_grad_norm": self.max_grad_norm,
        }

    def _grads(self, taking_part: Participants) -> dict[int, torch.Tensor]:
        """Return this trainer's part of each gradient, by parameter number.

        Raises CSDTypeError, CSDValueError or CSDRuntimeError if one cannot be sent.
        """
        grads = {}
        for p, g in zip(taking_part.params, taking_part.grads, strict=True):
            known = self._known[id(p)]
            check_param(p, known.name)
            if p.is_meta:
                raise CSDRuntimeError(f"parameter {known.name} is on the meta device: it has no data yet")
            if g.shape != p.shape:
                raise CSDValueError(
                    f"the gradient of {known.name} has shape {tuple(g.shape)}, the parameter {tuple(p.shape)}"
                )
            if g.dtype is not p.dtype or g.dtype not in DTYPES:
                raise CSDTypeError(f"the gradient of {known.name} is {g.dtype}, the parameter {p.dtype}")
            self._wire_dtype(known)
            grads[known.index] = known.part.of(g)
        return grads

    def _dirty_params(self, grads: dict[int, torch.Tensor]) -> list[TrainerParam]:
        """Return the parameters written to since owners last had them, if they have a gradient or owners know them."""
        dirty = [known for known in self._known.values() if not known.param.is_meta and known.is_dirty]
        return [known for known in dirty if known.index in grads or known.version != -1 or known.steps]

    # ---- the rest ------------------------------------------------------------------------

    def overlap(self, model: torch.nn.Module | None, **_: Any) -> None:
        if model is not None:
            raise CSDRuntimeError(
                "overlap() hides steps of this machine's devices, not those of optimizer ranks (serve://)"
            )

    def stats(self) -> dict[str, Any]:
        """Return what this trainer knows about the last step. Statistics of devices are on the owners' machines."""
        params, pushed, gathered = self._last_traffic
        return {
            "route": self._route,
            "params": params,
            "push_bytes": pushed,
            "gathered_bytes": gathered,
            "seconds": {"step": self._step_seconds},
            "skipped": self._skipped,
            "grad_norm": self._steps.grad_norm,
            "devices": [],
        }

    def save(self, path: str | os.PathLike[str], *, wait: bool = True, progress: bool = False) -> Future[Path]:
        """Make a snapshot, as with devices, but on the owners' machines. A collective. `progress` is ignored."""
        target = Path(os.fsdecode(path))
        if not target.is_absolute():
            raise CSDValueError(f"Invalid path: {str(target)!r}; on the owners' machines it must be absolute")
        with self._settled(meets=True):
            return self._remote.save(target, wait=wait)

    def close(self) -> None:
        """Close the optimizer. A single trainer's last step is durable on return.

        Several trainers must all call synchronize() before to ensure that.
        """
        engine = self._engine
        if engine is not None and not engine.closed and engine.pid == os.getpid() and not self._ranks:
            self.synchronize()
        super().close()

    def join_hook(self, **options: Any) -> JoinHook:
        if self._is_star:
            raise CSDRuntimeError("?route=star and Join do not go together: owners wait for gradients of all trainers")
        return super().join_hook(**options)

    def __repr__(self) -> str:
        where = "closed" if self._engine is None or self._engine.closed else str(self._address)
        return f"{torch.optim.Optimizer.__repr__(self)} on [{where}]"
