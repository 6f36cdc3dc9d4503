"""Opens the engine of a trainer whose states are with an owner: an Engine of parts that speak to it."""

from __future__ import annotations

import json
import os
import platform
import secrets
from typing import Any

import numpy as np

from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..engine.open_engine import agree_on_devices
from ..engine.states import States
from ..errors import CSDRankError, CSDStoreError
from ..store.check import check_param, check_record, check_rules, is_name, require
from ..store.file import Mode
from ..store.format import Contents, Record, Region, Superblock
from ..store.layout import Extent, ExtentRequest, plan_extent
from ..store.recovery import RanksStore, last_round
from .address import Address
from .dial import connect
from .keys import resolve
from .link import Answer, Link
from .messages import (
    WIRE_INDEX,
    Fields,
    array,
    check_byte_order,
    check_plain,
    dtype_named,
    number_of,
    refuse,
    unpack_counts,
)
from .remote_committer import RemoteCommitter
from .remote_devices import RemoteDevices, extent_of
from .remote_native import RemoteNative
from .session import Session

STREAMS = 2  # data connections


def open_remote(address: Address, model: str, *, mode: Mode, tile_elems: int | None, ranks: Ranks | None) -> Engine:
    """Return an engine whose devices are those of the owner at this address. `model`: see digest_of_groups().

    With `ranks` a collective: each has an engine of its own, there or at another owner.

    Raises CSDUnavailableError if no owner answers, what the owner answers if it refuses; CSDOSError and CSDValueError
    if there is something wrong with the key.
    """
    link: Link | None = None
    agree_on_devices(ranks, mode, durable=True, in_memory=False, elsewhere=True)
    try:
        with all_ranks_or_none(ranks) as exchanged:
            check_byte_order()
            # A key that is configured is never left out, on loopback neither.
            key, owner = resolve(address.key, address.owner)
            exchanged.own = secrets.token_hex(16), secrets.token_hex(16)
        token, store = exchanged.by_ranks[0]

        def dial() -> Session:
            place, seconds = (address.host, address.port), address.timeout
            return connect(place, key=key, owner=owner, timeout=seconds, streams=STREAMS, within=min(60.0, seconds))

        rank, size = (ranks.rank, ranks.size) if ranks else (0, 1)
        hello = {"model": model, "trainer": rank, "trainers": size, "token": token}
        hello["who"] = f"{platform.node()}, process {os.getpid()}"
        link = Link(dial, {**hello, "tile_elems": tile_elems or 0}, STREAMS, address.timeout)
        answer = _open_together(link, mode, store, ranks)
        with all_ranks_or_none(ranks):
            devices, native = RemoteDevices(link, str(address)), RemoteNative(link, STREAMS)
            devices.take(answer.fields)
            native.window = answer.fields.integer("window", 1, 1 << 16)
            states = States(devices, native, mode=mode)
            committer = RemoteCommitter(states, native, link, ranks)
            engine = Engine(states, committer, tile_elems=tile_elems)
            native.tiles_of_engine, native.step = engine.tiles, lambda: states.step
            if answer.fields.flag("recovered"):
                _adopt(engine, answer)
                committer.committed_steps = states.all_steps()
            Attaching(engine, link, native, committer, answer.fields.text("store"), is_alone=ranks is None)
    except BaseException:
        if link:
            link.close()
        raise
    return engine


def _open_together(link: Link, mode: Mode, store: str, ranks: Ranks | None) -> Answer:
    """Ask for a session on all ranks, which resume the last step that all of them have: a collective."""
    if ranks is None or mode != "resume":
        with all_ranks_or_none(ranks):
            return link.open(mode=mode, store=store)
    has_met = has_chosen = False

    def choose(found: Fields) -> int | None:
        nonlocal has_met, has_chosen
        with all_ranks_or_none(ranks) as exchanged:
            has_met = True
            exchanged.own = _store_found(found)
        chosen = last_round(exchanged.by_ranks)  # raises on all ranks alike
        has_chosen = True
        return chosen

    try:
        answer = link.open(choose, mode=mode, store=store)
    except BaseException as e:
        if has_chosen or not has_met:  # the others do not know of it yet
            ranks.agree(e)
        raise
    ranks.agree()
    return answer


def _store_found(fields: Fields) -> RanksStore | None:
    """Return what an owner says about the store of this rank. Raises CSDRankError."""
    if fields.is_null("found"):
        return None
    found = Fields(fields.object("found"))
    try:
        store_id = bytes.fromhex(found.text("store"))
        steps = {int(round): int(step) for round, step in found.listed("steps")}
    except (TypeError, ValueError):
        refuse("the steps of a store")
    where = found.text("path"), store_id, found.integer("rank"), found.integer("world_size", 1)
    return RanksStore(*where, is_first=found.flag("is_first"), steps=steps)


