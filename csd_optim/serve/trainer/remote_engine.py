"""Opens the engine of a trainer whose states are with owners: an Engine of parts that send requests to owners."""

from __future__ import annotations

import itertools
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...distributed.ranks import Ranks, all_ranks_or_none
from ...engine.engine import Engine
from ...engine.open_engine import agree_on_devices
from ...engine.states import States
from ...errors import CSDRankError, CSDStoreError
from ...store.existing import Mode
from ...store.recovery import RanksStore, last_round
from ...threads import SharedCondition
from ..messages import check_byte_order, number_of, refuse, unpack_counts
from ..requests import Found, StoreFound
from ..wire.dial import CONNECT_SECONDS, connect
from ..wire.keys import Key, resolve
from ..wire.session import Session
from .address import Address, Owners
from .adopt import adopt
from .divided_native import DividedNative
from .link import Link, Reply
from .remote_committer import RemoteCommitter
from .remote_devices import RemoteDevices
from .remote_native import RemoteNative
from .shares import Share


def open_remote(owners: Owners, model: str, *, mode: Mode, tile_elems: int | None, ranks: Ranks | None) -> Engine:
    """Return an engine on the owners' devices. `model`: see digest_of_groups().

    With `ranks` a collective: each rank has an engine of its own, at the same or other owners.

    Raises CSDUnavailableError if no owner answers, the owner's error if it refuses; CSDOSError and CSDValueError for an
    unusable key.
    """
    shares: list[Share] = []
    changed = SharedCondition()
    agree_on_devices(ranks, mode, durable=True, in_memory=False, elsewhere=True)
    try:
        with all_ranks_or_none(ranks) as votes:
            check_byte_order()
            keys = [resolve(address.key, address.owner) for address in owners.addresses]
            votes.mine = secrets.token_hex(16), secrets.token_hex(16)
        token, store = votes.all[0]
        place = (ranks.rank, ranks.size) if ranks else (0, 1)
        hello = {"model": model, "trainers": owners.n_shares, "token": token, "tile_elems": tile_elems or 0}
        hello["who"] = f"{platform.node()}, process {os.getpid()}"
        for address, index, here, key in zip(owners.addresses, owners.indices, owners.here, keys, strict=True):
            own = {"trainer": index, "here": here}
            link = Link(_dial(address, *key), {**hello, **own}, address.connections, address.timeout, changed)
            shares.append(Share(link, RemoteNative(link), index, *place, owners.n_shares))
        answers = _open_together(shares, owners, mode, store, ranks)
        with all_ranks_or_none(ranks):
            engine = _engine_of(shares, owners.addresses, answers, mode=mode, tile_elems=tile_elems, ranks=ranks)
    except BaseException:
        for share in shares:
            share.link.close()
        raise
    return engine


def _dial(address: Address, key: Key | None, owner: str | None) -> Callable[[], Session]:
    """Return a function that connects to an owner. A configured key is always used, even on loopback."""

    def dial() -> Session:
        place, seconds = (address.host, address.port), address.timeout
        within = min(CONNECT_SECONDS, seconds)
        return connect(place, key=key, owner=owner, timeout=seconds, streams=address.connections, within=within)

    return dial


def _engine_of(
    shares: Sequence[Share],
    addresses: Sequence[Address],
    answers: Sequence[Reply],
    *,
    mode: Mode,
    tile_elems: int | None,
    ranks: Ranks | None,
) -> Engine:
    """Return the engine of sessions that were granted. Raises CSDRankError, CSDStoreError."""
    devices = RemoteDevices(shares)
    for share, address, answer in zip(shares, addresses, answers, strict=True):
        devices.take(share, address, answer.fields)
        share.native.window = answer.fields.window
    native = shares[0].native if shares[0].is_whole else DividedNative(shares, shares[0].link.changed)
    states = States(devices, native, mode=mode)
    committer = RemoteCommitter(states, shares, ranks)
    engine = Engine(states, committer, tile_elems=tile_elems)
    if shares[0].is_whole:
        shares[0].tiles = engine.tiles
    for share in shares:
        share.native.tiles_of_engine, share.native.step = share.tiles, lambda: states.step
    if len(has := {answer.fields.recovered for answer in answers}) > 1:
        raise CSDStoreError("some of the optimizer ranks have a store, and others have none")
    if has == {True}:
        adopt(engine, shares, answers)
        committer.committed_steps = states.all_steps()
        for share in shares:
            share.native.owner_step = states.step
    for share, answer in zip(shares, answers, strict=True):
        Attaching(engine, share, committer, answer.fields.store, is_alone=ranks is None and len(shares) == 1)
    return engine


