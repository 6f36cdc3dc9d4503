"""Publisher: writes versions of the weights, each complete before its step is committed, and named after that."""

from __future__ import annotations

import contextlib
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..bindings import NEW, UNCOMPARED, UNLESS_SET
from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..engine.watcher import Watcher
from ..errors import CSDError, CSDOSError, CSDRuntimeError, CSDValueError, CSDWarning
from ..params.param_state import ParamState
from ..params.state_map import StateMap
from ..replica.blocks import DENSE
from ..replica.versions import Version
from ..threads import running_pool
from .encode import DeltaWriter, write_tensors
from .folder import Folder, check_room, manifest_of
from .recording import Recording
from .tracked import Tracked, tensors_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Options:
    """See opt.publish()."""

    every: int
    keep: int
    full_every: int
    as_bf16: bool


class Publisher(Watcher):
    """Publishes a model's weights as versions in a folder, for Replica and `csd-optim follow`. See opt.publish().

    Nothing here makes a step fail. If a version cannot be written, a warning says so, and `error` says why until a
    version has been published again: a full one.
    """

    def __init__(
        self,
        engine: Engine,
        state_map: StateMap,
        model: torch.nn.Module,
        path: Path,
        options: Options,
        settle: Callable[[], Callable[[], None] | None],
    ) -> None:
        """Publishes the model as it is, as a full version, unless the newest version has the same bits.

        `settle`: returns what waits until the last step is durable; None if the optimizer is gone. Raises CSDBusyError,
        CSDOSError, CSDTypeError, CSDValueError.
        """
        self.path: Path = path
        self.error: str = ""
        self._engine, self._state_map, self._model, self._options = engine, state_map, model, options
        self._settle = settle
        self._tracked = tensors_of(model, as_bf16=options.as_bf16)
        self._watched: dict[int, Tracked] = {}  # by the engine's index of the parameter
        self._planned: list[Tracked] = []  # those of them that the next step may update
        self._in_step: set[Tracked] = set()  # those that the last step has updated
        self._last: Version | None = None
        self._last_full = 0  # the number of the last full version
        self._needs_full = True
        self._run = ""
        self._is_full = False  # the version that is made next
        self._due: int | None = None  # the step of which a version is to be written
        self._written: tuple[int, Path] | None = None  # a step, and its version, which has no name yet
        self._working: Future[None] | None = None  # what no_commit() has begun
        self._closed = False
        self._folder = Folder(path)
        with contextlib.ExitStack() as stack:
            stack.callback(self._folder.close)
            try:
                self._recording = Recording(path)
                stack.callback(self._recording.close)
                self._begin()
            except OSError as e:
                if isinstance(e, CSDError):
                    raise
                raise CSDOSError(e.errno, f"cannot publish in {path}: {e.strerror}") from e
            self._pool = running_pool(1, "csd_optim publish")
            stack.pop_all()

    # ---- what users ask ------------------------------------------------------------

    @property
    def version(self) -> int | None:
        """The number of the newest version; None if there is none yet."""
        return self._last.number if self._last else None

    @property
    def step(self) -> int | None:
        """The step of which the newest version has the weights."""
        return self._last.step if self._last else None

    def arrays(self) -> list[Array]:
        """Return what this holds in memory for each parameter: sums of groups, where updates cannot do without."""
        return [array for tracked in self._tracked if tracked.watch for array in tracked.watch.arrays()]

    def wait(self) -> None:
        """Return when the version of the last step, if it makes one, is published, or `error` says why not.

        Raises CSDOSError if that step failed, or cannot be committed.
        """
        if settle := self._settle():
            settle()
        self._join()

    def close(self) -> None:
        """Publish nothing more; the last step's version is published first. The versions stay. opt.close() does it."""
        if self._closed or self._engine.closed:
            return
        self.wait()
        with self._engine.lock:
            if self._engine.stepping:
                raise CSDRuntimeError("a step is under way: close() the publisher when it is complete")
            self._engine.states.watcher = Watcher()
            self._state_map.changes += 1  # the next plan names no watch
            self.engine_closed()

    def engine_closed(self) -> None:
        if not self._closed:
            self._closed = True
            self._join()
            self._pool.shutdown()
            self._recording.close()
            self._folder.close()

    # ---- the beginning -------------------------------------------------------------

    def _begin(self) -> None:
        """Continue the chain of versions if the newest has the model's bits; otherwise begin a new run."""
        step, durable = self._engine.states.step, self._engine.durable
        for tracked in self._tracked:
            tracked.has_changed()
        now = [t.tensor for t in self._tracked]
        pending = self._folder.pending()
        if durable and pending and pending[1].step == step and [*pending[1].tensors] == now:
            self._folder.name(pending[0])  # this process, or the one before it, was killed just before that
        self._folder.discard_pending()
        newest = self._folder.newest()
        if newest and durable and newest.step == step and [*newest.tensors] == now:
            self._last, self._run, self._last_full = newest, newest.run, self._folder.last_full(newest)
            self._needs_full = not self._last_full
        else:
            self._run = secrets.token_hex(16)
            self._is_full = True
            self._write(step)
            self._name()

    # ---- steps: see Watcher --------------------------------------------------------

    def enter(self, table: Array, params: Sequence[ParamState]) -> None:
        now = dict(self._model.named_parameters(remove_duplicate=False))
        for tracked in self._tracked:
            tracked.param = now.get(tracked.name, tracked.param)
        tracked_of = {id(t.param): (i, t) for i, t in enumerate(self._tracked)}
        self._planned = []
        for state in params:
            if id(state.param) not in tracked_of or not _can_watch(state):
                continue
            number, tracked = tracked_of[id(state.param)]
            if self._watched.get(state.index) is not tracked or tracked.watch is None:
                checked = state.is_coded or tracked.is_fp32
                tracked.watch = self._recording.watch(number, self._engine.tiles, state.index, checked=checked)
                tracked.row, tracked.checked, tracked.whole = state.index, checked, True
                self._watched[state.index] = tracked
            # A program may write to the master itself. Where `checked`, the parameter's bits before the step tell more.
            tracked.see_master(None if tracked.checked else state.windows.get("master"))
            self._planned.append(tracked)
            table["watch"][state.index] = tracked.watch.address

    def step_begins(self, table: Array, written: Array) -> None:
        self._join()
        self.tiles_written(written)
        publishes = (self._engine.states.step + 1) % self._options.every == 0
        since = self._last.number - self._last_full if self._last else 0
        self._is_full = publishes and (self._needs_full or since + 1 >= self._options.full_every)
        self._recording.begin(anew=self._needs_full or self._is_full)
        for tracked in self._planned:
            assert tracked.watch is not None
            tracked.see_master(tracked.master)
            row = table[tracked.row]
            # Where it is known that they were set from outside, all elements are sent.
            is_set = tracked.checked and row["master"] in (UNLESS_SET, UNCOMPARED)
            tracked.whole |= bool(is_set or row["master"] == NEW or row["edited"].any())
            tracked.watch.begin(whole=tracked.whole or self._is_full)

    def step_ends(self, *, is_undone: bool) -> None:
        if is_undone:
            self._recording.undo()
            return
        step = self._engine.states.step + 1
        self._in_step.clear()
        try:
            for tracked in self._planned:
                if tracked.watch and tracked.watch.updated:
                    tracked.update(is_whole=tracked.whole or self._is_full)
                    self._in_step.add(tracked)
            self._recording.check()
        except CSDError as e:
            self._fail(step, e)
        else:
            self._due = step if step % self._options.every == 0 else None

    def params_written(self, params: Sequence[int]) -> None:
        for row in params:
            if row in self._watched:
                self._watched[row].whole = True

    def tiles_written(self, tiles: Array) -> None:
        for tile in tiles.tolist():
            self.params_written(self._engine.tiles.pieces_of(tile)["param"].tolist())

    # ---- commits -------------------------------------------------------------------

    def no_commit(self, step: int) -> None:
        if self._due is not None:
            self._working = self._pool.submit(self._publish, step)

    def _publish(self, step: int) -> None:
        self.before_commit(step)
        self.after_commit(step)

    def _join(self) -> None:
        if self._working:
            wait([self._working])

    def before_commit(self, step: int) -> None:
        if self._due == step:
            try:
                self._write(step)
            except Exception as e:  # whatever it is, training goes on
                self._fail(step, e)

    def after_commit(self, step: int) -> None:
        if self._written and self._written[0] == step:
            try:
                self._name()
            except Exception as e:
                self._fail(step, e)

    def _fail(self, step: int, e: Exception) -> None:
        """Note that the version of a step is not published: the next one is full. Gives its space back."""
        self._due, self._written, self._needs_full = None, None, True
        with contextlib.suppress(OSError):
            self._folder.discard_pending()
            self._recording.clear()
        is_first, self.error = not self.error, str((isinstance(e, OSError) and e.strerror) or e or type(e).__name__)
        if is_first:
            with contextlib.suppress(CSDWarning):  # where warnings are errors
                warnings.warn(
                    f"the weights of step {step} were not published in {self.path}: {self.error}. Training goes on, "
                    "and a full version is made as soon as that works",
                    CSDWarning,
                    stacklevel=1,
                )

    # ---- versions ------------------------------------------------------------------

    def _write(self, step: int) -> None:
        """Write the version of a step, all but its name. Raises OSError, CSDTypeError."""
        number, base = self._folder.next_number(), None if self._is_full else self._last
        for tracked in self._tracked:
            tracked.check()
        pending = self._folder.begin(number)
        if self._is_full:
            check_room(self.path, 2 * sum(t.numel for t in self._tracked))
            tensors = [t.tensor for t in self._tracked]  # their checksums are not in the file
            file = write_tensors(pending / "model.safetensors", tensors, self._values())
        else:
            file = self._write_delta(pending / "delta-0.bin", step)
        tensors = [t.tensor for t in self._tracked]
        self._folder.complete(pending, manifest_of(self._run, number, step, base, tensors, [file]))
        self._due, self._written = None, (step, pending)

    def _values(self) -> Iterator[Array]:
        """Yield the values of all tensors, one after another: those that the step has updated as it has left them."""
        recorded = self._recorded_values()
        for number, tracked in enumerate(self._tracked):
            if tracked not in self._in_step:
                for _, some in tracked.take():
                    yield some
                continue
            done = 0
            while done < tracked.numel:
                at, first, values = next(recorded)
                if (at, first) != (number, done):
                    raise CSDRuntimeError(f"the step has not recorded all of {tracked.name}")
                yield values
                done += len(values)

    def _recorded_values(self) -> Iterator[tuple[int, int, Array]]:
        """Yield the whole blocks that the step has recorded: number of the tensor, first element, values."""
        for numbers, blocks, payload in self._recording.encoded([t.numel for t in self._tracked]):
            for number, block in zip(numbers.tolist(), blocks, strict=True):
                values = payload[int(block["payload"]) :].view(np.uint16)[: int(block["elems"])]
                yield number, int(block["first"]) if block["kind"] == DENSE else -1, values

    def _write_delta(self, path: Path, step: int) -> dict[str, Any]:
        sizes = [t.numel for t in self._tracked]
        # Those that the step has not updated may have been set by the program: they are compared, and sent whole.
        read = {i: t for i, t in enumerate(self._tracked) if t not in self._in_step and t.has_changed()}
        with DeltaWriter(path, step) as file:
            for encoded in self._recording.encoded(sizes, without=[*read]):
                file.add_encoded(*encoded)
            for number, tracked in read.items():
                tracked.whole = True  # its master may be another one
                for first, some in tracked.take():
                    file.add_whole(number, first, some)
            return file.finish([(i, 0, n) for i, n in enumerate(sizes)])

    def _name(self) -> None:
        """Let readers see what _write() has written. Raises OSError."""
        assert self._written
        (_, pending), self._written = self._written, None
        self._last = self._folder.name(pending)
        if self._last.is_full:
            self._last_full = self._last.number
        self._needs_full, self.error = False, ""
        with contextlib.suppress(OSError):  # what is not removed now is removed after the next version
            self._recording.clear()
            self._folder.retire(self._options.keep, self._last_full)


def _can_watch(state: ParamState) -> bool:
    """Whether the updates of a parameter can record what they change: its elements are in row-major order."""
    in_order = torch.empty_strided(state.own_master.shape, state.stride, device="meta").is_contiguous()
    return in_order and state.numel > 0 and state.part.is_whole and not state.param.is_complex()


def check_engine(engine: Engine, ranks: Ranks | None) -> None:
    """Raise CSDValueError if the updates of these devices cannot record what they change."""
    if ranks:
        raise CSDValueError("publish() is for one process: several ranks cannot publish together yet")
    if engine.devices.images_only:
        raise CSDValueError("publish() needs devices of this process: over serve:// it is not possible yet")
    for spec in engine.devices.named:
        if not (spec.kind.has_file or spec.kind.in_memory) or spec.kind.on_card or not spec.kind.keeps_state:
            raise CSDValueError(
                f"publish() needs devices that the CPU updates, and {spec} is none: its updates record nothing"
            )
    if type(engine.states.watcher) is not Watcher:
        raise CSDValueError("this optimizer publishes already: close() that publisher first")
