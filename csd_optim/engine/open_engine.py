"""Opens an engine on devices, and resumes from their stores."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from typing import get_args

import torch

from ..accelerator import accelerator_type
from ..devices.spec import DeviceSpec, parse_device
from ..distributed.ranks import Ranks, RanksElsewhere, all_ranks_or_none
from ..errors import CSDStoreError, CSDUnavailableError, CSDValueError
from ..store.existing import Mode
from ..store.recovery import RanksStore
from .accelerator_copies import AcceleratorCopies
from .commit.durable import DurableCommitter
from .commit.resume import recover
from .engine import Engine
from .open_devices import OpenDevices
from .placing.on_accelerator import OnAccelerator
from .states import States


def open_engine(
    specs: Sequence[DeviceSpec],
    *,
    mode: Mode = "new",
    tile_elems: int | None = None,
    ranks: Ranks | RanksElsewhere | None = None,
    choose: Callable[[RanksStore], int | None] | None = None,
    kernels: Collection[str] = (),
    two_passes: bool = False,
    make_way: Callable[[], None] = lambda: None,
) -> Engine:
    """Return the engine for these devices. With `ranks` this is a collective, and raises on all ranks or on none.

    Modes "resume" and "read" continue from an existing store: see recover(), also for `choose`. `kernels`: see
    open_card(). `two_passes`: steps may take two passes over a tile, and fail in between, so that they must be undoable
    in memory too: `ram:` then has two slots, as beside a drive. `make_way`: called before the devices are opened, once
    the ranks have agreed; a collective. Raises what the engine raises, CSDStoreError if the stores do not belong
    together, and CSDValueError if the ranks' arguments differ.
    """
    durable = any(s.durable for s in specs)
    accelerators = [s for s in specs if s.kind.on_accelerator]
    others = [s for s in specs if not s.kind.on_accelerator]
    in_memory = not two_passes and all(s.kind.in_memory for s in others)
    # Updates in memory do not fail, but a step that fails on another rank's disk must be undone here, too.
    in_place = agree_on_devices(ranks, mode, durable=durable, in_memory=in_memory)
    with all_ranks_or_none(ranks):
        if accelerators and not accelerator_type():
            raise CSDUnavailableError(
                errno.ENODEV, f"torch {torch.__version__} has no accelerator here, for {accelerators[0]}"
            )
        if mode in ("resume", "read") and (temporary := [str(s) for s in others or specs if not s.durable]):
            raise CSDStoreError(f"cannot resume on {temporary[0]}: only a directory keeps its state")
    make_way()
    devices = engine = None
    try:
        with all_ranks_or_none(ranks):
            # With `gpu:` alone the engine still needs a device, for example for the `step` counts of parameters.
            engine_specs = others or [parse_device("ram:")]
            devices = OpenDevices(engine_specs, mode=mode, in_place=in_place, kernels=kernels)
            states = States(devices, mode=mode)
            committer = DurableCommitter(states, devices, ranks) if durable else None
            engine = Engine(states, committer, tile_elems=tile_elems)
            if accelerators:
                devices.accelerator = OnAccelerator(accelerators[0], others)
                if any(spec.durable for spec in others):
                    engine.truth.copies = AcceleratorCopies(engine.native, engine.tiles)
        if committer:
            if mode in ("resume", "read"):
                recover(engine, committer, choose)
            if ranks and not engine.recovered:
                committer.store_id = ranks.gather_objects(committer.store_id)[0]
    except BaseException:
        if engine:
            engine.abandon()
        elif devices:
            devices.close()
        raise
    return engine


def agree_on_devices(
    ranks: Ranks | RanksElsewhere | None,
    mode: Mode,
    *,
    durable: bool,
    in_memory: bool,
    elsewhere: bool = False,
    from_others: bool = False,
) -> bool:
    """Return whether all ranks' devices are `in_memory`. A collective; raises CSDValueError if they do not go together.

    `elsewhere`: the devices are optimizer ranks'. `from_others`: the stores are first made from other stores
    (resume_from).
    """
    own = durable, get_args(Mode).index(mode), elsewhere, from_others, in_memory
    of_ranks = ranks.gather(*own) if ranks else [own]
    if len({tuple(others) for *others, _ in of_ranks}) > 1:
        raise CSDValueError(
            "Invalid devices, resume or overwrite: directories, or optimizer ranks, keep the state on all ranks or on "
            "none, and all ranks resume or none, with resume_from or without"
        )
    return all(of_rank for *_, of_rank in of_ranks)
