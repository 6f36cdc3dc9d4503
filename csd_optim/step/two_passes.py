"""The order in which a step takes its tiles: all in one pass, or its matrices in two.

The update of a matrix takes two passes over its tiles: the momentum, then the orthogonalized update. To the engine each
pass looks like an ordinary tile. Pass 1 takes the gradient, and returns the matrix X in place of the parameter. Pass 2
takes the orthogonalized X in place of a gradient, and returns the parameter. The second pass of a tile has the tile's
number with PASS_2. In the step's table, a parameter's second row is its first plus the number of parameters.
muon/schedule.py has the order. Where ranks divide a matrix, whole_matrices.py assembles it between the passes.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..accelerator import is_on_accelerator
from ..bindings import DTYPE_CODES, HYPER, IN_SECTION, PASS_2
from ..devices.machine import available_memory
from ..distributed.ranks import Ranks
from ..engine.engine import Engine
from ..errors import CSDMemoryError
from ..muon.newton_schulz import Orthogonal, workspace_bytes
from ..muon.schedule import BEHIND, LEAST_TILES, Group, Matrix, groups_of
from ..params.grad_source import GradSource
from ..params.param_state import ParamState
from ..signals import raise_deferred
from ..store.layout import TILE_ELEMS
from .spec import StepSpec
from .staging import NO_BUFFERS, StagingBuffer, StagingRing, nothing
from .whole_matrices import WholeMatrices

NOWHERE = torch.empty(0, dtype=torch.bfloat16, device="cpu")
ALIGNED = 64  # elements: an X begins at a multiple of so many


@dataclass
class InTwoPasses:
    """A parameter of the step. `x`: bf16, 1-D, in the memory order of the states, on the parameter's device."""

    state: ParamState
    how: Orthogonal
    x: torch.Tensor

    @property
    def _in_shape(self) -> torch.Tensor:
        return self.x.as_strided(self.state.own_master.shape, self.state.stride, self.x.storage_offset())

    @property
    def by_rows(self) -> torch.Tensor:
        """X, row by row, 1-D."""
        return self._in_shape.reshape(-1)

    def set_rows(self, x: torch.Tensor) -> None:
        self._in_shape.copy_(x.view(self.state.own_master.shape))

    def orthogonalize(self) -> None:
        """Orthogonalize X in place, by Newton-Schulz."""
        self._in_shape.copy_(self.how.of(self._in_shape))


