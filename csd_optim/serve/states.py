"""`state`, checkpoints and consolidation on a trainer whose states are with optimizer ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..distributed.ranks import all_ranks_or_none
from ..distributed.sharding import is_replicated
from ..errors import CSDRankError, CSDRuntimeError
from ..params.groups import hyperparameters_of
from ..params.memory_warnings import FETCHED, warn_if_large
from .answers import check_state_list
from .blocks import Part, ViewOf
from .blocks import whole as all_of
from .model import TrainerModel, TrainerParam, views
from .wire import LONG_TIMEOUT

ELSEWHERE = (
    "the states are with the optimizer ranks (serve://). Before this, call consolidate_state_dict() on all trainers, "
    "which fetches all states into the memory of one trainer, or consolidate_state_dict(None), which fetches to each "
    "trainer its part. Or call save(path) for a snapshot on the owners' machines, or run `csd-optim export` there "
    "(docs/optimizer-ranks.md)"
)


class StatesElsewhere(TrainerModel):
    """The methods of an optimizer that deal with states."""

    def _reset_states(self) -> None:
        """Reset to the state before any states were fetched."""
        self._is_consolidated = False  # consolidate_state_dict() was called, and no step since
        self._fetched_by_all = False  # all trainers call state_dict(), also under DDP
        self._fetched: dict[int, dict[str, torch.Tensor]] | None = None  # this trainer's part of states, by parameter

    def _show(self, params: Sequence[TrainerParam]) -> None:
        """Fill `state` with the count of steps, and with tensors without data that refuse to be saved."""
        for known in params:
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
        """Return torch's state dict with this trainer's part of all states, which all trainers fetch together.

        Where all trainers hold the same plain parameters, as under DDP, libraries call this on one trainer only, so
        nothing is fetched and the tensors have no data. To get the states there, call consolidate_state_dict() before,
        or consolidate_state_dict(None) once.
        """
        alike = bool(self._ranks) and all(is_replicated(known.param) for known in self._known.values())
        fetches = not alike or self._fetched_by_all
        if fetches and not self._is_consolidated and any(known.steps for known in self._known.values()):
            self.consolidate_state_dict(None)
        return super().state_dict()

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        to = None if self._flat else to  # only FSDP1 itself can assemble its shards
        self._forget_consolidated()
        self._fetched_by_all |= to is None
        engine = self._settled_engine()
        with all_ranks_or_none(self._ranks):
            self._register_params()
        with engine.lock:
            reply = self._remote.call({"op": "state", "to": to})
            state_list = check_state_list(reply, len(self._known), self._rule.sections)
            if to is None or not self._ranks or self._ranks.rank == to:
                states = self._fetch_states(state_list, whole=to is not None)
                self._fetched = states if to is None else None
                self._show_consolidated(states)
        self._is_consolidated = True

    def _forget_consolidated(self) -> None:
        super()._forget_consolidated()
        self._is_consolidated, self._fetched = False, None

    def _fetch_states(self, state_list: list[Any], *, whole: bool) -> dict[int, dict[str, torch.Tensor]]:
        """Receive these states from the owners: with `whole` all of each, else this trainer's part as with devices."""
        by_index = {known.index: known for known in self._known.values()}
        states: dict[int, dict[str, torch.Tensor]] = {}
        values: list[tuple[TrainerParam, torch.Tensor]] = []
        for index, step, names in state_list:
            known = by_index[index]
            dtype = _dtype_of_states(known.dtype)
            entry: dict[str, torch.Tensor] = {"step": torch.tensor(float(step))}
            for name in names:
                if whole:
                    value = entry[name] = torch.empty(known.shape, dtype=dtype, device="cpu")
                else:
                    value = torch.empty_like(known.local, dtype=dtype, device="cpu")
                    entry[name] = known.part.show(value)
                values.append((known, value))
            if not known.is_absent:
                states[index] = entry
        parts, view_of = states_of(values, whole=whole)
        self._remote.fetch(self._remote.buckets_with_owners(parts), view_of)
        warn_if_large(sum(value.nbytes for _, value in values), FETCHED)
        return states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states, as with devices. If they are the tensors without data in `state`, the owners keep theirs."""
        engine = self._settled_engine()
        shown = self._state_map.state
        is_unchanged = _tensor_ids(state_dict["state"]) == _tensor_ids(shown)
        if self._ranks and len({*self._ranks.gather(is_unchanged)}) > 1:
            raise CSDRankError("some trainers load states, others the tensors without data from their own state_dict()")
        with all_ranks_or_none(self._ranks):
            self._register_params()
            self._check_and_load(engine, {**state_dict, "state": {}} if is_unchanged else state_dict)
        given, self._state_map.state = self._state_map.state, shown
        if not is_unchanged:
            self._send_states([(known, entry) for known in self._known.values() if (entry := given.get(known.param))])

    def _send_states(self, entries: Sequence[tuple[TrainerParam, Mapping[str, Any]]]) -> None:
        """Send the owners this trainer's part of these states, which replace all others. Durable on return."""
        states = {known.index: entry for known, entry in entries}
        names = {i: [n for n in self._rule.sections if isinstance(e.get(n), torch.Tensor)] for i, e in states.items()}
        steps_and_names = {i: (float(entry.get("step", 0)), names[i]) for i, entry in states.items()}
        if self._ranks:
            steps_and_names = self._agreed(
                self._ranks.gather_objects(steps_and_names), "trainers load different states"
            )
        by_index = {known.index: known for known in self._known.values()}
        params = [by_index[index] for index in steps_and_names]
        sent = []
        for known in params:
            entry = states.get(known.index, {})
            parts = (
                known.part.of_state(entry[n]).detach() if entry else known.local
                for n in steps_and_names[known.index][1]
            )
            sent += [(known, part) for part in parts]
        if len(self.param_groups) > self._groups_sent:
            self._send_new_groups()
        self._remote.call(
            {
                "op": "load",
                "states": [[index, step, names] for index, (step, names) in steps_and_names.items()],
                "written": [known.index for known in params],
                "hyper": [hyperparameters_of(group, self._rule.hyperparameters) for group in self.param_groups],
            },
            sends=[states_of(sent), self._value_parts(params)],
            timeout=LONG_TIMEOUT,
        )
        self._state_map.state.clear()
        for known in self._known.values():
            known.steps = steps_and_names[known.index][0] if known.index in steps_and_names else 0.0
        for known in params:
            known.mark_synced()
        self._show(params)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """On exit, send the owners what was written to the tensors of state_dict(), whether before or inside.

        The states become durable at the end, all or none. A collective of the trainers.
        """
        if self._fetched is None:
            self.consolidate_state_dict(None)
        states = self._fetched or {}
        with all_ranks_or_none(self._ranks):
            yield
        self._send_states([(known, states[known.index]) for known in self._known.values() if known.index in states])


