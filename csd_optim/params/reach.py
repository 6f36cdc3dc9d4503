"""What the devices can read and write of a parameter as it is now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..bindings import DTYPE_CODES, FROM_PARAM, IN_PARAM, IN_SECTION, UNLESS_SET
from ..distributed.sharding import Partition
from .strides import same_order


class Placed(Protocol):
    """The attributes of a ParamState on which its Reach depends."""

    param: torch.Tensor
    part: Partition
    stride: tuple[int, ...]
    state_device: torch.device
    reachable: bool
    images_only: bool
    reach: Reach

    @property
    def is_coded(self) -> bool:
        """Whether the devices keep its states as codes."""


@dataclass(frozen=True, eq=False)
class Reach:
    """What the devices can read and write of a parameter, as ParamState.refresh() last found it.

    A program that writes to the parameter, moves or converts it may change everything here, and nothing else about the
    parameter's place. Then refresh() makes another Reach: it is replaced as a whole.
    """

    local: torch.Tensor  # the part of the parameter that this process updates
    pointer: int  # its address, to notice that the parameter was moved; -1: not examined yet
    # Where a step finds the master unless Truth.master_of() knows better: a csd_master.
    #   IN_PARAM    the parameter is its own only master
    #   FROM_PARAM  the section's value is that of the parameter: fp32 in host memory; with codes, anywhere
    #   UNLESS_SET  16 bits in host memory, writes not counted by torch: the step compares values
    #   IN_SECTION  all others
    master_source: int
    # The dtype that lets the engine access contiguous gradients, and the parameter, in place; None: not possible.
    direct_dtype: torch.dtype | None

    @classmethod
    def unexamined(cls, own_master: torch.Tensor, *, in_place: bool) -> Reach:
        """Return what is known before the first refresh(). `in_place`: the devices want no other master if possible."""
        return cls(own_master.to("meta"), -1, IN_PARAM if in_place else IN_SECTION, None)

    @classmethod
    def of(cls, place: Placed, grad_dtype: torch.dtype | None) -> Reach:
        """Examine the parameter. `grad_dtype`: the optimizer's option."""
        p = place.part.of(place.param)
        on_host, in_order = p.device.type == "cpu", same_order(p.stride(), place.stride, p.shape)
        is_flat = in_order and p.is_contiguous()
        is_fp32, is_half = p.dtype is torch.float32, p.dtype in (torch.float16, torch.bfloat16)
        master_source = IN_SECTION
        # Once a parameter could not be its own master, it never is again: the master may have more bits.
        if place.reach.in_place and is_flat and is_fp32 and p.device == place.state_device:
            master_source = IN_PARAM
        elif place.reachable and place.is_coded:
            # Neither device nor order matter: ParamState.source() copies a parameter into the right order, and
            # parameters outside host memory travel in images.
            master_source = IN_SECTION if is_half else FROM_PARAM
        elif place.reachable and on_host and in_order:
            uncounted = place.part.writes_uncounted or place.param.is_inference()
            master_source = FROM_PARAM if is_fp32 else UNLESS_SET if is_half and uncounted else IN_SECTION
        is_direct = on_host and is_flat and p.dtype in DTYPE_CODES and not place.images_only
        direct_dtype = p.dtype if is_direct and grad_dtype in (None, p.dtype) else None
        return cls(p, place.part.pointer(place.param), master_source, direct_dtype)

    @property
    def in_place(self) -> bool:
        """Whether the parameter is its own only master."""
        return bool(self.master_source == IN_PARAM)