class Attaching:
    """Takes a lost link up again: compares the steps that trainer and owner have made."""

    def __init__(
        self,
        engine: Engine,
        link: Link,
        native: RemoteNative,
        committer: RemoteCommitter,
        store: str,
        *,
        is_alone: bool,
    ) -> None:
        """`is_alone`: no other trainer has to go back to the step that the owner has."""
        self._engine, self._native, self._store, self._is_alone = engine, native, store, is_alone
        self._lose = link.lose
        link.reattach = self._hello, self._take
        link.on_committed = committer.note_committed
        with link.changed:
            committer.note_committed()

    def _hello(self) -> dict[str, Any]:
        return {"store": self._store, "step": self._engine.states.step}

    def _take(self, answer: Answer) -> None:
        """Compare. Raises CSDRankError, once, if the owner has lost a step that was not durable."""
        states, native = self._engine.states, self._native
        native.begins = 0
        there, here = answer.fields.integer("step", 0, 1 << 53), states.step
        counts = unpack_counts(number_of(answer.arrays, 3)[0], self._engine.tiles.n_params)
        if there == here:
            return
        if there == here + 1 and native.unanswered == there:  # it counts, and all its parameters have arrived
            native.unanswered = None
            if native.is_finishing:
                return  # LiveStep counts it
        elif there == here - 1 and self._is_alone:
            states.rolled_back = True
        else:
            differ = CSDRankError(
                f"the optimizer ranks are at step {there}, and this trainer is at step {here}: start again with "
                "resume=True"
            )
            self._lose(differ)  # the next request raises this, too
            raise differ
        states.step = there
        for extent, own in zip(self._engine.tiles.extents, states.steps, strict=True):
            own[:] = counts[extent.first_param : extent.first_param + len(own)]
        if there < here:
            states.watcher.step_taken_back()
            raise CSDRankError(
                f"the optimizer ranks have lost step {here}, which was not durable yet: parameters and states go back "
                f"to step {there}"
            )


def _adopt(engine: Engine, answer: Answer) -> None:
    """Continue from the commit that an owner has resumed. Raises CSDRankError, CSDStoreError."""
    fields, states = answer.fields, engine.states
    counts, devices, user_state = number_of(answer.arrays, 3)
    manifest, record = fields.object("manifest"), fields.object("record")
    check_plain(manifest, "the manifest")
    check_plain(record, "the record")
    n_devices = len(engine.devices.specs)
    tile_devices = array(devices, WIRE_INDEX, "the devices of tiles")
    described = fields.listed("extents")
    try:
        params = manifest["params"]
        for p in params:
            check_param(p, n_devices)
            require(p["extent"] < len(described), "a parameter's extent")
        for p in manifest["waiting"]:
            check_param(p, n_devices, is_waiting=True)
        check_rules(manifest, [Fields(about).texts("sections") for about in described])
        found = Record(record["groups"], record["given"], bytes(user_state), record["seconds"])
        check_record(vars(found), manifest.get("rule"))
    except (CSDStoreError, KeyError, TypeError, ValueError) as e:
        refuse(f"the store of the optimizer ranks: {e}")
    first = 0
    extents: list[dict[str, Any]] = []
    for i, about in enumerate(described):
        numels = [p["numel"] for p in params if p["extent"] == i]
        extent = _extent_described(engine, about, numels, n_devices, tile_devices[first:])
        first += extent.n_tiles
        states.add(extent, [0] * n_devices, (np.zeros(0), np.zeros(0)))  # slots and checksums are with the owner
        extents.append(
            {"sections": [*extent.sections]} | ({"codec": extent.codec} if extent.param_dtype is not None else {})
        )
    if first != len(tile_devices):
        refuse("the devices of tiles")
    steps = unpack_counts(counts, len(params))
    for extent, own in zip(engine.tiles.extents, states.steps, strict=True):
        own[:] = steps[extent.first_param : extent.first_param + len(own)]
    states.step, states.record = fields.integer("step", 0, 1 << 53), found
    nowhere = Region(0, 0, 0, 0)
    block = Superblock(b"", 0, n_devices, 0, states.step, 0, nowhere, nowhere)
    contents = Contents(
        path=f"{fields.text('path')} of the optimizer ranks",
        copy=0,
        superblock=block,
        manifest={**json.loads(json.dumps(manifest)), "extents": extents},
        tiles=np.zeros(0),
        sums=[],
        steps=steps,
        residuals=np.zeros(0),
        record=found,
    )
    engine.recovered = [contents] * n_devices


def _extent_described(
    engine: Engine, about: Any, numels: list[int], n_devices: int, devices: np.ndarray[Any, Any]
) -> Extent:
    """Return an extent of the store that an owner has resumed. `devices`: of its tiles, and of those after them."""
    fields = Fields(about)
    sections, dtype = fields.texts("sections"), dtype_named(fields.text("param_dtype"))
    if not 0 < len(sections) <= 4 or not all(is_name(s) for s in sections):
        refuse("the states of a store")
    tile_elems, codec = fields.integer("tile_elems", 1024, 1 << 31), fields.text("codec")
    described = ExtentRequest(numels, sections, codec, dtype, engine.tiles.n_params, len(engine.tiles), tile_elems)
    n_tiles = plan_extent(n_devices=1, **described._asdict()).n_tiles
    return extent_of(described, n_devices, devices[:n_tiles])