def states_of(values: Sequence[tuple[TrainerParam, torch.Tensor]], *, whole: bool = False) -> tuple[list[Part], ViewOf]:
    """Return parts and views for these states (fp32 or complex64), in this order.

    With `whole` they cover the whole of each parameter, else this trainer's part.
    """
    parts = [
        Part(k, tuple(known.shape), all_of(known.shape) if whole else known.block, _dtype_of_states(known.dtype))
        for k, (known, _) in enumerate(values)
    ]
    return parts, views({part.key: (t, part.block) for part, (_, t) in zip(parts, values, strict=True)})


def _dtype_of_states(dtype: torch.dtype) -> torch.dtype:
    return torch.complex64 if dtype.is_complex else torch.float32


def _tensor_ids(state: Mapping[Any, Any]) -> set[int]:
    """Return the ids of the tensors in `state`, except those of `step`."""
    return {id(v) for entry in state.values() for name, v in entry.items() if name != "step"}


def _without_data(p: torch.Tensor) -> torch.Tensor:
    shown = torch.empty(p.shape, dtype=_dtype_of_states(p.dtype), device="meta")

    def refuse(_: Any) -> Any:
        raise CSDRuntimeError(f"this cannot be copied or saved: {ELSEWHERE}")

    def stay(*_: Any, **__: Any) -> torch.Tensor:
        return shown

    shown.__reduce_ex__ = refuse  # type: ignore[method-assign]
    shown.to = stay  # type: ignore[method-assign]  # Lightning moves `state` after resuming and at the end
    return shown
