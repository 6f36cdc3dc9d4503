"""The engine that an optimizer opens: here, or with the owners of its states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..engine.open_engine import open_engine
from ..params.groups import Groups
from ..params.manifest import digest_of_groups
from ..params.state_map import StateMap
from ..serve.trainer.address import Owners
from ..store.existing import Mode
from .kernels import kernels_for
from .matrices import any_matrices, check_devices


def engine_for(
    place: Owners | Sequence[DeviceSpec],
    groups: Groups,
    state_map: StateMap,
    *,
    mode: Mode,
    tile_elems: int | None,
    ranks: Ranks | None,
    make_way: Callable[[], None],
) -> Engine:
    """Open the engine of an optimizer. `place`: the optimizer ranks that own the states, or devices of this process.

    Raises what open_engine() and open_remote() raise, and CSDValueError if devices have no program for the groups.
    """
    if isinstance(place, Owners):
        from ..serve.trainer.remote_engine import open_remote  # loads msgspec and TLS

        model = digest_of_groups(groups, state_map.part_of)
        return open_remote(place, model, mode=mode, tile_elems=tile_elems, ranks=ranks)
    kernels = kernels_for(place, groups, state_map)
    if passes := any_matrices(groups, state_map):
        check_devices(place)
    return open_engine(
        place, mode=mode, tile_elems=tile_elems, ranks=ranks, kernels=kernels, two_passes=passes, make_way=make_way
    )
