"""What an optimizer does whose states are with optimizer ranks: `devices="serve://host:port"`."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.join import JoinHook

from .. import settings
from ..devices.spec import DeviceSpec
from ..distributed.grad_norm import global_norm
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..distributed.sharding import UNSHARDED, Partition, is_flat, is_replicated
from ..engine.engine import Engine
from ..errors import CSDRankError, CSDRuntimeError, CSDStoreError, CSDTypeError, CSDValueError
from ..params.groups import members, name_of, plain, put_back
from ..params.memory_warnings import FETCHED, warn_if_large
from ..params.param_state import DTYPES, check_param
from ..step.all_gather import ParamAllGather
from ..step.prepare import Participants, clip_to, participants
from ..store.file import Mode
from .blocks import Block, FlatShard, Part, ViewOf, block_of
from .blocks import whole as all_of
from .early import Early, mean_of, tell_overflow
from .remote import RemoteEngine
from .request import Group, Request, describe_group, group_message, whoami
from .star import Entries, Selection, Source
from .values import packed, unpacked
from .wire import PATIENCE, SCHEME, USER_STATE_BYTES, Address, parse_address

if TYPE_CHECKING:
    from ..optim.optimizer import CSDOptimizer as _Optimizer
else:
    _Optimizer = object

OTHER_RANKS = (
    "FSDP1 pads its flat parameters for a number of ranks: take the same as before, or another one that it pads to the "
    "same size; with use_orig_params=True nothing is padded"
)
DIFFERENT_WAYS = (
    "trainers send gradients in different ways: grad_dtype and topk are the same on all of them, and with ?route=star "
    "the loss scale (docs/optimizer-ranks.md)"
)
ELSEWHERE = (
    "the states are with the optimizer ranks (serve://). Call consolidate_state_dict() on all trainers before, which "
    "takes all states into the memory of one of them, or consolidate_state_dict(None), which takes of each trainer its "
    "part; or save(path), a snapshot on the owners' machines; or run `csd-optim export` there (docs/optimizer-ranks.md)"
)


def address_of(devices: Any) -> Address | None:
    """Where owners are, if that is what `devices` says, or CSD_OPTIM_DEVICES where it is None. Raises CSDValueError."""
    named = settings.devices() if devices is None else [devices] if isinstance(devices, str) else devices
    if not isinstance(named, (list, tuple)):
        return None
    served = [d for d in named if isinstance(d, str) and d.strip().lower().startswith(SCHEME)]
    if served and len(named) > 1:
        raise CSDValueError(f"Invalid devices: {served[0]!r} stands for all devices, so it is the only one")
    return parse_address(served[0].strip()) if served else None


@functools.cache
def served(kind: type[Any]) -> type[Any]:
    """The class of optimizers of this kind whose states are with owners; it is called the same."""
    return type(kind.__name__, (_Trainer, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


@dataclass(eq=False)
class _Param:
    """A parameter, and the part of it that this trainer pushes and pulls."""

    param: torch.Tensor
    part: Partition
    name: str
    index: int  # over all groups: so owners know it
    block: Block  # of the part
    shape: torch.Size  # as the owners know it
    stride: tuple[int, ...]
    dtype: torch.dtype
    here: torch.Size  # of `param`: what is done to it may change that
    steps: float = 0.0
    version: int = -1  # when the owners last had its value; -1: they have none of this parameter
    pointer: int = -1

    @property
    def local(self) -> torch.Tensor:
        """The part as it is now."""
        return self.part.of(self.param)

    @property
    def is_absent(self) -> bool:
        """Has this trainer nothing of a parameter of FSDP1? Then it has no gradient, and no entry in `state`."""
        return isinstance(self.part, FlatShard) and not self.block.numel

    @property
    def is_written(self) -> bool:
        return (self.version, self.pointer) != (self.part.version(self.param), self.part.pointer(self.param))

    def is_ours(self) -> None:
        self.version, self.pointer = self.part.version(self.param), self.part.pointer(self.param)

    def travels(self, dtype: torch.dtype) -> Part:
        return Part(self.index, tuple(self.shape), self.block, dtype)


class _Trainer(_Optimizer):
    """Stands before an optimizer's class, see served(): the step is that of CSDOptimizer up to `_update`."""

    _address: Address

    # ---- construction ------------------------------------------------------------------

    def _open(self, specs: Sequence[DeviceSpec], ranks: Ranks | None, mode: Mode = "new") -> None:
        self._check_topk()
        if ranks and not self.sharded:
            raise CSDValueError("Invalid sharded: False; to optimizer ranks (serve://) each trainer pushes its share")
        self._known: dict[int, _Param] = {}  # by id of the parameter
        self._flat: dict[int, FlatShard] = {}  # likewise
        self._gathers: dict[tuple[Any, ...], ParamAllGather] = {}
        self._groups_told = 0
        self._hyper_told = self._user_states_told = ""  # as they were sent last, JSON
        self._resumed = False  # and no step was made since
        self._consolidates = False  # consolidate_state_dict() was called, and no step since
        self._asked_together = False  # state_dict() is called on all trainers, under DDP, too
        self._fetched: dict[int, dict[str, torch.Tensor]] | None = None  # by it: this trainer's part of states
        self._route = "kept"  # of the last step
        self._selection: Selection | None = None  # of Top-K
        self._unreduced: list[torch.Tensor] = []  # of a backward under way, what it selects from
        self._moved = (0, 0, 0)  # in the last step: elements updated, bytes pushed, bytes gathered
        self._measure()
        with all_ranks_or_none(ranks):
            request = self._request(mode)
        if ranks:
            said = zlib.crc32(json.dumps({**request.message(), "who": ""}).encode())
            if len({*ranks.gather(said)}) > 1:
                raise CSDRankError("trainers do not have the same parameters, hyperparameters and options")
        engine: RemoteEngine | None = None
        try:
            engine = RemoteEngine(self._address, ranks, request)
            self._know()
            reply = engine.call({"op": "open"}, blocks=self._blocks(0), patience=PATIENCE)
        except BaseException as e:
            if engine:
                engine.abandon()
            if self._flat and isinstance(e, CSDStoreError):
                raise CSDStoreError(f"{e}. {OTHER_RANKS}") from e
            raise
        self._groups_told = len(self.param_groups)
        self._opened = reply
        if self._is_star:
            self._selection = Selection(engine.owners)
        self._attach(engine)

    def _request(self, mode: Mode) -> Request:
        ours = (c for c in type(self).__mro__ if c.__module__.startswith("csd_optim") and c.__name__.startswith("CSD"))
        kind = next(ours).__name__
        return Request(
            kind,
            plain(self.defaults),
            {"state_dtype": self.state_dtype, **self._options},
            mode,
            self._ranks.size if self._ranks else 1,
            whoami(),
            tuple(self._described(k) for k in range(len(self.param_groups))),
        )

    def _described(self, k: int) -> Group:
        return describe_group(self.param_groups, k, self._rule.hyperparameters, self._shape_of, star=self._is_star)

    @property
    def _is_star(self) -> bool:
        """Do trainers send their own gradients, for the owners to sum?"""
        return self._address.route == "star"

    def _check_topk(self) -> None:
        """Raises CSDValueError if gradients are to be sparse, and go a way that has none."""
        shares = [self.topk, *(group.get("topk") for group in self.param_groups)]
        if not self._is_star and shares != [None] * len(shares):
            raise CSDValueError(
                "Invalid topk: to optimizer ranks (serve://) gradients go whole, but by ?route=star "
                "(docs/optimizer-ranks.md)"
            )

    def _shape_of(self, p: torch.Tensor) -> torch.Size:
        """Of all of it, as the owners know it."""
        return flat.shape if (flat := self._flat.get(id(p))) else p.shape

    def _measure(self) -> None:
        """Finds out which trainer has how much of FSDP1's parameters; a collective, if some are new."""
        there = {id(p): p for _, _, p in members(self.param_groups) if is_flat(p)}
        new = [p for key, p in there.items() if key not in self._flat or self._flat[key].param is not p]
        if new and self._ranks:
            lengths = self._ranks.gather(*(p.numel() for p in new))
            for p, of_ranks in zip(new, zip(*lengths, strict=True), strict=True):
                self._flat[id(p)] = FlatShard(p, self._ranks, of_ranks)

    def _know(self) -> None:
        """Notes parameters that are new. Raises CSDStoreError for one that takes the place of another kind."""
        self._measure()
        there = {known.index: known for known in self._known.values()}
        known: dict[int, _Param] = {}
        for index, (k, i, p) in enumerate(members(self.param_groups)):
            if id(p) in known:
                raise CSDValueError(f"parameter {name_of(self.param_groups, k, i)} is there twice")
            before = there.get(index)
            if before is not None and before.param is p and (p.shape, p.dtype) == (before.here, before.dtype):
                known[id(p)] = before
                continue
            part, shape = self._flat.get(id(p)) or self._state_map.part_of(p), self._shape_of(p)
            part = UNSHARDED if self._is_star else part
            block = block_of(part, shape)
            new = _Param(p, part, name_of(self.param_groups, k, i), index, block, shape, p.stride(), p.dtype, p.shape)
            if before is not None:  # a trainer has exchanged it, as some do when they move a model
                if (p.shape, p.dtype, block) != (before.here, before.dtype, before.block):
                    raise CSDStoreError(
                        f"parameter {new.name} is {tuple(p.shape)} {p.dtype} now; the optimizer ranks know it as "
                        f"{tuple(before.here)} {before.dtype}: convert the model before the optimizer is made"
                    )
                new.steps, new.stride = before.steps, before.stride
                self._state_map.state.pop(before.param, None)
            known[id(p)] = new
        if list(known) != list(self._known):
            self._known = known
            self._gathers.clear()

    def _blocks(self, first_group: int) -> list[Block]:
        return [self._known[id(p)].block for k, _, p in members(self.param_groups) if k >= first_group]

    def _adopt_store(self) -> None:
        reply = self._opened
        if not reply["recovered"]:
            return
        for group, kept in zip(self.param_groups, reply["groups"], strict=True):
            put_back(group, kept)
        states = unpacked(reply["user_states"]) or [{}]
        rank, size = (self._ranks.rank, self._ranks.size) if self._ranks else (0, 1)
        self.user_state = states[rank] if len(states) == size else states[0]
        for known, steps in zip(self._known.values(), reply["steps"], strict=True):
            known.steps = float(steps)
        self._resumed = True
        self._pull()

    def restore(self) -> None:
        engine = self._live_engine
        if self._resumed:
            with engine.lock:
                self._know()
                for group, kept in zip(self.param_groups, self._opened["groups"], strict=False):
                    put_back(group, kept)
                self._pull()
        elif self._opened["recovered"]:
            raise CSDRuntimeError("restore() goes before the first step()")

    def _pull(self) -> None:
        """Gives parameters the values that the owners have of them; not those on the meta device."""
        there = [known for known in self._known.values() if known.steps and not known.param.is_meta]
        if there:
            self._remote.call({"op": "pull", "params": [known.index for known in there]}, patience=PATIENCE)
            self._receive(there)
        self._show([known for known in self._known.values() if known.steps])

    # ---- a step --------------------------------------------------------------------------

    @property
    def _remote(self) -> RemoteEngine:
        assert isinstance(self._engine, RemoteEngine)
        return self._engine

    @property
    def _placed(self) -> Any:
        return {key for key, known in self._known.items() if known.version != -1}

    def _update(self, engine: Engine, grad_scale: float) -> None:
        remote = self._remote
        self._grad_scale = grad_scale
        with all_ranks_or_none(self._ranks):
            self._check_topk()
            self._know()
            taking_part = participants(self.param_groups, type(self).__name__, self._for_sparse)
            grads = self._grads(taking_part)
            pushed = self._pushed(taking_part)
            selected = self._select(taking_part, grads, pushed, grad_scale)
            user_state = packed(self.user_state)
            hyper = [plain(group, self._rule.hyperparameters) for group in self.param_groups]
        written = [known.index for known in self._written(grads)]
        user_states = [user_state]
        if self._ranks:
            sends = self._sends(grads, selected, grad_scale)
            said = self._ranks.gather_objects((pushed, written, user_state, sends))
            differ = "trainers have gradients of different parameters, or not all have pushed the same"
            pushed = self._agreed([of_rank for of_rank, *_ in said], differ)
            self._agreed([of_rank for *_, of_rank in said], DIFFERENT_WAYS)
            written = sorted({index for _, of_rank, *_ in said for index in of_rank})
            user_states = [of_rank for _, _, of_rank, _ in said]
        entries = [known for known in self._known.values() if known.index in pushed]
        if self.max_grad_norm is not None and not self._is_star:
            norm = self._norm(entries, pushed) * abs(grad_scale)
            grad_scale, self._grad_norm = grad_scale * clip_to(norm, self.max_grad_norm), norm
        if not entries:
            return
        if len(self.param_groups) > self._groups_told:
            self._join()
        hyper_now, states_now = json.dumps(hyper), json.dumps(user_states)
        if len(states_now) > USER_STATE_BYTES:  # the same on all trainers: none of them has sent anything
            raise CSDValueError(
                f"user_state of all trainers has {len(states_now)} bytes as JSON; {USER_STATE_BYTES} are the limit"
            )
        parts = [known.travels(self._wire(known)) for known in entries]
        tensors = {k.index: (grads[k.index], k.block) for k in entries if k.index in grads}
        message = {
            "op": "step",
            "scale": grad_scale,
            "params": [known.index for known in entries],
            "dtypes": [str(self._wire(known)).removeprefix("torch.") for known in entries],
            "pushed": [pushed[known.index] for known in entries],
            "written": written,
            "hyper": None if hyper_now == self._hyper_told else hyper,
            "user_states": None if states_now == self._user_states_told else user_states,
        }
        self._hyper_told = self._user_states_told = ""  # unless all goes well
        by_index = {known.index: known for known in self._known.values()}
        if self._is_star:
            message |= self._for_sum(entries, selected, grad_scale)
            parts = [selected[part.key].part if part.key in selected else part for part in parts]
            tensors |= {index: (entries.values, entries.part.block) for index, entries in selected.items()}
        follow = [part for part in parts if not pushed[part.key]]
        reply = remote.call(
            message,
            sends=[
                (follow, _views(tensors)),
                self._values([by_index[index] for index in written]),
            ],
        )
        self._hyper_told, self._user_states_told, self._resumed = hyper_now, states_now, False
        if self._selection:
            self._grad_norm = reply["grad_norm"]
            self._selection.end(feeds_back=self.error_feedback)
        for known in entries:
            known.steps += 1
        self._runner.taken += 1
        gathered = self._receive(entries)
        for index in written:
            by_index[index].is_ours()
        self._show(entries)
        self._moved = (
            sum(known.block.numel for known in entries),
            sum(part.block.numel * part.dtype.itemsize for part in parts),
            gathered,
        )
        self._route = "star" if self._is_star else "slices" if any(pushed.values()) else "kept"

    # ---- gradients that leave in backward: see push() ---------------------------------------

    def _take_bucket(self, bucket: Any) -> Any:
        engine = self._engine
        if self._address.route == "kept" or engine is None or engine.closed:
            return mean_of(self._ranks, bucket.buffer())  # step() says that it is closed
        remote = self._remote
        if self._selection and self._selection.is_used(self.topk, self.param_groups):
            return self._leave_to_step(bucket, remote.early)
        if remote.early is None:
            with all_ranks_or_none(self._ranks), engine.lock:
                remote.call({"op": "listen"})
            remote.begin_early(star=self._is_star)
        assert remote.early
        return remote.early.take(bucket, self._leaves)

    def _leave_to_step(self, bucket: Any, early: Early | None) -> Any:
        """Of a bucket from which step() selects: DDP leaves its gradients as they are, and reduces the others."""
        own = self._unreduced
        others: list[torch.Tensor] = []
        if bucket.index() == 0:
            own.clear()
            if early:
                early.forget()  # what an earlier backward has pushed
        for p, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            (others if self._leaves(p, grad) is None else own).append(grad)
        future = mean_of(self._ranks, bucket.buffer(), others)
        if bucket.is_last():
            tell_overflow(self._ranks, own, finite=all(bool(grad.isfinite().all()) for grad in own))
            own.clear()
        return future

    def _leaves(self, p: torch.Tensor, grad: torch.Tensor) -> Part | None:
        """What this trainer pushes of a gradient in DDP's bucket; None: owners do not know the parameter.

        The same on all trainers.
        """
        known = self._known.get(id(p))
        told = sum(len(group["params"]) for group in self.param_groups[: self._groups_told])
        if known is None or known.param is not p or known.index >= told or not grad.numel():
            return None
        if not is_replicated(p) or (grad.dtype, grad.shape) != (known.dtype, known.shape):
            return None
        return known.travels(self._wire(known))

    def _pushed(self, taking_part: Participants) -> dict[int, int]:
        """By number of a parameter the backward in which its gradient has left; 0: it leaves in the step.

        Raises CSDRankError if the session is over, CSDRuntimeError if a gradient is not what has left.
        """
        known = [self._known[id(p)] for p in taking_part.params]
        early = self._remote.early
        if early is None:
            return dict.fromkeys((k.index for k in known), 0)
        with self._remote.exchange():
            early.settle()
        unscaled = getattr(self, "found_inf", None) is not None and getattr(self, "grad_scale", None) is None
        return {
            k.index: early.left(k.index, k.name, g, joined=self._joined, unscaled=unscaled)
            for k, g in zip(known, taking_part.grads, strict=True)
        }

    def _norm(self, entries: Sequence[_Param], pushed: dict[int, int]) -> float:
        """Of all gradients; a collective, the same on all trainers."""
        norm = global_norm((known.param, known.part) for known in entries if not pushed[known.index])
        early = self._remote.early
        if early is None or not any(pushed.values()):
            return norm
        counts = [k for k in entries if pushed[k.index] and (k.shape or not self._ranks or not self._ranks.rank)]
        square = sum(early.square(known.index) for known in counts)
        squares = self._ranks.gather_objects(square) if self._ranks else [square]
        return math.sqrt(sum(squares) + norm**2)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if isinstance(self._engine, RemoteEngine) and self._engine.early:
            self._engine.early.forget()
        super().zero_grad(set_to_none)

    def _agreed(self, said: Sequence[dict[int, Any]], differ: str) -> dict[int, Any]:
        """What each trainer says of parameters, by number. Raises CSDRankError with that text if they `differ`.

        What is absent on one of them may be missing there.
        """
        agreed = {index: value for of_rank in said for index, value in of_rank.items()}
        lengths = {known.index: flat.lengths for key, known in self._known.items() if (flat := self._flat.get(key))}
        for rank, of_rank in enumerate(said):
            present = (index for index in agreed if index not in lengths or lengths[index][rank])
            if any(of_rank.get(index) != agreed[index] for index in present):
                raise CSDRankError(differ)
        return dict(sorted(agreed.items()))

    def _select(
        self, taking_part: Participants, grads: dict[int, torch.Tensor], pushed: dict[int, int], grad_scale: float
    ) -> dict[int, Entries]:
        """What is sent as entries (Top-K), by number of the parameter. Raises CSDValueError if a `topk` is none."""
        if self._selection is None:
            return {}
        there = []
        for p, group in zip(taking_part.params, taking_part.groups_of, strict=True):
            known = self._known[id(p)]
            if not pushed[known.index]:
                step = int(known.steps) + 1
                there.append(Source(known.index, known.param, known.stride, grads[known.index], group, step))
        return self._selection.select(there, self.param_groups, self._grad_options, grad_scale)

    def _sends(
        self, grads: dict[int, torch.Tensor], selected: dict[int, Entries], grad_scale: float
    ) -> dict[int, tuple[Any, ...]]:
        """In which way gradients go, by number: owners know the leader's, and expect the same of all trainers."""
        own = grad_scale if self._is_star else None  # else it is that of a mean
        there = [known for known in self._known.values() if known.index in grads]
        ways = {known.index: (str(self._wire(known)), 0.0, own) for known in there}
        return ways | {index: (str(e.dtype), e.share, own) for index, e in selected.items()}

    def _for_sum(self, entries: Sequence[_Param], selected: dict[int, Entries], grad_scale: float) -> dict[str, Any]:
        """What owners that sum gradients are told of a step: the mean is theirs to make, and the norm of it."""
        sent = [selected.get(known.index) for known in entries]
        dtypes = [e.dtype if e else self._wire(known) for known, e in zip(entries, sent, strict=True)]
        return {
            "scale": grad_scale / (self._ranks.size if self._ranks else 1),
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "shares": [e.share if e else 0.0 for e in sent],
            "max_grad_norm": self.max_grad_norm,
        }

    def _grads(self, taking_part: Participants) -> dict[int, torch.Tensor]:
        """This trainer's part of each gradient, by number. Raises CSDTypeError, CSDValueError if one cannot be sent."""
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
            self._wire(known)
            grads[known.index] = known.part.of(g)
        return grads

    def _written(self, grads: dict[int, torch.Tensor]) -> list[_Param]:
        """Those whose values the owners lack: of parameters with a gradient, and of those that they have had before."""
        there = [known for known in self._known.values() if not known.param.is_meta and known.is_written]
        return [known for known in there if known.index in grads or known.version != -1 or known.steps]

    def _wire(self, known: _Param) -> torch.dtype:
        """How a gradient travels. Raises CSDValueError for a `grad_dtype` that would not arrive as it is."""
        dtype, wanted = known.param.dtype, self.grad_dtype
        if wanted in (None, dtype, torch.float32) and not (wanted and dtype.is_complex):
            return dtype
        if dtype is not torch.float32:
            raise CSDValueError(
                f"Invalid grad_dtype: {wanted}; to optimizer ranks (serve://) it is the parameter's own, or one of 16 "
                f"bits for fp32 parameters, and {known.name} is {dtype}"
            )
        assert wanted is not None
        return wanted

    def _join(self) -> None:
        """Tells the owners of parameter groups that are new."""
        first = self._groups_told
        new = [group_message(self._described(k)) for k in range(first, len(self.param_groups))]
        self._remote.call({"op": "join", "groups": new}, blocks=self._blocks(first))
        self._groups_told = len(self.param_groups)

    def _values(self, there: Sequence[_Param]) -> tuple[list[Part], ViewOf]:
        """The parameters themselves, to be sent or received."""
        parts = [known.travels(known.param.dtype) for known in there]
        return parts, _views({known.index: (known.local, known.block) for known in there})

    def _receive(self, there: Sequence[_Param]) -> int:
        """New values of parameters, from owners and then from the other trainers. Returns bytes of the latter."""
        with torch.no_grad():
            self._remote.fetch(*self._values(there))
            divided = (known for known in there if known.part.replicas)
            shares = [_Share(known.param, known.part, known.local, known.index) for known in divided]
            gathered = 0
            if self._ranks and shares:
                key = tuple((share.index, share.local.data_ptr()) for share in shares)
                if key not in self._gathers:
                    self._gathers.clear()
                    self._gathers[key] = ParamAllGather(self._ranks, None, shares)
                gather = self._gathers[key]
                gather.begin()
                gather.finish()
                gathered = gather.received_bytes
            torch.autograd.graph.increment_version([known.param for known in there])
        for known in there:
            known.is_ours()
        return gathered

    # ---- states, which are elsewhere -----------------------------------------------------

    def _show(self, there: Sequence[_Param]) -> None:
        """`state` has the count of steps, and of the rest tensors without data that nobody can save."""
        for known in there:
            if known.is_absent:
                continue
            group = next(g for g in self.param_groups if any(p is known.param for p in g["params"]))
            entry = self._state_map.state[known.param]
            if "step" not in entry:
                for name in self._rule.sections_for(group):
                    entry[name] = _without_data(known.param)
                entry["step"] = torch.zeros(())
            entry["step"].fill_(known.steps)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with this trainer's part of all states in memory, which all trainers fetch together.

        Where all of them hold the same plain parameters, as under DDP, libraries ask one of them alone, and what it
        gets has no data: call consolidate_state_dict() before, or once consolidate_state_dict(None).
        """
        alike = bool(self._ranks) and all(is_replicated(known.param) for known in self._known.values())
        fetches = not alike or self._asked_together
        if fetches and not self._consolidates and any(known.steps for known in self._known.values()):
            self.consolidate_state_dict(None)
        return super().state_dict()

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        to = None if self._flat else to  # only FSDP1 puts its shards together
        self._forget_consolidated()
        self._asked_together |= to is None
        engine = self._live_engine
        with all_ranks_or_none(self._ranks):
            self._know()
        with engine.lock:
            said = self._remote.call({"op": "state", "to": to})["states"]
            if to is None or not self._ranks or self._ranks.rank == to:
                states = self._fetch_states(said, whole=to is not None)
                self._fetched = states if to is None else None
                self._show_consolidated(states)
        self._consolidates = True

    def _forget_consolidated(self) -> None:
        super()._forget_consolidated()
        self._consolidates, self._fetched = False, None

    def _fetch_states(self, said: list[Any], *, whole: bool) -> dict[int, dict[str, torch.Tensor]]:
        """What the owners send of these states: `whole`, or this trainer's part, as `state` shows it elsewhere."""
        by_index = {known.index: known for known in self._known.values()}
        states: dict[int, dict[str, torch.Tensor]] = {}
        there: list[tuple[_Param, torch.Tensor]] = []
        for index, step, names in said:
            known = by_index[index]
            dtype = _dtype_of_states(known.dtype)
            entry: dict[str, torch.Tensor] = {"step": torch.tensor(float(step))}
            for name in names:
                if whole:
                    value = entry[name] = torch.empty(known.shape, dtype=dtype, device="cpu")
                else:
                    value = torch.empty_like(known.local, dtype=dtype, device="cpu")
                    entry[name] = known.part.show(value)
                there.append((known, value))
            if not known.is_absent:
                states[index] = entry
        self._remote.fetch(*_states(there, whole=whole))
        warn_if_large(sum(value.nbytes for _, value in there), FETCHED)
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As elsewhere. What state_dict() shows without data stays as it is with the owners."""
        engine = self._live_engine
        shown = self._state_map.state
        as_they_are = _values_of(state_dict["state"]) == _values_of(shown)
        if self._ranks and len({*self._ranks.gather(as_they_are)}) > 1:
            raise CSDRankError("some trainers load states, others what stands for those of the owners")
        with all_ranks_or_none(self._ranks):
            self._know()
            self._check_and_take(engine, {**state_dict, "state": {}} if as_they_are else state_dict)
        given, self._state_map.state = self._state_map.state, shown
        if not as_they_are:
            self._send_states([(known, entry) for known in self._known.values() if (entry := given.get(known.param))])

    def _send_states(self, entries: Sequence[tuple[_Param, Mapping[str, Any]]]) -> None:
        """Of each trainer its part of these states, which are all that there are. Durable with the owners then."""
        states = {known.index: entry for known, entry in entries}
        names = {i: [n for n in self._rule.sections if isinstance(e.get(n), torch.Tensor)] for i, e in states.items()}
        said = {i: (float(entry.get("step", 0)), names[i]) for i, entry in states.items()}
        if self._ranks:
            said = self._agreed(self._ranks.gather_objects(said), "trainers load different states")
        by_index = {known.index: known for known in self._known.values()}
        there = [by_index[index] for index in said]
        sent = []
        for known in there:
            entry = states.get(known.index, {})
            parts = (known.part.of_state(entry[n]).detach() if entry else known.local for n in said[known.index][1])
            sent += [(known, part) for part in parts]
        if len(self.param_groups) > self._groups_told:
            self._join()
        self._remote.call(
            {
                "op": "load",
                "states": [[index, step, names] for index, (step, names) in said.items()],
                "written": [known.index for known in there],
                "hyper": [plain(group, self._rule.hyperparameters) for group in self.param_groups],
            },
            sends=[_states(sent), self._values(there)],
            patience=PATIENCE,
        )
        self._state_map.state.clear()
        for known in self._known.values():
            known.steps = said[known.index][0] if known.index in said else 0.0
        for known in there:
            known.is_ours()
        self._show(there)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """What is written within to the tensors of state_dict(), before or here, goes to the owners.

        Durable at the end, as a whole or not at all. All trainers call it.
        """
        if self._fetched is None:
            self.consolidate_state_dict(None)
        states = self._fetched or {}
        with all_ranks_or_none(self._ranks):
            yield
        self._send_states([(known, states[known.index]) for known in self._known.values() if known.index in states])

    # ---- the rest ------------------------------------------------------------------------

    def overlap(self, model: torch.nn.Module | None, **_: Any) -> None:
        if model is not None:
            raise CSDRuntimeError(
                "overlap() hides steps of this machine's devices, not those of optimizer ranks (serve://)"
            )

    def stats(self) -> dict[str, Any]:
        """What this trainer knows of the last step: the owners' terminals tell of devices."""
        params, pushed, gathered = self._moved
        return {
            "route": self._route,
            "params": params,
            "push_bytes": pushed,
            "gathered_bytes": gathered,
            "seconds": {"step": self._seconds},
            "skipped": self._skipped,
            "grad_norm": self._grad_norm,
            "devices": [],
        }

    def save(self, path: str | os.PathLike[str], *, wait: bool = True, progress: bool = False) -> Future[Path]:
        """A snapshot on the owners' machines, as elsewhere; all trainers call it. Nobody shows `progress`."""
        there = Path(os.fsdecode(path))
        if not there.is_absolute():
            raise CSDValueError(f"Invalid path: {str(there)!r}; the owners' machines know absolute ones only")
        with self._settled(meets=True):
            return self._remote.save(there, wait=wait)

    def close(self) -> None:
        """The last step of one trainer alone is durable then. Of several, call synchronize() on all of them before."""
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