class OnePass:
    """The tiles of a step without matrices."""

    n_passes = 1
    tiles: np.ndarray[Any, Any] = np.zeros(0, np.uint32)  # tiles that take two passes, ascending
    exchange: WholeMatrices | None = None  # of the matrices that ranks divide

    def __init__(self, engine: Engine, spec: StepSpec, tiles: np.ndarray[Any, Any]) -> None:
        """`tiles`: of the step, in flow order, uint32."""
        self._engine = engine
        self.spec: StepSpec = spec
        self._tiles = tiles
        self._images: Collection[int] = ()

    @property
    def dtypes(self) -> list[str]:
        """The dtypes in which the matrices are orthogonalized."""
        return []

    @property
    def sources(self) -> Mapping[int, GradSource]:
        """The sources of gradients, by row of the table that tables() returns."""
        return self.spec.sources

    def begin_with(self, one_pass: np.ndarray[Any, Any]) -> None:
        """Take the tiles of one pass in this order: uint32, all of them."""
        self._tiles = one_pass

    @property
    def in_order(self) -> np.ndarray[Any, Any]:
        """The tiles of the step for Engine.begin(), with second passes: uint32."""
        return self._tiles

    def tables(self, images: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the step's table and constants for Engine.begin(). `images`: tiles that travel by staging buffers."""
        self._images = images
        return self.spec.table, self.spec.hypers

    def named(self, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers (uint32) by which these tiles return parameters."""
        return tiles

    def run(
        self,
        ring: StagingRing,
        pulled: Callable[[int], None] | None,
        early_buffers: Mapping[int, StagingBuffer] = NO_BUFFERS,
        idle_work: Callable[[], None] = nothing,
    ) -> None:
        """Push and pull the tiles that travel as images. Arguments: see StagingRing.run()."""
        if self._images:
            ring.run(self._engine, self._images, self.sources, pulled, early_buffers, idle_work)

    def finish(self) -> None:
        """Make the exchanges that other ranks still wait for after a failure."""


class TwoPasses(OnePass):
    """The parameters of one step that take two passes. Holds X of a few groups at a time, in buffers."""

    n_passes = 2

    def __init__(
        self,
        engine: Engine,
        spec: StepSpec,
        tiles: np.ndarray[Any, Any],
        ranks: Ranks | None,
        *,
        foreseen: bool = False,
    ) -> None:
        """`tiles`: of the step, in flow order. `foreseen`: this object will not run: step() prepares another one.

        Raises CSDMemoryError if there is no room to orthogonalize.
        """
        super().__init__(engine, spec, tiles)
        self._n = engine.tiles.n_params
        states = {state.index: state for state in spec.plan.param_states if state.index in spec.orthogonal}
        any_divided = not all(state.part.is_whole for state in states.values())
        # Ranks may go through their tiles in different directions, which are not agreed on yet.
        step = -1 if engine.descending and not any_divided else 1
        pieces = engine.tiles.by_param
        matrices = [
            Matrix(row, tuple(whole_shape(s)), tuple(pieces.of(row)["tile"][::step].tolist()), not s.part.is_whole)
            for row, s in [*states.items()][::step]
        ]
        # Divided matrices come first, in the same groups on all ranks: the other matrices may differ from rank to rank.
        matrices.sort(key=lambda matrix: not matrix.is_divided)
        tile_elems = TILE_ELEMS if any_divided else max(e.tile_elems for e in engine.tiles.extents)
        size = ranks.size if ranks and any_divided else 1
        self.groups: list[Group] = groups_of(matrices, LEAST_TILES * tile_elems * size)
        if any_divided:
            assert ranks
            divided = [group.matrices for group in self.groups if group.is_divided]
            self.exchange: WholeMatrices | None = WholeMatrices(
                ranks, [(some, [states[m.row].part.blocks_by_rank(ranks) for m in some]) for some in divided]
            )
        if foreseen:
            self._params = {row: InTwoPasses(state, spec.orthogonal[row], NOWHERE) for row, state in states.items()}
        else:
            self._params = self._with_buffers(states, spec.orthogonal)
        self.tiles: np.ndarray[Any, Any] = pieces.tiles_of([*self._params])
        self._one_pass: list[int] = tiles[~np.isin(tiles, self.tiles)].tolist()
        self._one_pass_first = False  # before the first group
        self._sources: dict[int, GradSource] = {}  # by row of the table: of matrices, in both passes

    # ---- memory ------------------------------------------------------------------------

    def _with_buffers(self, states: Mapping[int, ParamState], how: Mapping[int, Orthogonal]) -> dict[int, InTwoPasses]:
        places: dict[int, tuple[int, torch.device, int]] = {}  # by row: buffer, and first element
        sizes: dict[tuple[int, torch.device], int] = {}
        workspace: dict[torch.device, int] = {}
        for group in self.groups:
            used: dict[torch.device, int] = {}
            whole = 0  # bytes of matrices that are assembled here, before and after
            for matrix in group.matrices:
                device = states[matrix.row].local.device
                places[matrix.row] = group.buffer, device, used.get(device, 0)
                used[device] = places[matrix.row][2] + -(-states[matrix.row].numel // ALIGNED) * ALIGNED
                needed = workspace_bytes(matrix.shape, how[matrix.row].dtype, device) + 4 * matrix.numel
                whole += 4 * matrix.numel if matrix.is_divided else 0
                workspace[device] = max(workspace.get(device, 0), needed + whole)
            for device, n in used.items():
                sizes[group.buffer, device] = max(sizes.get((group.buffer, device), 0), n)
        on_host = sum(2 * n for (_, device), n in sizes.items() if device.type == "cpu")
        on_host += workspace.get(torch.device("cpu"), 0)
        if on_host > (available := available_memory()):
            raise CSDMemoryError(
                f"orthogonalizing the matrices of this step takes {on_host / 1e9:.1f} GB of memory, and "
                f"{available / 1e9:.1f} GB are available"
            )
        buffers = {}
        try:
            for (k, device), n in sizes.items():
                buffers[k, device] = torch.empty(n, dtype=torch.bfloat16, device=device)
            for device, nbytes in workspace.items():
                if device.type != "cpu":  # freed at once: torch caches the memory
                    torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as e:  # torch.OutOfMemoryError is one
            raise CSDMemoryError(f"no memory to orthogonalize the matrices of this step: {e}") from e
        return {
            row: InTwoPasses(states[row], how[row], buffers[k, device][first : first + states[row].numel])
            for row, (k, device, first) in places.items()
        }

    @property
    def dtypes(self) -> list[str]:
        return sorted({"fp32" if p.how.dtype is torch.float32 else "bf16" for p in self._params.values()})

    @property
    def sources(self) -> Mapping[int, GradSource]:
        return ChainMap(self._sources, self.spec.sources)  # `_sources` first: _orthogonalize() frees gradients there

    # ---- before the step begins --------------------------------------------------------

    def begin_with(self, one_pass: np.ndarray[Any, Any]) -> None:
        """Put the tiles of one pass (uint32, all of them) first, as some are pushed in backward.

        Second passes are possible only in step(): devices would wait for them.
        """
        self._one_pass, self._one_pass_first = one_pass.tolist(), True

    @property
    def in_order(self) -> np.ndarray[Any, Any]:
        listed = self._first(self._one_pass)
        for k, group in enumerate(self.groups):
            listed += self.groups[k + 1].first if k + 1 < len(self.groups) else []
            listed += [tile | PASS_2 for tile in group.second]
        return np.array(listed, np.uint32)

    def _first(self, one_pass: Sequence[int]) -> list[int]:
        """Return the tiles with which a step begins: those of one pass, and the first passes of the first group."""
        first = self.groups[0].first
        return [*one_pass, *first] if self._one_pass_first else [*first, *one_pass]

    def tables(self, images: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the step's table, with a second row for each parameter, and its constants: for Engine.begin().

        `images`: tiles that travel through staging buffers. Changes the sources of their parameters in the step's spec
        to the second pass.
        """
        spec = self.spec
        self._images = frozenset(images)
        hows = {self._params[row].how[3:]: None for row in sorted(self._params)}
        kinds = {how: len(spec.hypers) + k for k, how in enumerate(hows)}
        hypers = np.concatenate([spec.hypers, np.array([*kinds], HYPER)])
        first, second = spec.table.copy(), spec.table.copy()
        for row, p in self._params.items():
            if not p.state.numel:
                continue
            at = p.x.data_ptr() or p.state.local.data_ptr()  # a stand-in for X, NOWHERE
            one, two = first[row], second[row]
            two["grad"], two["grad_dtype"], two["hyper"] = at, DTYPE_CODES[torch.bfloat16], kinds[p.how[3:]]
            one["param"], one["param_dtype"], one["in_image"] = at, DTYPE_CODES[torch.bfloat16], 0
            one["master"] = IN_SECTION  # master and watch belong to the second row
            one["watch"] = 0
            if source := spec.sources.get(row):
                self._sources[row] = replace(source, param=p.x, param_is_read=False, param_and_copy=None)
                source.grad, source.grad_dtype, source.first = p.x, torch.bfloat16, 0
                self._sources[row + self._n] = source
                one["param"] = 0 if source.is_far else at
        return np.concatenate([first, second]), hypers

    # ---- the step ----------------------------------------------------------------------

    def named(self, tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the numbers (uint32) by which these tiles return parameters: with PASS_2 if they take two passes."""
        return np.where(np.isin(tiles, self.tiles), tiles | np.uint32(PASS_2), tiles).astype(np.uint32)

    def run(
        self,
        ring: StagingRing,
        pulled: Callable[[int], None] | None,
        early_buffers: Mapping[int, StagingBuffer] = NO_BUFFERS,
        idle_work: Callable[[], None] = nothing,
    ) -> None:
        """Run all passes, and the tiles of one pass that travel as images. A collective if ranks divide matrices.

        `pulled` is called with each of these tiles when its parameters have arrived, or are queued: see
        StagingRing.run(), also for `early_buffers` and `idle_work`.
        """
        self._transfer(self._first(self._images_of(self._one_pass)), ring, pulled, early_buffers, idle_work)
        for k, group in enumerate(self.groups):
            ahead = self.groups[k + 1].first if k + 1 < len(self.groups) else []
            if k + 1 >= BEHIND:  # frees the buffers of the next group
                self._await([tile | PASS_2 for tile in self.groups[k + 1 - BEHIND].second])
            self._push(ahead)
            self._await(group.first)
            self._orthogonalize(k)
            second = [tile | PASS_2 for tile in group.second]
            self._transfer([*self._images_of(ahead), *second], ring, pulled)

    def finish(self) -> None:
        """Make the exchanges that other ranks still wait for after a failure. A collective if ranks divide matrices."""
        if self.exchange:
            self.exchange.finish()

    def _orthogonalize(self, k: int) -> None:
        group = self.groups[k]
        if group.is_divided:
            assert self.exchange
            rows = [self._params[matrix.row].by_rows for matrix in group.matrices]
            is_here = self.exchange.has_root_here(k)
            here = [matrix for matrix, is_root in zip(group.matrices, is_here, strict=True) if is_root]
            wholes = []
            for matrix, x in zip(here, self.exchange.collect(k, rows), strict=True):
                raise_deferred()  # a matrix may take minutes on a CPU
                wholes.append(self._params[matrix.row].how.of(x.view(matrix.shape)).view(-1))
            for matrix, x in zip(group.matrices, self.exchange.hand_out(k, wholes, rows), strict=True):
                self._params[matrix.row].set_rows(x)
        else:
            for matrix in group.matrices:
                raise_deferred()
                self._params[matrix.row].orthogonalize()
        for matrix in group.matrices:
            self._sources.pop(matrix.row, None)  # frees the gradient

    def _images_of(self, tiles: Sequence[int]) -> list[int]:
        return [tile for tile in tiles if tile & ~PASS_2 in self._images]

    def _push(self, tiles: Sequence[int]) -> list[int]:
        """Push the tiles (or passes) that need no staging buffer; return them."""
        pushed = [tile for tile in tiles if tile & ~PASS_2 not in self._images]
        for tile in pushed:
            self._engine.native.push(tile)
        return pushed

    def _await(self, tiles: Sequence[int]) -> None:
        """Wait for the results of these tiles or passes. (Results of images have arrived once _transfer() returns.)"""
        waited = [tile for tile in tiles if tile & ~PASS_2 not in self._images]
        self._engine.native.params_ready(np.array(waited, np.uint32), wait=True)

    def _transfer(
        self,
        tiles: Sequence[int],
        ring: StagingRing,
        pulled: Callable[[int], None] | None,
        early_buffers: Mapping[int, StagingBuffer] = NO_BUFFERS,
        idle_work: Callable[[], None] = nothing,
    ) -> None:
        """Push these tiles or passes, and return when the results of images have arrived."""
        first = {*self.tiles.tolist()}

        def note(tile: int) -> None:
            if pulled and tile not in first:  # a second pass, or a tile of one pass
                pulled(tile & ~PASS_2)

        for tile in self._push(tiles):
            note(tile)
        if images := self._images_of(tiles):
            for device in {p.x.device for p in self._params.values() if is_on_accelerator(p.x)}:
                ring.wait_for_current(device)  # its X may still be queued there
            ring.run(self._engine, images, self.sources, note, early_buffers, idle_work)


def whole_shape(state: ParamState) -> torch.Size:
    """Return the shape of the whole matrix; this rank's parameter may be a part of it."""
    return state.own_master.shape if state.part.is_whole else state.part.whole_shape
