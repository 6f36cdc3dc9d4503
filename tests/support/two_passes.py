"""Muon on an engine, driven by hand: pass 1, an orthogonalization in torch, pass 2; and the same in plain NumPy."""

import contextlib
import itertools
import threading

import numpy as np
import torch
from support.tables import step_table

from csd_optim.bindings import HYPER, PASS_2, PASS_RULES
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.open_engine import open_engine
from csd_optim.errors import CSDError, CSDRuntimeError

SECTIONS = ("master", "momentum_buffer")
# Parts of tiles, whole tiles, and several tiles of 1024 elements; neighbours share tiles.
SHAPES = ((60, 70), (16, 8), (8, 16), (33, 65), (7, 3), (64, 32))
LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SECONDS = 60  # after which a step counts as one that would never end


def orthogonal(x):
    """Return Newton and Schulz's approximation of the nearest orthogonal matrix, bf16, computed in double."""
    y = x.double()
    y = y.T if x.shape[0] > x.shape[1] else y
    y = y / y.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return (y.T if x.shape[0] > x.shape[1] else y).to(torch.bfloat16).contiguous()


def order_of_passes(groups):
    """Return the tiles of a step, uint32, in an order for Engine.begin() that needs few buffers.

    `groups`: for each group of matrices whose updates are computed together, the tiles with parts of them (uint32);
    groups may share tiles. While one group is computed between its passes, the devices read the next one: first passes
    of the next group come before second passes of the current group. A second pass follows the first passes of all
    groups that have its tile. A step in this order cannot deadlock, however few buffers there are, if second passes are
    pushed group by group: those of a group before it waits for the first passes of the one after the next.
    """
    last = {tile: g for g, tiles in enumerate(groups) for tile in tiles.tolist()}
    listed: dict[int, None] = {}  # in order
    for g in range(len(groups) + 1):
        if g < len(groups):
            listed.update(dict.fromkeys(groups[g].tolist()))
        if g > 0:
            listed.update((tile | PASS_2, None) for tile in groups[g - 1].tolist() if last[tile] == g - 1)
    return np.array([*listed], np.uint32)


def hypers(shapes, *, nesterov=True, scale=1.0):
    """Return the constants, dtype HYPER: of pass 1, then of pass 2 for each shape."""
    rows = [(PASS_RULES["muon_momentum"], (1 - MOMENTUM, MOMENTUM, nesterov, 0, 0, 0, 0, 0, scale))]
    for rows_, columns in shapes:
        ratio = max(1, rows_ / columns) ** 0.5
        rows.append((PASS_RULES["muon_apply"], (1 - LR * DECAY, LR * ratio, 0, 0, 0, 0, 0, 0, 0)))
    return np.array(rows, HYPER)


