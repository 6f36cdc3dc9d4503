"""The kernels that cards need for the rules and state dtypes of an optimizer's groups."""

from __future__ import annotations

from collections.abc import Sequence

from ..devices.spec import DeviceSpec
from ..devices.xclbin import KERNELS, find_kernels, kernel_for
from ..errors import CSDValueError
from ..params.groups import Groups
from ..params.state_map import StateMap


def kernels_for(specs: Sequence[DeviceSpec], groups: Groups, state_map: StateMap) -> list[str]:
    """Return the names of the kernels that update these groups.

    Raises CSDValueError if no such kernel exists for a device.
    """
    found = []
    for group in groups:
        rule, state_dtype = state_map.rule_of(group).name, group.get("state_dtype", state_map.state_dtype)
        kernel = kernel_for(rule, state_dtype)
        for spec in specs:
            if spec.kind.rules is not None and rule not in spec.kind.rules:
                raise CSDValueError(
                    f"{spec} has no kernel for {rule}, the rule of a parameter group, but for "
                    f"{', '.join(sorted(spec.kind.rules))}: take devices that the CPU updates, such as a directory"
                )
            if spec.kind.rules is not None and kernel not in KERNELS:
                raise CSDValueError(
                    f"{spec} has no kernel for {state_dtype} states of {rule}, the rule of a parameter group: keep "
                    "them in fp32, or take devices that the CPU updates, such as a directory"
                )
        found.append(kernel)
    return sorted({*found})


def check_kernels(specs: Sequence[DeviceSpec], groups: Groups, state_map: StateMap) -> None:
    """Raise CSDValueError or CSDUnavailableError if one of these open devices lacks a kernel that groups need."""
    needed = kernels_for(specs, groups, state_map)
    for spec in specs:
        if spec.kind.on_card:
            find_kernels(spec.xclbin, needed)
