"""fp32 tensors of states that cannot be shown as they are stored: such states are *decoded* on first use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch


class DecodedStates:
    """The decoded states of some parameters, and which of them the program has written.

    A step that changes the states drops the decoded tensors here; a tensor that the user kept still has the old states.
    Writes to the tensors take effect with the next step, or with an earlier flush. They are noticed by torch's version
    counters, as for windows.
    """

    def __init__(self) -> None:
        # By parameter: the states in memory, 1-D in the parameter's memory order; states that nobody needs may be
        # absent.
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        self._views: dict[int, dict[str, torch.Tensor]] = {}  # by parameter: the same states as views() returns them
        self._watched: dict[int, list[tuple[str, torch.Tensor, int]]] = {}  # all tensors of states, and versions

    # ---- where the states are stored -----------------------------------------------------

    def _sections(self, param: int) -> Sequence[str]:
        """Return the names of a parameter's states, the master first."""
        raise NotImplementedError

    def _numel(self, param: int) -> int:
        raise NotImplementedError

    def _decode(self, param: int, wanted: Mapping[str, torch.Tensor]) -> None:
        """Fill the tensors `wanted`, by name, with a parameter's stored states. Raises CSDOSError."""
        raise NotImplementedError

    def check_open(self) -> None:
        """Raise CSDRuntimeError if the states can no longer be read."""
        raise NotImplementedError

    def relocate(
        self, param: int, in_place: torch.Tensor | None, in_order: Callable[[], torch.Tensor], *, fresh: bool
    ) -> None:
        """Note where a coded parameter is now. `fresh`: it was not examined before.

        `in_place`: the parameter, 1-D; None if it cannot be accessed in place in host memory. `in_order`: returns the
        parameter, or a copy, 1-D in the order of the states.
        """
        raise NotImplementedError

    def is_own_master(self, param: int) -> bool:
        """Return whether the parameter itself serves as its master section, so that no section is stored."""
        raise NotImplementedError

    def note_rounded(self, param: int) -> None:
        """Note that the parameter equals its rounded master, which was just written."""

    # ---- reads ---------------------------------------------------------------------------

    @property
    def in_memory(self) -> set[int]:
        """Parameters whose decoded states are in memory now."""
        return {*self._states}

    def states(self, param: int) -> dict[str, torch.Tensor]:
        """Return all states of a parameter by name, 1-D fp32, as the next step will find them. Raises CSDOSError.

        Returns the same tensors until a step changes the states. Waits for writes. Not while a step is in flight.
        """
        return self._read(param, self._sections(param))

    def state(self, param: int, name: str) -> torch.Tensor:
        """Return one state of a parameter, without reading the others."""
        return self._read(param, [name])[name]

    def _read(self, param: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read the states `names` of a parameter unless they are in memory; return all that are."""
        self.check_open()
        here = self._states.get(param, {})
        if here.keys() >= {*names}:
            return here
        numel = self._numel(param)
        new = {
            name: torch.empty(numel, dtype=torch.float32, device="cpu")
            for name in self._sections(param)
            if name in names and name not in here
        }
        self._decode(param, new)
        self._states[param] = here = {**here, **new}
        self._watched.setdefault(param, []).extend((name, state, state._version) for name, state in new.items())
        return here

    def replace(self, param: int, states: Mapping[str, torch.Tensor]) -> None:
        """Make the next step start from `states`: 1-D fp32, contiguous, on the CPU, used by nobody else.

        Other states of the parameter do not change, and are not read.
        """
        others = [entry for entry in self._watched.get(param, ()) if entry[0] not in states]
        self._states[param] = {**self._states.get(param, {}), **states}
        self._views.pop(param, None)
        self._watched[param] = others + [(name, state, -1) for name, state in states.items()]

    def views(self, param: int, view: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states as `view` presents them. Users may write to these tensors; their versions are watched."""
        if param not in self._views:
            self.states(param)
            names = self._sections(param)
            self._views[param] = views = {name: view(self._states[param][name]) for name in names}
            self._watched[param] += [(name, tensor, tensor._version) for name, tensor in views.items()]
        return self._views[param]

    # ---- what was written ----------------------------------------------------------------

    def written(self) -> dict[int, set[str]]:
        """Return, by parameter, the names of the states that were written since they were decoded."""
        found = ((param, self._names_written(param)) for param in self._watched)
        return {param: names for param, names in found if names}

    def _names_written(self, param: int) -> set[str]:
        return {name for name, tensor, version in self._watched.get(param, ()) if tensor._version != version}

    def versions(self) -> dict[int, list[int]]:
        """Return, for the parameters in written(), torch's versions of their tensors: later writes change these."""
        return {param: [tensor._version for _, tensor, _ in self._watched[param]] for param in self.written()}

    def edits(self, param: int) -> dict[str, torch.Tensor]:
        """Return the states, by name, that the program has written, and no step has started from."""
        return {name: self._states[param][name] for name in self._names_written(param)}

    def is_master_written(self, param: int) -> bool:
        """Return whether the master was written since it was decoded."""
        return "master" in self._names_written(param)

    def forget_unwritten(self, params: Iterable[int] | None = None) -> None:
        """Drop unwritten decoded states, which are stale or no longer needed. `params`: None for all parameters."""
        self.drop([p for p in (list(self._states) if params is None else params) if not self._names_written(p)])

    def drop(self, params: Iterable[int]) -> None:
        """Drop decoded states, including writes to them."""
        for param in params:
            self._states.pop(param, None)
            self._watched.pop(param, None)
            self._views.pop(param, None)
