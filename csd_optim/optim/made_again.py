"""An optimizer that is made again on the same directories replaces the older optimizer: see docs/resume.md.

Programs make an optimizer again without a reference to the older one: a notebook's cell is run again, a trainer calls
fit() a second time. Both optimizers are in this process, so the older can commit its last step and release its stores.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..devices.spec import DeviceSpec
from ..distributed.ranks import Ranks, all_ranks_or_none
from ..engine.engine import Engine
from ..errors import CSDBusyError, CSDError, CSDWarning, users_stacklevel
from ..finalize import wait_for_dropped
from ..params.manifest import first_difference, manifest
from ..params.state_map import StateMap
from ..signals import defer_signals
from ..step.mode import InStep
from ..store.existing import Mode
from ..store.file import another_directory


class Optimizer(Protocol):
    """The attributes of a CSDOptimizer that this module uses."""

    param_groups: list[dict[str, Any]]
    _engine: Engine | None
    _ranks: Ranks | None
    _state_map: StateMap
    _mode: InStep
    _is_stepping: bool

    def synchronize(self) -> None: ...
    def close(self) -> None: ...


class Made(NamedTuple):
    """Where an optimizer keeps its states, and where in the program it was made."""

    directories: tuple[Path, ...]  # of durable stores, in the order of the devices
    place: str  # file, line and time, for messages

    @property
    def where(self) -> str:
        return ", ".join(map(str, self.directories))


_made: weakref.WeakKeyDictionary[Optimizer, Made] = weakref.WeakKeyDictionary()


def register(optimizer: Optimizer, specs: Sequence[DeviceSpec]) -> None:
    """Register a new optimizer, so that a later one can replace it."""
    if (made := _made_now(specs)).directories:
        _made[optimizer] = made


def _made_now(specs: Sequence[DeviceSpec]) -> Made:
    frame = sys._getframe(users_stacklevel() - 1)
    directories = tuple(spec.directory.resolve() for spec in specs if spec.directory and spec.durable)
    return Made(directories, f"{frame.f_code.co_filename}:{frame.f_lineno} ({time.strftime('%H:%M:%S')})")


def make_way(newer: Optimizer, specs: Sequence[DeviceSpec], mode: Mode) -> None:
    """Close an older optimizer of this process that has stores on these devices, so that `newer` can replace it.

    A collective. Raises CSDBusyError, with nothing touched, if the older optimizer is at work or of another model, or
    `mode` is "new". With "resume" the older optimizer's last step is committed first: if that fails, this raises the
    error, and the older optimizer stays open. With "overwrite" a failed commit is only a CSDWarning.
    """
    made, olders = _made_now(specs), list[Optimizer]()
    with all_ranks_or_none(newer._ranks) as votes:
        if made.directories and _olders(made):
            gc.collect()  # the older one may be dropped, and alive only by a reference cycle
            wait_for_dropped()
            olders = _olders(made)
        for older in olders:
            _check_replaceable(older, newer, made, mode)
        votes.mine = bool(olders)
    if mode == "resume" and all(votes.all):
        with all_ranks_or_none(newer._ranks):
            for older in olders:
                _commit(older)
    with all_ranks_or_none(newer._ranks):
        for older in olders:
            _replace(older, made, mode)


def _olders(made: Made) -> list[Optimizer]:
    """Return the optimizers with one of these stores open. Excludes the parent's, in a forked child."""
    return [
        older
        for older, its in list(_made.items())
        if {*its.directories} & {*made.directories}
        and (engine := older._engine)
        and not engine.closed
        and engine.pid == os.getpid()
    ]


def _check_replaceable(older: Optimizer, newer: Optimizer, made: Made, mode: Mode) -> None:
    its = _made[older]
    who = f"{its.where} is in use by another optimizer of this process, the {type(older).__name__} made at {its.place}"
    if mode == "new":
        advice = "close() or drop it, pass resume=True or overwrite=True to make this one in its place"
        raise CSDBusyError(errno.EWOULDBLOCK, f"{who}; {advice}, or name {another_directory()}")
    if why := _why_not(older, newer, made, mode):
        advice = f"close() or drop the older one, or name {another_directory()}"
        raise CSDBusyError(errno.EWOULDBLOCK, f"{who}, and the newer one cannot take its place: {why}; {advice}")


def _why_not(older: Optimizer, newer: Optimizer, made: Made, mode: Mode) -> str | None:
    engine, its = older._engine, _made[older]
    assert engine
    if older._is_stepping:
        return "its step() is under way"
    if engine.committer.load:
        return "it is within loading()"
    if its.directories != made.directories:
        return f"the directories of the newer one are {made.where}"
    if (older._ranks and older._ranks.group) is not (newer._ranks and newer._ranks.group):
        return "it trains with other ranks"
    its_map, new_map = older._state_map, newer._state_map
    groups = [{**group, "params": list.copy(group["params"])} for group in older.param_groups]  # does not wait
    its_manifest = manifest(its_map.rule_of, its_map.by_index, engine.tiles.extents, groups, its_map.part_of)
    if difference := first_difference(its_manifest, newer.param_groups, new_map.part_of):
        return f"it is of another model: {difference}"
    if len(groups) != len(newer.param_groups):  # some groups are empty
        return f"it has {len(groups)} parameter groups, and the newer one {len(newer.param_groups)}"
    # A resume would check this only once the older optimizer is gone.
    for k, (then, now) in enumerate(zip(groups, newer.param_groups, strict=True) if mode == "resume" else ()):
        was, will_be = (
            f"{state_map.rule_of(group).name}, {group.get('state_dtype', state_map.state_dtype)}"
            for state_map, group in ((its_map, then), (new_map, now))
        )
        if was != will_be:
            return f"its states of group {k} are {was}, and those of the newer one {will_be}"
    return None


def _commit(older: Optimizer) -> None:
    """Commit everything of an optimizer, which stays usable. A collective of its ranks."""
    assert older._engine
    older._engine.committer.end_copies()  # may take long and be interrupted
    with defer_signals():
        older._mode.undo()
        older.synchronize()
        older._engine.commit_last()


def _replace(older: Optimizer, made: Made, mode: Mode) -> None:
    engine, its = older._engine, _made[older]
    assert engine
    engine.committer.end_copies()
    with defer_signals():
        try:
            older.close()
        except CSDError as e:
            if mode == "resume" or not engine.closed:
                raise
            text = f"the last step of the optimizer made at {its.place} was not committed, and is now replaced: {e}"
            warnings.warn(text, CSDWarning, users_stacklevel())
        engine.replaced = (
            f"this {type(older).__name__}, made at {its.place}, was replaced by a newer one on {made.where}, made at "
            f"{made.place}: use that one. Two optimizers at work need directories of their own"
        )