def gradients(shapes, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def initial(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Model:
    """The same in NumPy, without engine and tiles, in fp32 operations that nothing fuses."""

    def __init__(self, params, x_dtype=torch.bfloat16):
        self.dtypes = [p.dtype for p in params]
        self.x_dtype = x_dtype
        self.masters = [p.float().numpy().copy() for p in params]
        self.momenta = [np.zeros_like(m) for m in self.masters]

    def step(self, grads, constants):
        """Take a step. A gradient None: the matrix has none."""
        (w, momentum, nesterov, *_, scale), *applied = constants["c"]
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            g = grad.float().numpy() * scale
            buf = self.momenta[i]
            buf += w * (g - buf)
            x = g + momentum * (buf - g) if nesterov else buf
            o = orthogonal(torch.from_numpy(x).to(self.x_dtype)).float().numpy()
            self.masters[i] = self.masters[i] * applied[i][0] - applied[i][1] * o

    @property
    def params(self):
        return [torch.from_numpy(m).to(dtype) for m, dtype in zip(self.masters, self.dtypes, strict=True)]

    def image(self):
        states = (torch.from_numpy(s.copy()) for s in itertools.chain(self.masters, self.momenta))
        return [bits(t) for t in itertools.chain(self.params, states)]


def bits(t):
    return t.detach().clone().view(torch.int32 if t.element_size() == 4 else torch.int16)


class TwoPasses:
    """Matrices whose states are on an engine. See open_engine() for `options`.

    `x_dtype`: of what pass 1 returns. `filled`: the masters are the parameters; else the first step must see to that.
    """

    def __init__(
        self,
        devices,
        shapes=SHAPES,
        *,
        dtype=torch.float32,
        x_dtype=torch.bfloat16,
        tile_elems=1024,
        filled=True,
        **options,
    ):
        self.shapes, self.dtype = shapes, dtype
        self.engine = open_engine(parse_devices(devices), tile_elems=tile_elems, **{"two_passes": True, **options})
        self.params = initial(shapes, dtype)
        self.x = [torch.zeros(shape, dtype=x_dtype) for shape in shapes]
        self.o = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
        self.constants = hypers(shapes)
        self.done = 0
        if not self.engine.tiles.extents:
            self.engine.extend([p.numel() for p in self.params], SECTIONS)
            self.engine.committer.describe(self.manifest())
        if filled and not self.engine.recovered:
            masters = self.windows()[: len(shapes)]
            with self.engine.writing([*range(len(shapes))]):
                for master, p in zip(masters, self.params, strict=True):
                    master.copy_(p.flatten())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.engine.closed:
            with contextlib.suppress(CSDRuntimeError):  # no step is under way
                self.engine.finish(keep=False)
        self.engine.close()

    @property
    def native(self):
        return self.engine.native

    @property
    def extent(self):
        return self.engine.tiles.extents[0]

    def manifest(self):
        """Return what a store needs to be read again: its parameters, as 1-D ones."""
        return {
            "params": [
                {"name": f"0.{i}", "group": 0, "position": i, "shape": [n], "dtype": "float32", "stride": [1]}
                | {"extent": e, "start": start, "numel": n}
                for e, extent in enumerate(self.engine.tiles.extents)
                for i, (n, start) in enumerate(zip(extent.numels, extent.starts, strict=True), extent.first_param)
            ],
            "waiting": [],
            "groups": [],
            "rule": "muon",
        }

    def windows(self):
        rows = range(len(self.shapes))
        return [self.engine.windows.window(self.extent, i, s, torch.float32) for s in range(2) for i in rows]

    def tiles_of(self, matrices):
        return self.engine.tiles.of([*matrices])

    def commit(self):
        """Make the last step durable."""
        self.engine.committer.commit()
        self.engine.wait()

    def slots(self):
        return self.engine.states.slots_of(self.extent)[0]["slot"].tolist()

    def image(self):
        """Return the bits of all parameters and states."""
        self.engine.states.remap()
        return [bits(t) for t in itertools.chain(self.params, (w.view(s) for w, s in self._shaped()))]

    def _shaped(self):
        return zip(self.windows(), self.shapes * 2, strict=True)

    # ---- a step --------------------------------------------------------------------

    def table(self, grads):
        """Return the rows of both passes. A gradient None: the matrix has none."""
        first = step_table([self.x[i] if g is None else g for i, g in enumerate(grads)], self.x)
        second = step_table(self.o, self.params)
        second["hyper"] = 1 + np.arange(len(grads))
        for row, grad in enumerate(grads):
            if grad is None:
                first["grad"][row] = second["grad"][row] = 0
        return np.concatenate([first, second])

    def groups(self, grads, size=1):
        """Return matrices with a gradient, so many at a time."""
        having = [i for i, g in enumerate(grads) if g is not None]
        return [having[at : at + size] for at in range(0, len(having), size)]

    def begin(self, grads, size=1, **changed):
        groups = self.groups(grads, size)
        tiles = order_of_passes([self.tiles_of(group) for group in groups])
        return self.engine.begin(**{"params": self.table(grads), "hypers": self.constants, "tiles": tiles, **changed})

    def first_passes(self, tiles):
        """Push the first passes of a step over `tiles`, as returned by begin(), and tiles without a second one."""
        for tile in tiles[tiles < PASS_2].tolist():
            self.native.push(tile)

    def orthogonalize(self, group):
        """Wait until X of these matrices is there, and compute O."""
        self.native.params_ready(self.tiles_of(group), wait=True)
        for i in group:
            self.o[i].copy_(orthogonal(self.x[i]))

    def second_passes(self, groups, g):
        """Push the second passes that wait for group `g`, and for none after it."""
        last = {tile: i for i, group in enumerate(groups) for tile in self.tiles_of(group).tolist()}
        for tile in (tile for tile, i in last.items() if i == g):
            self.native.push(tile | PASS_2)

    @contextlib.contextmanager
    def in_time(self):
        """Undo the step after some time, which ends the waits of a step that would never end: they raise."""
        timer = threading.Timer(SECONDS, self.native.finish, (False,))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def give_up(self):
        """Undo the step after it has failed, unless that has happened."""
        if self.engine.stepping:
            with contextlib.suppress(CSDError):  # the failure, once more
                self.engine.finish(keep=False)

    def step(self, size=1, grads=None, **changed):
        grads = gradients(self.shapes, self.done, self.dtype) if grads is None else grads
        groups = self.groups(grads, size)
        tiles = self.begin(grads, size, **changed)
        with self.in_time():
            self.first_passes(tiles)
            for g, group in enumerate(groups):
                self.orthogonalize(group)
                self.second_passes(groups, g)
            self.engine.finish()
        self.done += 1
        return grads


def undone_params(ours, before):
    """Give the parameters that an undone step has written their values from before; return their tiles."""
    undone = dict(ours.native.undone())
    for p, tile, first, _, elems in ours.extent.pieces.tolist():
        if tile in undone:
            assert undone[tile] == ours.extent.tile_elems
            at = slice(first, first + elems)
            ours.params[p].flatten()[at] = before[p].flatten()[at].view(ours.dtype)
    return {*undone}