def _open_together(shares: Sequence[Share], owners: Owners, mode: Mode, store: str, ranks: Ranks | None) -> list[Reply]:
    """Ask for sessions on all ranks, and resume the last step that all ranks have. A collective."""
    n_shares, links = owners.n_shares, [share.link for share in shares]
    if n_shares == 1 or mode != "resume":
        with all_ranks_or_none(ranks):
            return [link.open(mode=mode, store=store) for link in links]
    with all_ranks_or_none(ranks) as votes:
        found = [link.open(mode=mode, store=store).fields for link in links]
        votes.mine = {share.index: _said(fields, n_shares) for share, fields in zip(shares, found, strict=True)}
    by_share = dict(itertools.chain.from_iterable(of_rank.items() for of_rank in votes.all))
    chosen = last_round([by_share[k][0] for k in range(n_shares)])  # raises on all ranks alike
    if not any(store.steps for store, _, _ in by_share.values()):
        _check_order(by_share)
    with all_ranks_or_none(ranks):
        for link in links:
            link.choose(chosen)  # from now on each owner reads all its states
        return _granted(links)


def _granted(links: Sequence[Link]) -> list[Reply]:
    """Return the answers of all owners. Receives them as they come: an owner gives up if nobody receives its answer."""
    with ThreadPoolExecutor(len(links)) as pool:
        answers = [pool.submit(link.granted) for link in links]
        try:
            return [answer.result() for answer in answers]
        except BaseException:
            for link in links:
                link.stop_asking()
            raise


def _said(found: Any, n_shares: int) -> tuple[RanksStore, list[int], str]:
    """Return an owner's store of a share, the numbers of other shares with states there, and its name.

    Raises CSDRankError.
    """
    if not isinstance(found, Found) or any(other >= n_shares for other in found.others):
        refuse("the stores of other trainers")
    return _store_found(found.found), found.others, found.owner


def _check_order(by_share: dict[int, tuple[RanksStore, list[int], str]]) -> None:
    """Raise CSDStoreError if a share's states are at another owner than the one asked.

    `by_share`: for all ranks, from _said().
    """
    for k, (_, others, owner) in sorted(by_share.items()):
        if elsewhere := [other for other in others if by_share[other][2] != owner]:
            raise CSDStoreError(
                f"the optimizer rank that was asked for the states of rank {k} of {len(by_share)} has those of rank "
                f"{elsewhere[0]}: name the optimizer ranks in the order in which they were named before"
            )


def _store_found(found: StoreFound) -> RanksStore:
    """Return the owner's answer about this rank's store."""
    where = found.path, bytes.fromhex(found.store), found.rank, found.world_size
    return RanksStore(*where, found.is_first, dict(found.steps), found.is_missing)


class Attaching:
    """Takes a lost link up again, after comparing the steps of trainer and owner."""

    def __init__(
        self,
        engine: Engine,
        share: Share,
        committer: RemoteCommitter,
        store: str,
        *,
        is_alone: bool,
    ) -> None:
        """`is_alone`: no other trainer or owner would have to go back to this owner's step, too."""
        self._engine, self._share, self._store, self._is_alone = engine, share, store, is_alone
        link = share.link
        link.reattach = self._hello, self._take
        link.on_committed = committer.note_committed
        with link.changed:
            committer.note_committed()

    def _hello(self) -> dict[str, Any]:
        return {"store": self._store, "step": self._engine.states.step}

    def _take(self, answer: Reply) -> None:
        """Compare the steps. Raises CSDRankError, once, if the owner has lost a step that was not durable."""
        states, share, native = self._engine.states, self._share, self._share.native
        there, here = answer.fields.step, native.owner_step
        counts = unpack_counts(number_of(answer.arrays, 3)[0], share.n_rows)
        ending = native.settle(there)
        if there == here or (ending and native.is_stepping):  # then LiveStep counts the step
            return
        if not ending and there == here - 1 and self._is_alone:
            states.rolled_back = True
        elif not ending:
            differ = CSDRankError(
                f"the optimizer ranks are at step {there}, and this trainer is at step {here}: start again with "
                "resume=True"
            )
            share.link.lose(differ)  # the next request raises this, too
            raise differ
        native.owner_step = there
        states.go_to(there, ending and ending.record, counts)
        if there < here:
            states.watcher.step_taken_back()
            raise CSDRankError(
                f"the optimizer ranks have lost step {here}, which was not durable yet: parameters and states go back "
                f"to step {there}"
            )
