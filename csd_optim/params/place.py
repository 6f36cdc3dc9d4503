"""The place of a new parameter's states: the next one in an extent of the devices, or tensors on the accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..distributed.sharding import Partition
from ..engine.accelerator_codes import ParamCodes
from ..engine.decoded_states import DecodedStates
from ..engine.engine import Engine
from ..store.sections import FP32
from .param_state import CPU, ParamState
from .reach import Reach
from .strides import numel


@dataclass
class Place:
    """A place for the states of the part that this process updates. `shape`, `stride`: of the states."""

    extent: int  # index in Tiles.extents
    shape: Sequence[int]
    stride: tuple[int, ...]
    rule: str  # name of the update rule
    initial: Mapping[str, float]  # initial values of states, where not zero
    # The states, if only on the accelerator: tensors by name, or codes.
    states: Mapping[str, torch.Tensor] | ParamCodes | None = None

    def take(self, engine: Engine, p: torch.Tensor, part: Partition, name: str, index: int) -> ParamState:
        """Return the ParamState of a parameter that gets this place. `index`: its number over all extents."""
        extent, on_accelerator = engine.tiles.extents[self.extent], self.states is not None
        codes = self.states if isinstance(self.states, ParamCodes) else None
        states = {} if self.states is None or isinstance(self.states, ParamCodes) else self.states
        i, coded, devices = index - extent.first_param, extent.codec != FP32, engine.devices
        on_demand = coded or (devices.states_on_demand and not on_accelerator)
        dtype = torch.complex64 if p.is_complex() else torch.float32
        windows = {"step": torch.from_numpy(engine.states.steps[self.extent])[i]}
        for s in (*range(1, len(extent.sections)), 0):  # the master last, as in `state`
            section = extent.sections[s]
            if states:
                windows[section] = states[section]
            elif not on_demand:
                windows[section] = engine.windows.window(extent, i, s, dtype).as_strided(self.shape, self.stride)
        if on_demand:
            own_master = torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")
        else:
            own_master = windows["master"]
        # Devices in host memory update an fp32 parameter in place, so that the master is not stored twice.
        in_place = not coded and (own_master.is_meta if states else devices.resident and p.dtype is torch.float32)
        decoded: DecodedStates | None = engine.decoded if on_demand else None
        if codes:
            decoded = engine.states.accelerator_codes
            engine.states.accelerator_codes.by_param[index] = codes
        return ParamState(
            p,
            part,
            name,
            index=index,
            sections=extent.sections,
            rule=self.rule,
            stride=self.stride,
            windows=windows,
            shown={key: window if key == "step" else part.show(window) for key, window in windows.items()},
            own_master=own_master,
            numel=numel(own_master),
            reach=Reach.unexamined(own_master, in_place=in_place),
            # The kernel for codes reads the parameter, wherever it is.
            reachable=codes is not None or (devices.reaches_params and not on_accelerator),
            images_only=devices.images_only and not on_accelerator,
            state_device=part.of(p).device if on_accelerator else CPU,
            decoded=decoded,
            codes=codes,
            kept_dtype=p.dtype if coded else None,
            initial=self.initial,
        )
