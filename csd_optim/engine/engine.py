"""The engine: drives several devices as one.

See states.py for the states on the devices, committer.py for durability.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..bindings import PASS_2, TO_AND_FRO
from ..errors import CSDError, CSDRuntimeError, CSDTornError
from ..signals import defer_signals
from ..store.format import Contents, Record
from ..store.layout import SLOTS, Extent, ExtentRequest
from ..store.sections import FP32
from .ahead import Ahead
from .committer import Committer
from .decoded import Decoded
from .parts import Devices, Ending, NativeEngine
from .placing.on_accelerator import OnAccelerator
from .states import States
from .tiles import Tiles
from .truth import Truth
from .windows import Windows


class Engine:
    """Devices, owned until `close()`, and the states on them: fp32 or 8-bit codes, as extend() is told.

    Composed of parts that need not be in this process: see parts.py. `committer`: of the same `states`; None: a
    committer that makes nothing durable.
    """

    def __init__(self, states: States, committer: Committer | None = None, *, tile_elems: int | None = None) -> None:
        self.states: States = states
        self.devices: Devices = states.devices
        self.native: NativeEngine = self.states.native
        self.tiles: Tiles = self.states.tiles
        self.windows: Windows = self.states.windows
        self.decoded: Decoded = self.states.decoded
        self.truth: Truth = self.states.truth
        self.committer: Committer = committer or Committer(states)
        self.tile_elems = tile_elems
        self.pid: int = self.devices.pid
        self.lock: threading.RLock = threading.RLock()  # held during a step, while states are read, and in close()
        self.stepping: bool = False
        self.is_speculative: bool = False  # the step in flight has begun before step(): see overlap/
        self._kept_alive: object = None  # memory that the step uses
        self.completed_event: threading.Event | None = None  # set when a thread has completed the step
        self.tile_rank: np.ndarray[Any, Any] | None = None  # int64 per tile: low ranks go first; None: to and fro
        self.recovered: Sequence[Contents] = ()  # per device: what the resumed store contains
        self.replaced: str = ""  # the error message if a newer optimizer has replaced this one

    @property
    def accelerator(self) -> OnAccelerator | None:
        """What `gpu:` keeps on accelerators; its states are not on the devices unless it has copies."""
        return self.devices.accelerator

    @property
    def durable(self) -> bool:
        """Whether the states on some device outlive the process."""
        return self.states.durable

    @property
    def copies(self) -> int:
        """The number of copies of the states that a step needs, so that it can be undone."""
        return 1 if self.devices.resident or self.truth.copies else SLOTS

    # ---- layout ------------------------------------------------------------

    def next_step_fills(self, params: Sequence[int]) -> bool:
        """Return whether the next step can initialise the state of these newly joined parameters from their values."""
        if not (self.devices.fills_new and params):
            return False
        is_loose = bool(self.truth.loose[self.tiles.of(params)].all())
        return is_loose and self.committer.ahead is Ahead.NOTHING

    def extend(
        self,
        numels: Sequence[int],
        sections: Sequence[str],
        *,
        codec: str = FP32,
        param_dtype: torch.dtype | None = None,
        is_copied: bool = False,
    ) -> Extent:
        """Allocate the states of parameters with these sizes, initially zero. Raises CSDOSError if a disk is full.

        `sections`: names of each parameter's states, the fp32 master first.
        `codec`: "8bit" stores codes; all parameters then have `param_dtype`.
        `is_copied`: the accelerator will hold copies of the states, see accelerator_copies.py.
        Call `committer.describe()` next, then fill the states within `writing()`; a step fills codes.
        """
        self.check_open()
        self.committer.before_joining_or_leaving()
        self.states.synced &= codec != FP32 or self.devices.states_on_demand  # else the program can write to windows
        wanted = ExtentRequest(
            numels, sections, codec, param_dtype, self.tiles.n_params, len(self.tiles), self.tile_elems
        )
        extent = self.devices.plan(wanted, is_copied=is_copied)
        # All checks come first; if adding the extent still fails, room_for() shrinks the stores again.
        with self.devices.room_for(extent, is_copied=is_copied) as offsets:
            self.states.add(extent, offsets)
            self.committer.after_extend(extent, offsets)
        return extent

    def free(self, params: Sequence[int]) -> None:
        """Give back the states of parameters that have left: memory at once, disk space when no commit names it.

        Tiles are given back as a whole, with the last of their parameters. Call this between steps, after
        `committer.before_joining_or_leaving()` and a `committer.describe()` without the parameters.
        """
        self.check_open()
        self.committer.free(params, self.states.free(params))

    def accelerator_fraction(
        self,
        numels: Sequence[int],
        sections: Sequence[str],
        param_bytes: float,
        codec: str = FP32,
        param_dtype: torch.dtype | None = None,
    ) -> float | None:
        """Return the fraction of these parameters that `auto` wants on the accelerator; None: there is no `auto`.

        `param_bytes`: average bytes per element of the parameters. Raises what extend() raises.
        """
        if self.accelerator is None or not self.accelerator.spec.is_placed or not sum(numels):
            return None
        first = len(self.tiles)
        wanted = ExtentRequest(numels, sections, codec, param_dtype, self.tiles.n_params, first, self.tile_elems)
        return self.devices.accelerator_fraction(wanted, param_bytes)

    @property
    def descending(self) -> bool:
        """Whether the next step goes from the last tile to the first."""
        return self.states.step % 2 == 1

    def in_step_order(self, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return `tiles`, given in ascending order, in the order in which the next step takes them.

        Steps alternate their direction: each begins with the tiles that the previous step wrote last, which are still
        in memory. The direction follows from the step's number alone, so that all processes agree, also after a resume.
        With a `tile_rank`, the lowest rank goes first; new tiles, which have no rank yet, come last.
        """
        if self.tile_rank is not None:
            new = np.full(len(self.tiles) - len(self.tile_rank), np.iinfo(np.int64).max)
            return tiles[np.argsort(np.append(self.tile_rank, new)[tiles], kind="stable")]
        return tiles[::-1].copy() if self.descending else tiles

    # ---- a step ------------------------------------------------------------

    def begin(
        self,
        params: np.ndarray[Any, Any],
        hypers: np.ndarray[Any, Any],
        tiles: np.ndarray[Any, Any],
        record: Record | None = None,
        *,
        order: int = TO_AND_FRO,
        is_speculative: bool = False,
        kept_alive: object = None,
    ) -> np.ndarray[Any, Any]:
        """Begin a step over `tiles`; return all tiles to push (see Native.push()), which include the written tiles.

        `record`: for the step's commit. `order`: TO_AND_FRO, SAME_ORDER or AS_PUSHED of bindings.py, see csd_order.
        `is_speculative`: the step begins before step(), and close() undoes it. `kept_alive`: an object whose memory the
        step uses. If `tiles` contains second passes, their order (see muon/schedule.py) is kept; for `params` see
        Native.begin() then.
        """
        self.check_open()
        self.states.check_whole()
        if self.committer.load:
            raise CSDRuntimeError("a step is not possible within loading()")
        first = tiles[tiles < PASS_2]
        written = self.committer.before_step(first, record)
        others = np.setdiff1d(written, first) if len(written) else written  # NumPy's sets take longer than small steps
        tiles = np.concatenate([tiles, others])  # in any order, as the caller will push them in this order
        self.truth.step_begins(np.concatenate([first, others]))
        self.states.begin(params, hypers, tiles, order)
        self.stepping, self.is_speculative, self._kept_alive = True, is_speculative, kept_alive
        self.states.watcher.step_begins(params, written)
        return tiles

    def release(self, params: np.ndarray[Any, Any], order: np.ndarray[Any, Any]) -> None:
        """Confirm a speculative step: see Native.release()."""
        self.native.release(params, order)
        self.is_speculative = False

    def begin_without_tiles(self) -> None:
        """Begin a step that updates only states on the accelerator. Call end_without_tiles() at its end."""
        self.check_open()
        self.states.check_whole()
        self.states.timeline.begin(self.states.step)

    def end_without_tiles(self, keep: bool = True) -> None:
        """End a step of begin_without_tiles(). `keep`: the step is complete; else it was undone."""
        self.states.timeline.end(is_undone=not keep)
        self.states.go_to(self.states.step + keep)

    def count_step_of_others(self) -> None:
        """Count a step in which only other ranks have updated anything."""
        self.states.watcher.step_of_others()
        self.states.go_to(self.states.step + 1)

    def _note_end(self, *, is_undone: bool) -> None:
        self.stepping, self.is_speculative, self._kept_alive = False, False, None
        self.states.timeline.end(is_undone=is_undone)
        self.states.watcher.step_ends(is_undone=is_undone)

    def mark_torn(self) -> None:
        """Mark the states as torn: a step that cannot be undone changed states in place, and did not complete."""
        self.states.torn = True

    def finish(self, keep: bool = True, ending: Ending | None = None) -> None:
        """Complete the step; commit it next. With `keep` False, or if this raises CSDError, the step is undone.

        `ending`: from Committer.before_finish(), to keep a step on devices elsewhere.
        """
        try:
            outcome = self.native.finish(keep, ending)
        except CSDError as e:
            self.states.torn |= isinstance(e, CSDTornError)
            self._note_end(is_undone=True)
            raise
        self._note_end(is_undone=not keep)
        if keep:
            self.states.go_to(self.states.step + 1)
            self.truth.kept()
            self.committer.after_step(outcome)
        elif self.devices.resident:
            self.truth.undone_in_place()

    def undo_last(self, params: np.ndarray[Any, Any], *, had_tiles: bool = True) -> None:
        """Undo the last finished step, even if this rank has committed it, because the step failed on another rank.

        `params`: the parameters that took part in the step. `had_tiles`: the step was begun by begin(). Since then,
        nothing but writes to windows may have changed states. Raises CSDValueError if the step began with such writes,
        or was the first of a tile. Afterwards Native.undone() answers as after finish().
        """
        self.committer.before_undo()
        if had_tiles:
            self.truth.note_written()
            self.truth.forget_copies()
            self.native.take_back()
            self.truth.taken_back()
        self.states.timeline.is_undone = True
        counts = self.states.all_steps()
        counts[params] -= 1
        self.states.go_to(self.states.step - 1, counts=counts)
        self.states.watcher.step_taken_back()
        self.committer.after_undo()

    @contextlib.contextmanager
    def writing(self, params: Sequence[int]) -> Iterator[None]:
        """Allow writes to the windows of these parameters inside; on exit, the writes are on the devices.

        Where states are durable, the exit also commits them; the previous commit stays intact until then. Raises
        CSDOSError.
        """
        self.check_open()
        self.truth.forget_copies(params)
        self.states.watcher.params_written(params)
        with self.committer.writing(params):
            yield

    def wait(self) -> None:
        """Wait until the last step is durable. Raises CSDOSError, on all ranks. A collective."""
        self.committer.wait()

    # ---- the end -------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether close() would have no background work to wait for."""
        return self.committer.idle and (self.completed_event is None or self.completed_event.is_set())

    @property
    def closed(self) -> bool:
        return self.devices.closed

    def close(self) -> None:
        """Complete all writes and close the devices. Raises CSDOSError if the last states could not be written.

        Ctrl-C, and every other signal with a handler in Python, is deferred until then. Only a wait for a snapshot is
        interrupted at once; the optimizer then stays open and unchanged.

        A no-op in a forked child, which has neither the threads nor the devices.
        """
        if self.pid != os.getpid():
            return
        self.committer.end_copies()  # may take long and be interrupted: nothing is closed yet
        if self.completed_event:
            self.completed_event.wait()
        with defer_signals(), self.lock:  # an interrupt would run abandon() while a commit still uses the devices
            if self.closed:
                return
            if self.is_speculative:
                self.finish(keep=False)
            if self.stepping:  # called on the stepping thread, for example by a signal handler
                raise CSDRuntimeError("a step is under way: close() when it has returned")
            try:
                self.commit_last()
            finally:
                self.abandon()

    def commit_last(self) -> None:
        """Complete all writes and commit what is not committed yet. close() comes next. Raises CSDOSError."""
        with self.lock:
            self.committer.before_close()
            self.native.wait_writes()
            self.states.timeline.write(self.states.step)

    def abandon(self) -> None:
        """Close the devices without a commit, and suppress the native engine's errors."""
        self.states.timeline.close()
        self.committer.close()
        if self.truth.copies:
            self.truth.copies.close()
        if self.native.is_open:
            with contextlib.suppress(CSDError):  # already raised where somebody waited for the writes
                self.native.close()
        self.states.watcher.engine_closed()
        self.devices.close()

    def check_open(self) -> None:
        """Raise CSDRuntimeError if this engine is closed, or belongs to another process."""
        if self.replaced:
            raise CSDRuntimeError(self.replaced)
        self.devices.check_open()
