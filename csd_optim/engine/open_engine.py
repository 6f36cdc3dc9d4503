"""How an engine is made for devices, with what its stores hold."""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from typing import Any, get_args

import torch

from ..accelerator import kind
from ..devices.spec import DeviceSpec, parse_device
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..errors import CSDStoreError, CSDUnavailableError, CSDValueError
from ..store.file import Mode
from .durable import DurableCommitter
from .engine import Engine
from .near_copies import NearCopies
from .on_accelerator import OnAccelerator
from .resume import recover


def open_engine(
    specs: Sequence[DeviceSpec],
    *,
    mode: Mode = "new",
    tile_elems: int | None = None,
    shadow: bool = True,
    ranks: Ranks | None = None,
    kernels: Collection[str] = (),
) -> Engine:
    """The engine for these devices, of one of `ranks`: then a collective, and raises on all of them or on none.

    With mode "resume" or "read" an existing store is taken up: see recover(). `kernels`: see open_card().
    Raises what the engine raises, CSDStoreError when stores do not belong together, CSDValueError if the ranks do not
    want the same.
    """
    durable = any(s.durable for s in specs)
    near = [s for s in specs if s.kind.on_accelerator]
    beside = [s for s in specs if not s.kind.on_accelerator]
    in_memory = all(s.kind.in_memory for s in beside)
    said = ranks.gather(durable, get_args(Mode).index(mode), in_memory) if ranks else [(durable, 0, in_memory)]
    if len({(d, m) for d, m, _ in said}) > 1:
        raise CSDValueError(
            "Invalid devices, resume or overwrite: directories keep the state on all ranks or on none, and all ranks "
            "resume or none"
        )
    with all_ranks_or_none(ranks):
        if near and not kind():
            raise CSDUnavailableError(errno.ENODEV, f"torch {torch.__version__} has no accelerator here, for {near[0]}")
        if mode in ("resume", "read") and (temporary := [str(s) for s in beside or specs if not s.durable]):
            raise CSDStoreError(f"cannot resume on {temporary[0]}: only a directory keeps its state")
    engine = None
    try:
        with all_ranks_or_none(ranks):
            # In memory nothing fails; but a step that fails on another rank's disk has to be undone there, too.
            in_place = all(in_memory for _, _, in_memory in said)
            # What has nothing has to have a place, too: the steps of parameters, for one.
            of_engine = beside or [parse_device("ram:")]
            how: dict[str, Any] = {"mode": mode, "tile_elems": tile_elems, "shadow": shadow, "kernels": kernels}
            engine = Engine(of_engine, in_place=in_place, **how)
            if near:
                engine.accelerator = OnAccelerator(near[0], beside)
                if any(spec.durable for spec in beside):
                    engine.accelerator.copies = NearCopies(engine)
        if durable:
            engine.committer = committer = DurableCommitter(engine, ranks)
            if mode in ("resume", "read"):
                recover(engine, committer)
            if ranks and not engine.recovered:
                committer.store_id = ranks.gather_objects(committer.store_id)[0]
    except BaseException:
        if engine:
            engine.abandon()
        raise
    return engine
