"""An owner's part of a model: an ordinary optimizer of this package whose parameters are the rows that the owner keeps.

With several owners a parameter is a DTensor sharded by rows, so that owner k keeps the same rows, in the same store, as
CSDAdam on rank k under DDP. All methods except those below "transfers" are collectives of the owners.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..distributed.ranks import Ranks, all_ranks_or_none
from ..distributed.sharding import as_dtensor
from ..errors import CSDError, CSDRankError, CSDStoreExistsError, CSDWarning
from ..params.groups import hyperparameters_of, members, restore_hyperparameters
from ..params.manifest import ignored_by_resume
from ..params.param_state import DTYPES
from ..params.summed import Summand
from ..params.update_rule import FLT_MAX, UpdateRule
from ..step.spec import NO_SUMS, StepPlan, Sums
from ..store.format import Record
from .arrivals import SENT_IN_STEP, Arrival, Arrivals
from .blocks import (
    Block,
    Bucket,
    Part,
    ViewOf,
    buckets_with_owner,
    check_cover,
    owned,
    receive_buckets,
    send_buckets,
    whole,
)
from .flow import Flow, Layout
from .request import Group, Param, Request, check_groups, check_same_model, read_hyper
from .star import Contributions, entries_part
from .values import dtype_named, packed, unpacked
from .wire import Session

# Group options that concern trainers only: owners drop them.
TRAINER_OPTIONS = ("foreach", "fused", "capturable", "topk")
TRAINERS_KEY = "trainers"  # key in the stored `user_state` of the list of several trainers' user_states, by rank


class NotUndone(CSDRankError):
    """A step could not be undone: memory holds no valid step. The session ends; the next one resumes from the store."""


class Owner:
    """One owner's optimizer, and the session that currently uses it.

    `optimizers`: optimizer classes by name; `devices`: this owner's, as an optimizer takes them.
    """

    def __init__(self, optimizers: Mapping[str, type[Any]], devices: Sequence[str | Path], ranks: Ranks | None) -> None:
        self.optimizers: Mapping[str, type[Any]] = optimizers
        self._devices, self._ranks = devices, ranks
        self.rank: int = ranks.rank if ranks else 0
        self.owners: int = ranks.size if ranks else 1
        self.optimizer: Any = None
        self.request: Request | None = None  # from which the optimizer was made
        self._blocks: list[list[Block]] = []  # [trainer][parameter], of the current session
        self._opened = False  # _blocks were set by the current session
        self._grads: dict[int, torch.Tensor] = {}  # gradient buffers, by parameter number
        self._contributions = Contributions()  # buffers for gradients that owners sum, one per trainer
        self._layout: Layout | None = None  # of the last step that overlapped with its gradients' arrival
        self._transfer_seconds = 0.0  # seconds for which this owner has waited for the network since the last step
        # The optimizer in memory may differ from the store (for example, groups have joined and no step has used them):
        # the next session resumes from the store.
        self.in_doubt: bool = False
        # Held while the optimizer's memory is written, so that data for a session that is over can be discarded.
        # Notified when the session changes and when gradients arrive.
        self.changed: threading.Condition = threading.Condition()
        self.current: Session | None = None
        self.arrivals: Arrivals | None = None  # of the current session
        self.flow: Flow | None = None  # the step that is under way, requested or guessed
        self._groups_before: list[dict[str, Any]] | None = None  # groups to restore if a guessed step is undone

    # ---- sessions ------------------------------------------------------------------------

    @property
    def has_states(self) -> bool:
        return self.optimizer is not None and bool(self.optimizer.state)

    def check(self, request: Request) -> None:
        """Check a request before its session is granted and ends the current one.

        Raises CSDStoreError, CSDStoreExistsError. What requires the store itself is checked when the store is opened.
        """
        if self.request is None or not self.has_states:
            return
        if request.mode == "new":
            raise CSDStoreExistsError(
                17,
                f"the optimizer ranks have states of {self.request.optimizer} at step {self.optimizer.committed_step}: "
                "go on with resume=True, or erase them with overwrite=True",
            )
        if request.mode == "resume" and not self.in_doubt:
            check_same_model(self.request, request)

    def begin_session(self, session: Session) -> None:
        """Make this the current session."""
        with self.changed:
            self.current, self.arrivals, self._opened = session, Arrivals(self, session), False
            self.changed.notify_all()

    def end_session(self) -> None:
        """End the current session, and make everything durable."""
        with self.changed:
            self.current = self.arrivals = None
            self.changed.notify_all()
        with contextlib.suppress(NotUndone):  # the next session resumes from the store
            self.undo_incomplete_step()
        with self.changed:
            self._contributions.clear()
        if self.optimizer is not None:
            self.optimizer.synchronize()

    def close(self) -> None:
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = self.request = None
            self._grads.clear()
            self._contributions.clear()
            self._layout = None

    # ---- what trainers ask for -------------------------------------------------------------

    def open(self, request: Request, blocks: list[list[Block]]) -> dict[str, Any]:
        """Continue with the optimizer in memory, resume one from the store, or make a new one. Returns the reply."""
        params = request.params
        check_cover([p.name for p in params], [p.shape for p in params], blocks)
        self._blocks, self._opened, self._layout = blocks, True, None
        notes: list[str] = []
        continues = request.mode == "resume" and self.has_states and not self.in_doubt and self.request == request
        if self._ranks:  # other owners may have failed where this one did not
            continues = all(vote for (vote,) in self._ranks.gather(continues))
        if not continues:
            self.close()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", CSDWarning)
                self._make_optimizer(request)
            notes = [str(w.message) for w in caught if issubclass(w.category, CSDWarning)]
        opt = self.optimizer
        opt.synchronize()
        groups = [hyperparameters_of(group) for group in opt.param_groups]
        if continues:
            kept = Record(groups=groups, given=opt._steps.initial_groups)
            notes = [*ignored_by_resume(opt._rule, [hyperparameters_of(group.hyper) for group in request.groups], kept)]
        user_state = opt.user_state
        states = user_state.get(TRAINERS_KEY, [user_state]) if user_state else []
        return {
            "recovered": self.has_states,
            "committed_step": opt.committed_step,
            "groups": groups,
            "steps": [float(opt.state[p]["step"]) if p in opt.state else 0.0 for _, _, p in members(opt.param_groups)],
            "user_states": packed(states),
            "warnings": notes,
        }

    def _make_optimizer(self, request: Request) -> None:
        groups = [self._make_group(group) for group in request.groups]
        options: dict[str, Any] = dict(request.options)
        if "decoupled_weight_decay" in request.defaults:  # selects the update rule; other defaults are in the groups
            options["decoupled_weight_decay"] = request.defaults["decoupled_weight_decay"]
        mode = {} if request.mode == "new" else {request.mode: True}
        self.optimizer = self.optimizers[request.optimizer](groups, devices=[*self._devices], **options, **mode)
        self.request, self.in_doubt = request, False

    def _make_group(self, group: Group) -> dict[str, Any]:
        params = [self._make_param(p) for p in group.params]
        named = any(p.named for p in group.params)
        names = [p.name for p in group.params]
        hyper = {name: value for name, value in group.hyper.items() if name not in TRAINER_OPTIONS}
        return {**hyper, "params": [*zip(names, params, strict=True)] if named else params}

    def _make_param(self, p: Param) -> torch.nn.Parameter:
        like = torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device="meta")
        if self._ranks is None or not p.shape:
            return torch.nn.Parameter(torch.empty_like(like, device="cpu"), requires_grad=p.trains)
        block = owned(p.shape, self.owners, self.rank)
        local = torch.empty_like(block.of(like, whole(p.shape)), device="cpu")
        return torch.nn.Parameter(self._as_dtensor(local, p.shape, p.stride), requires_grad=p.trains)

    def _as_dtensor(self, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Return the DTensor of this shape and stride of which this owner has the rows `local`."""
        from torch.distributed.tensor import Shard

        assert self._ranks
        return as_dtensor(local, self._ranks.mesh, (Shard(0),), torch.Size(shape), stride)

    def listen(self, session: Session) -> None:
        """Accept gradients of this session before their step from now on."""
        with self.changed:
            self.check_current(session)
            assert self.arrivals
            self.arrivals.listen()

    def join(self, groups: Sequence[Group], blocks: list[list[Block]]) -> dict[str, Any]:
        """Add new parameter groups.

        The optimizer is in doubt until the next step: if that never succeeds, the groups must not stay.
        """
        assert self.request
        params = [p for group in groups for p in group.params]
        check_cover([p.name for p in params], [p.shape for p in params], blocks)
        check_groups(groups, self.optimizer._rule, self.request)
        for group in groups:
            self.optimizer.add_param_group(self._make_group(group))
        self.request = replace(self.request, groups=(*self.request.groups, *groups))
        self._blocks = [[*before, *new] for before, new in zip(self._blocks, blocks, strict=True)]
        self._layout = None
        self.in_doubt = True
        return {}

    def begin_step(self, message: dict[str, Any], received: Mapping[int, torch.Tensor]) -> None:
        """Take in all that a step needs except gradients, and begin it if it need not wait for them: see flow.py.

        `received`: new values of parameters, by number. A guessed step that matches the message goes on.
        """
        with all_ranks_or_none(self._ranks):
            guessed_right = self.flow is not None and not received and self.flow.is_for(message)
            if not guessed_right:
                self.undo_incomplete_step()
            self.in_doubt = True  # until the step is made: new values, hyperparameters and user_state belong to it
            self._groups_before = None
            self._set_params(received)
            if message["user_states"] is not None:
                states = [unpacked(state) for state in message["user_states"]]
                self.optimizer.user_state = (
                    states[0] if len(states) == 1 else {TRAINERS_KEY: states} if any(states) else {}
                )
        if not guessed_right:
            self._begin_flow(message, waits=bool(received))

    def guess(self, message: dict[str, Any]) -> None:
        """Begin a step that was only announced, if possible. Nothing visible changes until it is requested."""
        with all_ranks_or_none(self._ranks):
            self.undo_incomplete_step()
        self._groups_before = [hyperparameters_of(group) for group in self.optimizer.param_groups]
        self._begin_flow(message, waits=False)
        if self.flow and not self.flow.under_way:
            self.undo_incomplete_step()

    def _begin_flow(self, message: dict[str, Any], *, waits: bool) -> None:
        with all_ranks_or_none(self._ranks):
            self._set_up(message)
            waits = waits or any(message.get("shares", ())) or message.get("max_grad_norm") is not None
            if not waits and "shares" in message:
                self.optimizer._steps.sums = self._sums(message)
            flow = Flow(self, message)
            with self.changed:
                self.flow = flow
        if not waits:
            flow.begin()

    def _set_up(self, message: dict[str, Any]) -> None:
        opt, params = self.optimizer, self.params
        self._set_hyper(message["hyper"])
        for p in params:
            p.grad = None
        for index in message["params"]:
            p = params[index]
            p.requires_grad_(True)
            local = _local(p) if "shares" in message else self._grads[index]
            p.grad = self._as_dtensor(local, p.shape, p.stride()) if hasattr(p, "to_local") else local
        opt._steps.grad_factor, opt._steps.sums = float(message["scale"]), NO_SUMS
        opt.max_grad_norm = message.get("max_grad_norm")

    def end_step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Complete the step once all gradients have arrived. Returns the reply; raises what a step raises."""
        opt = self.optimizer
        assert self.flow
        if "shares" in message and not self.flow.under_way:
            opt._steps.sums = self._sums(message)
        opt._engine.states.served = {"trainers": len(self._blocks), "transfer_seconds": self._transfer_seconds}
        opt.step()
        self._transfer_seconds = 0.0
        self.in_doubt = False
        return {"committed_step": opt.committed_step, "grad_norm": opt._steps.grad_norm}

    def undo_incomplete_step(self) -> None:
        """Undo the step under way, if any; a complete step stays. Not a collective. Raises NotUndone."""
        flow = self.flow
        if flow is None:
            return
        try:
            flow.end()
        except CSDError as e:
            self.in_doubt = True
            raise NotUndone(f"a step could not be undone: {e}") from e
        finally:
            with self.changed:
                self.flow = None
            self.optimizer._steps.sums = NO_SUMS
            before, self._groups_before = self._groups_before, None
            for group, kept in zip(self.optimizer.param_groups, before or (), strict=bool(before)):
                restore_hyperparameters(group, kept)

    def layout_of(self, plan: StepPlan, indices: Sequence[int], *, summed_by_owners: bool) -> Layout:
        """Return the cached Layout if it fits, or a new one."""
        if self._layout is None or not self._layout.fits(plan, indices, summed_by_owners=summed_by_owners):
            self._layout = Layout(self, plan, indices, summed_by_owners=summed_by_owners)
        return self._layout

    def owned_block(self, index: int) -> Block:
        """Return the block of a parameter that this owner keeps."""
        return owned(tuple(self.params[index].shape), self.owners, self.rank)

    def expected_blocks(self, index: int, *, summed_by_owners: bool) -> list[Block]:
        """Return the block of a gradient that each trainer sends here.

        `summed_by_owners`: owners sum the gradients, so each trainer sends all of this owner's rows.
        """
        mine = self.owned_block(index)
        return [mine if summed_by_owners else blocks[index].intersection(mine) for blocks in self._blocks]

    def _sums(self, message: dict[str, Any]) -> Sums:
        """Return the summands of each gradient of a step. Raises CSDRankError if one is not what the message announced.

        Called before the vote; what trainers send afterwards cannot change the result any more.
        """
        sums: dict[int, list[Summand]] = {}
        params, trainers = self.params, range(len(self._blocks))
        for index, name, share in zip(message["params"], message["dtypes"], message["shares"], strict=True):
            n, dtype = _local(params[index]).numel(), dtype_named(name)
            if n:
                sums[id(params[index])] = [self._contributions.summand(t, index, n, dtype, share) for t in trainers]
        return sums

    def load(self, message: dict[str, Any], received: Mapping[int, torch.Tensor], states: list[torch.Tensor]) -> None:
        """Load states from trainers. `states`: this owner's rows of the states named in the message, in its order."""
        opt, params = self.optimizer, self.params
        self._set_params(received)
        self._set_hyper(message["hyper"])
        of_states, entries = iter(states), {}
        for index, step, names in message["states"]:
            p = params[index]
            entries[index] = {"step": torch.tensor(float(step))}
            for name in names:
                local = next(of_states)
                entries[index][name] = self._as_dtensor(local, p.shape, p.stride()) if hasattr(p, "to_local") else local
        groups = torch.optim.Optimizer.state_dict(opt)["param_groups"]
        opt.load_state_dict({"state": entries, "param_groups": groups})
        opt.synchronize()

    def states(self) -> tuple[list[Any], list[torch.Tensor]]:
        """Return the list of states for the reply, [parameter number, step, names], and this owner's rows of them."""
        state_list, tensors = [], []
        for index, p in enumerate(self.params):
            if entry := self.optimizer.state.get(p):
                names = [name for name in self.optimizer._rule.sections if name in entry]
                state_list.append([index, float(entry["step"]), names])
                tensors += [_local(entry[name]) for name in names]
        return state_list, tensors

    @property
    def params(self) -> list[Any]:
        return [p for _, _, p in members(self.optimizer.param_groups)]

    def _set_hyper(self, hyper: Sequence[dict[str, Any]] | None) -> None:
        for group, kept in zip(self.optimizer.param_groups, hyper or (), strict=bool(hyper)):
            restore_hyperparameters(group, {name: value for name, value in kept.items() if name not in TRAINER_OPTIONS})

    @torch.no_grad()
    def _set_params(self, received: Mapping[int, torch.Tensor]) -> None:
        params = self.params
        for index, values in received.items():
            _local(params[index]).copy_(values)

    # ---- transfers ------------------------------------------------------------------------

    @contextlib.contextmanager
    def timing_transfers(self) -> Iterator[None]:
        """Add the time spent inside to the time for which this owner has waited for the network."""
        began = time.perf_counter()
        yield
        self._transfer_seconds += time.perf_counter() - began

    def receive(self, session: Session, message: dict[str, Any]) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Receive the tensors that follow a message: values of parameters, by number, and states to load.

        For a step it also allocates buffers for dense gradients. Callable on any thread. Raises CSDRankError if the
        message is malformed or the session is over.
        """
        if self.optimizer is None or self.request is None or not self._opened:
            raise CSDRankError("a message came before the session's model")
        check_message(message, self.request, self.optimizer._rule, session.trainers)
        params = self.params
        received: dict[int, torch.Tensor] = {}
        states: list[torch.Tensor] = []
        if message["op"] in ("step", "guess"):
            with self.while_current(session):
                self._prepare_buffers(session, message)
        elif message["op"] == "load":
            state_list = message["states"]
            parts = self._state_parts(state_list, None)
            states = [
                torch.empty(_local(params[i]).shape, dtype=d, device="cpu") for i, d in self._state_dtypes(state_list)
            ]
            sources = {
                t: buckets_with_owner(self._state_parts(state_list, t), self.owners, self.rank)
                for t in range(session.trainers)
            }
            self._receive_buckets(session, sources, dict(enumerate(states)), parts)
        written = message["written"] if message["op"] in ("step", "load") else []
        for index in written:
            received[index] = torch.empty_like(_local(params[index]))
        wire_dtypes = {index: params[index].dtype for index in written}
        self._receive(session, wire_dtypes, received)
        return received, states

    def _prepare_buffers(self, session: Session, message: dict[str, Any]) -> None:
        assert self.arrivals
        follow = [i for i, backward in zip(message["params"], message["pushed"], strict=True) if not backward]
        self.arrivals.discard(follow, message["backwards"])
        if "shares" not in message:
            self.grad_buffers(session, message["params"])
            return
        of_params = zip(message["params"], message["dtypes"], message["shares"], strict=True)
        wire_dtypes = {index: dtype_named(name) for index, name, share in of_params if not share}
        for trainer in range(session.trainers):
            self.summand_buffers(session, trainer, wire_dtypes)

    def receive_gradients(self, session: Session, message: dict[str, Any]) -> None:
        """Wait until all gradients of a step are in their buffers. Callable on any thread. Raises CSDRankError."""
        backwards = dict(zip(message["params"], message["pushed"], strict=True))
        dtypes = dict(zip(message["params"], map(dtype_named, message["dtypes"]), strict=True))
        follow = {index: dtype for index, dtype in dtypes.items() if not backwards[index]}
        if "shares" in message:
            self._receive_summands(session, follow, dict(zip(message["params"], message["shares"], strict=True)))
        else:
            self._receive(session, follow, self._grads, are_gradients=True)
        if pushed := {index: backward for index, backward in backwards.items() if backward}:
            arrivals = self.arrivals
            if arrivals is None or not arrivals.is_listening:
                raise CSDRankError("a step names gradients that were never pushed")
            expected = [
                dict(zip(pushed, blocks, strict=True))
                for blocks in zip(
                    *(self.expected_blocks(i, summed_by_owners="shares" in message) for i in pushed), strict=True
                )
            ]
            arrivals.wait(pushed, [{i: block.numel for i, block in of_trainer.items()} for of_trainer in expected])

    def grad_buffers(self, session: Session, indices: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Return gradient buffers that include these parameters.

        Raises CSDRankError if the session is over, because the buffers may belong to another model by then.
        """
        with self.while_current(session):
            for index in indices:
                if index not in self._grads:
                    self._grads[index] = torch.empty_like(_local(self.params[index]))
            return self._grads

    def _state_dtypes(self, state_list: Sequence[Any]) -> list[tuple[int, torch.dtype]]:
        """Return (parameter number, dtype) of each state in the order in which a message names them."""
        params = self.params
        indices = [index for index, _, names in state_list for _ in names]
        return [(index, torch.complex64 if params[index].is_complex() else torch.float32) for index in indices]

    def _state_parts(self, state_list: Sequence[Any], trainer: int | None) -> list[Part]:
        """Return the parts of these states that a trainer has; `trainer` None: all of each state."""
        params = self.params
        blocks = self._blocks[trainer] if trainer is not None else [whole(p.shape) for p in params]
        return [
            Part(k, tuple(params[i].shape), blocks[i], dtype)
            for k, (i, dtype) in enumerate(self._state_dtypes(state_list))
        ]

    def _receive(
        self,
        session: Session,
        wire_dtypes: Mapping[int, torch.dtype],
        into: Mapping[int, torch.Tensor],
        *,
        are_gradients: bool = False,
    ) -> None:
        """Receive from all trainers their parts of tensors. `are_gradients`: record their arrival."""
        params, trainers = self.params, range(session.trainers)
        parts = {trainer: self._parts_of(trainer, params, wire_dtypes) for trainer in trainers}
        sources = {t: buckets_with_owner(parts[t], self.owners, self.rank) for t in trainers}
        whole_parts = [Part(i, tuple(params[i].shape), whole(params[i].shape), d) for i, d in wire_dtypes.items()]
        self._receive_buckets(session, sources, into, whole_parts, are_gradients=are_gradients)

    def summand_buffers(
        self, session: Session, trainer: int, wire_dtypes: Mapping[int, torch.dtype]
    ) -> Mapping[int, torch.Tensor]:
        """Return buffers for dense gradients of one trainer that owners sum. `wire_dtypes`: dtypes by parameter number.

        Raises CSDRankError if a dtype does not fit its parameter, and as grad_buffers() does.
        """
        buffers = {}
        with self.while_current(session):
            for index, dtype in wire_dtypes.items():
                local = _local(self.params[index])
                if dtype not in DTYPES or dtype.is_complex != local.is_complex():
                    raise CSDRankError(f"gradients of {dtype} for a parameter of {local.dtype}")
                buffers[index] = self._contributions.buffer(
                    trainer, index, torch.empty_like(local, dtype=dtype, device="meta")
                )
        return buffers

    def _receive_summands(
        self, session: Session, wire_dtypes: Mapping[int, torch.dtype], ratios: Mapping[int, float]
    ) -> None:
        """Receive gradients that owners sum. `ratios`: Top-K ratio by parameter number; 0: the dense gradient."""
        params = self.params
        into: dict[int, torch.Tensor] = {}
        parts: dict[int, list[Part]] = {}
        for trainer in range(session.trainers):
            parts[trainer] = []
            buffers = self.summand_buffers(
                session, trainer, {i: dtype for i, dtype in wire_dtypes.items() if not ratios[i]}
            )
            for index, dtype in wire_dtypes.items():
                key, shape = trainer * len(params) + index, tuple(params[index].shape)
                part = Part(key, shape, whole(shape), dtype)
                if ratio := ratios[index]:
                    part = entries_part(key, shape, self.owners, ratio)
                    like = torch.empty(owned(part.shape, self.owners, self.rank).sizes, dtype=part.dtype, device="meta")
                    with self.while_current(session):
                        into[key] = self._contributions.buffer(trainer, index, like)
                else:
                    into[key] = buffers[index]
                parts[trainer].append(part)
        sources = {t: buckets_with_owner(of_trainer, self.owners, self.rank) for t, of_trainer in parts.items()}
        self._receive_buckets(
            session, sources, into, [part for of_trainer in parts.values() for part in of_trainer], are_gradients=True
        )

    def _receive_buckets(
        self,
        session: Session,
        sources: Mapping[int, Any],
        into: Mapping[int, torch.Tensor],
        parts: Sequence[Part],
        *,
        are_gradients: bool = False,
    ) -> None:
        view_of, n = self.views(into, {part.key: part.shape for part in parts}), len(self.params)

        def arrived(trainer: int, bucket: Bucket) -> None:
            assert self.arrivals
            for piece in bucket if are_gradients else ():
                self.arrivals.record(trainer, Arrival(piece.key % n, SENT_IN_STEP, piece.block, piece.dtype))

        receive_buckets(session, sources, view_of, lambda: self.while_current(session), arrived=arrived)

    @contextlib.contextmanager
    def while_current(self, session: Session) -> Iterator[None]:
        """Keep this session the current one inside the context. Raises CSDRankError if it is over."""
        with self.changed:
            self.check_current(session)
            yield

    def check_current(self, session: Session) -> None:
        """Raise CSDRankError if this session is over. The caller holds `changed`."""
        if self.current is not session:
            raise CSDRankError(f"session {session.number} is over")

    def _parts_of(self, trainer: int, params: Sequence[Any], wire_dtypes: Mapping[int, torch.dtype]) -> list[Part]:
        return [Part(i, tuple(params[i].shape), self._blocks[trainer][i], dtype) for i, dtype in wire_dtypes.items()]

    def send(self, session: Session, indices: Sequence[int], ready: Callable[[Bucket], None] = lambda _: None) -> None:
        """Send each trainer its part of these parameters; `ready` blocks until a bucket can be read. On any thread."""
        params = self.params
        wire_dtypes = {i: params[i].dtype for i in indices}
        parts = {t: self._parts_of(t, params, wire_dtypes) for t in range(session.trainers)}
        to = {t: buckets_with_owner(of_trainer, self.owners, self.rank) for t, of_trainer in parts.items()}
        view_of = self.views({i: _local(params[i]) for i in indices}, {i: tuple(params[i].shape) for i in indices})
        send_buckets(session, to, view_of, lambda: self.while_current(session), ready=ready)

    def send_states(
        self, session: Session, to: int | None, tensors: Sequence[torch.Tensor], state_list: Sequence[Any]
    ) -> None:
        """Send all states to trainer `to`, or with None each trainer its part."""
        view_of = self.views(
            dict(enumerate(tensors)), {part.key: part.shape for part in self._state_parts(state_list, None)}
        )
        trainers = range(session.trainers) if to is None else [to]
        parts = {t: self._state_parts(state_list, t if to is None else None) for t in trainers}
        lists = {t: buckets_with_owner(of_trainer, self.owners, self.rank) for t, of_trainer in parts.items()}
        send_buckets(session, lists, view_of, lambda: self.while_current(session))

    def views(self, rows: Mapping[int, torch.Tensor], shapes: Mapping[int, tuple[int, ...]]) -> ViewOf:
        """Return the function that views blocks of `rows`: this owner's rows of tensors of these shapes, by key."""
        mine = {key: owned(shape, self.owners, self.rank) for key, shape in shapes.items()}

        def view_of(key: int, block: Block) -> torch.Tensor:
            return block.of(rows[key], mine[key])

        return view_of