@dataclass
class _Share:
    """As ParamAllGather wants it."""

    param: torch.Tensor
    part: Partition
    local: torch.Tensor
    index: int


def _views(there: dict[int, tuple[torch.Tensor, Block]]) -> ViewOf:
    """Of tensors that are these blocks, by key."""

    def view_of(key: int, block: Block) -> torch.Tensor:
        tensor, within = there[key]
        return block.of(tensor, within)

    return view_of


def _states(there: Sequence[tuple[_Param, torch.Tensor]], *, whole: bool = False) -> tuple[list[Part], ViewOf]:
    """States, one after another: fp32, of the part of each parameter that this trainer has, or of all of it."""
    parts = [
        Part(k, tuple(known.shape), all_of(known.shape) if whole else known.block, _dtype_of_states(known.dtype))
        for k, (known, _) in enumerate(there)
    ]
    return parts, _views({part.key: (t, part.block) for part, (_, t) in zip(parts, there, strict=True)})


def _dtype_of_states(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def _values_of(state: Mapping[Any, Any]) -> set[int]:
    """Which tensors there are in `state`, but for steps."""
    return {id(v) for entry in state.values() for name, v in entry.items() if name != "step"}


def _without_data(p: torch.Tensor) -> torch.Tensor:
    shown = torch.empty(p.shape, dtype=_dtype_of_states(p.dtype), device="meta")

    def refuse(_: Any) -> Any:
        raise CSDRuntimeError(f"this cannot be copied or saved: {ELSEWHERE}")

    def stay(*_: Any, **__: Any) -> torch.Tensor:
        return shown

    shown.__reduce_ex__ = refuse  # type: ignore[method-assign]
    shown.to = stay  # type: ignore[method-assign]  # Lightning moves `state` when it has resumed, and at its end
    return shown
