"""Stores of a model with every kind of parameter, after some steps, and trainings that resume them."""

import json

import numpy as np
import torch
from support.backends import TILE
from support.comparing import assert_same

from csd_optim import CSDAdam, CSDStoreError
from csd_optim.bindings import crc32c
from csd_optim.store.format import (
    CLEAN,
    FILE_NAME,
    PAGE,
    TILE_STATE,
    Record,
    Region,
    Superblock,
    pack_table,
    pack_tiles,
    read_contents,
    read_region,
    superblocks,
)
from csd_optim.store.layout import plan_extent, round_up


def model(seed=0):
    """Return parameters of every kind; "waiting" never has a gradient."""
    torch.manual_seed(seed)
    return {
        "weight": torch.nn.Parameter(torch.randn(60, 150)),
        "columns": torch.nn.Parameter(torch.randn(70, 90).t()),
        "half": torch.nn.Parameter(torch.randn(5000).bfloat16()),
        "phase": torch.nn.Parameter(torch.randn(33, 3, dtype=torch.complex64).t()),
        "scalar": torch.nn.Parameter(torch.randn(())),
        "empty": torch.nn.Parameter(torch.randn(0, 3)),
        "waiting": torch.nn.Parameter(torch.randn(4)),
        "amsgrad": torch.nn.Parameter(torch.randn(3000)),
    }


def groups_of(params, named=True):
    members = [*params.items()] if named else [*params.values()]
    return [{"params": members[:4]}, {"params": members[4:7], "lr": 3e-3}, {"params": members[7:], "amsgrad": True}]


def grads(params, seed):
    torch.manual_seed(1000 + seed)
    for name, p in params.items():
        p.grad = None if name == "waiting" else torch.randn_like(p)


def train_params(opt, params, first, last):
    for step in range(first, last):
        grads(params, step)
        opt.step()


def places(directory, n):
    return [directory / f"csd{d}" for d in range(n)]


def make(directory, n=2, named=True, steps=3, **options):
    """Return parameters and an optimizer after some steps."""
    directory.mkdir(exist_ok=True)
    params = model()
    options = {"tile_size": TILE, "lr": 1e-2} | options
    opt = CSDAdam(groups_of(params, named), devices=places(directory, n), **options)
    train_params(opt, params, 0, steps)
    return params, opt


def state_of(opt, params):
    """Return a copy of everything that a store holds."""
    held = {}
    for name, p in params.items():
        if name != "waiting":
            held[name] = {key: value.clone() for key, value in opt.state[p].items()} | {"itself": p.detach().clone()}
    return held


def resumed(devices, named=True, **options):
    """Return a fresh model whose optimizer resumes a store."""
    params = model(seed=9)
    return params, CSDAdam(groups_of(params, named), lr=1e-2, devices=devices, resume=True, **options)


def in_snapshot(path):
    return sorted(path.iterdir())


def continues_like(params, opt, devices, named=True):
    """Assert that a model that resumes `devices` has the same bits as this one, now and after more steps."""
    others, again = resumed(devices, named)
    assert_same(state_of(again, others), state_of(opt, params))
    train_params(opt, params, 100, 102)
    train_params(again, others, 100, 102)
    assert_same(state_of(again, others), state_of(opt, params))
    again.close()


def sparse_store(directory, shapes, dense):
    """Make a store with random states in `dense` tiles; the others are zeros, holes in the file."""
    directory.mkdir()
    numels = [int(np.prod(shape)) for _, shape in shapes]
    extent = plan_extent(numels, 1)
    sections, base = ["master", "exp_avg", "exp_avg_sq"], 2 * PAGE
    end = base + extent.device_bytes(0)
    params = [
        {"name": name, "group": 0, "position": i, "shape": list(shape), "dtype": "bfloat16", "extent": 0}
        | {"stride": list(torch.empty(shape, device="meta").stride()), "start": extent.starts[i], "numel": numels[i]}
        for i, (name, shape) in enumerate(shapes)
    ]
    described = {"tile_elems": extent.tile_elems, "tiles": extent.n_tiles, "slots": 2, "sections": sections}
    described["sum_elems"] = extent.tile_elems
    manifest = {"params": params, "waiting": [], "extents": [described | {"file_offset": base}]}
    about = json.dumps(manifest | {"tiles": extent.n_tiles}).encode()
    tiles, sums = np.zeros(extent.n_tiles, TILE_STATE), np.zeros((extent.n_tiles, 1, 3), np.uint32)
    tiles["summed"] = 1
    sums[:] = crc32c(bytes(4 * extent.tile_elems))
    noise = np.random.default_rng(0).bytes(4 * extent.tile_elems)
    with (directory / FILE_NAME).open("wb") as file:
        for tile in np.linspace(0, extent.n_tiles - 1, dense).astype(int).tolist():
            tiles["slot"][tile] = tile % 2
            sums[tile] = crc32c(noise)
            file.seek(base + (2 * tile + tile % 2) * extent.slot_bytes)
            for _ in sections:
                file.write(noise)
        with CSDAdam([torch.nn.Parameter(torch.ones(1))], devices=["ram:"]) as opt:
            record = Record(groups=[{k: v for k, v in opt.param_groups[0].items() if k != "params"}])
        table = pack_table([pack_tiles(described, tiles, sums)], np.full(len(params), 7.0), record)
        rooms = [round_up(len(data), PAGE) for data in (about, table)]
        of_manifest = Region(end, rooms[0], len(about), crc32c(about))
        of_table = Region(end + 2 * rooms[0], rooms[1], len(table), crc32c(table))
        block = Superblock(b"sparse as can be", 0, 1, 7, 7, CLEAN, of_manifest, of_table)
        for copy in range(2):
            for at, data in ((of_manifest.offset(copy), about), (of_table.offset(copy), table)):
                file.seek(at)
                file.write(data)
            file.seek(copy * PAGE)
            file.write(block.pack())
        file.truncate(of_table.offset(2))
    return sum(numels)


def where(directory, section, tile=0):
    """Return the offset of a section of a tile (of extent 0, on one device)."""
    contents = read_contents(directory)
    extent, _, at = next(s for s in contents.slots() if s[1] == tile)
    return at + 4 * extent["tile_elems"] * extent["sections"].index(section)


def flip(directory, section, tile=0, at=None):
    file = directory / FILE_NAME
    at = where(directory, section, tile) if at is None else at
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 0x10]))


def whole_copies(directory):
    """Return whether copy 0 and copy 1 of a store are whole, with the manifest and the table that they name."""
    whole = [False, False]
    with (directory / FILE_NAME).open("rb") as file:
        for copy, block in superblocks(file.fileno(), str(file.name)):
            try:
                read_region(file.fileno(), block.manifest, copy, "manifest", file.name)
                read_region(file.fileno(), block.table, copy, "slot table", file.name)
                whole[copy] = True
            except CSDStoreError:
                pass
    return whole