def _local(t: Any) -> torch.Tensor:
    """Return this owner's rows. They share the parameter's version counter, so writes to them are noticed."""
    local: torch.Tensor = t._local_tensor if hasattr(t, "to_local") else t
    return local.detach()


def _check_shares(message: dict[str, Any], request: Request) -> None:
    """Check the fields of a message that concern gradients which owners sum. Raises ValueError, TypeError."""
    norm = message["max_grad_norm"]
    if not (norm is None or isinstance(norm, (int, float))):
        raise ValueError(f"max_grad_norm {norm!r}")
    of_params = zip(message["params"], message["dtypes"], message["shares"], message["pushed"], strict=True)
    for index, name, share, pushed in of_params:
        dtype, param_dtype = dtype_named(name), request.params[index].dtype
        if not (isinstance(share, (int, float)) and 0 <= share <= 1):
            raise ValueError(f"a share {share!r}")
        if share and (pushed or dtype not in (torch.float16, torch.bfloat16) or param_dtype.is_complex):
            raise ValueError(f"entries of {dtype} for a parameter of {param_dtype}")


def read_blocks(message: dict[str, Any]) -> list[Block]:
    """Parse a trainer's blocks. Raises CSDRankError if they are malformed."""
    try:
        blocks = [Block(tuple(first), tuple(sizes)) for first, sizes in message["blocks"]]
        if any(type(n) is not int or n < 0 for block in blocks for n in (*block.first, *block.sizes)):
            raise ValueError("a number is not an integer, or negative")
    except (KeyError, TypeError, ValueError) as e:
        raise CSDRankError(f"the blocks of a trainer cannot be read: {e}") from e
    return blocks


def check_message(message: dict[str, Any], request: Request, rule: UpdateRule, trainers: int) -> None:
    """Check that a message about parameters is complete and valid before it is acted on. Raises CSDRankError."""
    n, op = len(request.params), message["op"]

    def numbers(values: Any) -> list[int]:
        if not isinstance(values, list) or not all(type(i) is int and 0 <= i < n for i in values):
            raise ValueError(f"{values!r} for numbers of parameters")
        if len({*values}) != len(values):
            raise ValueError("a parameter twice")
        return values

    try:
        if op in ("step", "guess", "pull"):
            numbers(message["params"])
        if op in ("step", "load"):
            numbers(message["written"])
        if op in ("step", "guess", "load"):
            read_hyper(message["hyper"], len(request.groups), None if op == "load" else rule)
        if op in ("step", "guess"):
            if len(message["dtypes"]) != len(message["params"]):
                raise ValueError("dtypes that do not fit")
            if not (type(message["scale"]) is float and abs(message["scale"]) <= FLT_MAX):
                raise ValueError(f"scale {message['scale']!r}")
            if len(message["pushed"]) != len(message["params"]) or not all(type(n) is int for n in message["pushed"]):
                raise ValueError("backwards that do not fit")
            if type(message["backwards"]) is not int:
                raise ValueError(f"backwards {message['backwards']!r}")
            if "shares" in message:
                _check_shares(message, request)
        if op == "step":
            states = message["user_states"]
            if states is not None and len([unpacked(state) for state in states]) != trainers:
                raise ValueError(f"user_state of {len(states)} trainers")
        if op == "load":
            numbers([index for index, _, _ in message["states"]])
            for _, step, names in message["states"]:
                is_count = isinstance(step, (int, float)) and 0 <= step <= FLT_MAX
                if not (is_count and all(isinstance(name, str) for name in names)):
                    raise ValueError(f"states {names!r} at step {step!r}")
        if op == "save" and [type(message[name]) for name in ("path", "wait", "snapshot")] != [str, bool, int]:
            raise ValueError(f"path {message['path']!r}")
        if op == "state" and message["to"] not in (None, *range(trainers)):
            raise ValueError(f"trainer {message['to']!r}")
    except (KeyError, TypeError, ValueError) as e:
        raise CSDRankError(f"a message ({op}) cannot be read: {type(e).__name__}: {e}") from e
