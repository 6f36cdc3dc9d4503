"""Devices of unequal speed get unequal shares: which tiles they get, how long a step takes, what the store contains."""

import itertools
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import idle_engine_of
from support.states import tile_bytes

from csd_optim import CSDAdam, CSDValueError
from csd_optim.devices.spec import parse_device, parse_devices, shares_of
from csd_optim.store.format import FILE_NAME, devices_of, read_contents
from csd_optim.store.layout import GRAIN, TILE_ELEMS, TILES_PER_DEVICE, plan_extent

SHARES = (1.0, 0.25, 2.0)


# ---- which tiles ---------------------------------------------------------------------


SHARE = st.floats(0.001, 1000)


@given(SHARE, st.integers(1, 5))
def test_equal_shares_take_turns(share, n_devices):
    assert devices_of([share] * n_devices, 17).tolist() == [i % n_devices for i in range(17)]


@given(st.lists(SHARE, min_size=1, max_size=4), st.integers(1, 7), st.integers(0, 100))
def test_no_other_division_would_be_through_earlier(shares, n, more):
    """This holds for all tiles, and for the first tiles up to any number: more tiles do not move those before."""
    devices = devices_of(shares, n)
    assert devices_of(shares, n + more)[:n].tolist() == devices.tolist()
    ours = max(np.bincount(devices, minlength=len(shares)) / shares)
    others = (c for c in itertools.product(range(n + 1), repeat=len(shares)) if sum(c) == n)
    assert ours <= min(max(np.divide(c, shares)) for c in others) * (1 + 1e-15)


@pytest.mark.parametrize("shares", [(1, 0.5), (1, 0.1, 1), (1, 0.001), (4, 4)])
@pytest.mark.parametrize("n", [100_000, 1 << 22, 1 << 27])
def test_small_share_of_a_small_model(n, shares):
    """A small model is cut into smaller tiles, so that every device gets its share up to about one tile."""
    e = plan_extent([n], len(shares), shares=shares)
    assert GRAIN <= e.tile_elems <= TILE_ELEMS
    for d, share in enumerate(shares):
        fair = e.n_tiles * share / sum(shares)
        assert fair - 1 < e.tiles_of(d) < fair + len(shares)
        if n >= 1 << 22 and min(shares) > 0.05:
            assert e.tiles_of(d) >= TILES_PER_DEVICE - 1


# ---- what users write ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "shares"),
    [
        (["ram:", "null:"], None),
        (["ram:?share=3", "null:?share=3"], None),
        (["file:?share=0.5", "ram:"], (0.5, 1)),
        (["file:?read=1GB/s", "file:?read=1GB/s"], None),
        (["file:?read=1GB/s", "file:?read=3GB/s&write=2GB/s"], (0.5, 1)),
        (["file:?mixed=1GB/s", "ram:?update=500M/s"], (0.083, 1)),
        (["file:?read=1GB/s", "file:"], None),  # the speed of the second is unknown
        (["file:?read=1GB/s", "file:?share=2&read=3GB/s"], (1, 2)),
        (["xrt:0?share=1e-3", "xrt:1?share=1000"], (0.001, 1000)),
    ],
)
def test_shares_of_devices(devices, shares):
    assert shares_of(parse_devices(devices)) == shares


@pytest.mark.parametrize("share", ["0", "-1", "nan", "inf", "1e4", "half", ""])
def test_bad_share(share):
    with pytest.raises(CSDValueError, match=r"share is a number from 0\.001 to 1000"):
        parse_device(f"ram:?share={share}")


# ---- speed ---------------------------------------------------------------------------


@pytest.mark.parametrize("said", [False, True])
def test_a_slow_device_gets_fewer_tiles(said):
    """Shares, given or derived from the pace, follow the rates, so that both devices finish at the same time."""
    numel = 3 << 20
    size = numel * tile_bytes(1 << 20, torch.float16)[1] / (1 << 20)
    rates = [size / 0.3e6, size / 0.9e6]
    devices = [
        f"file:?write={rate}MB/s&cache=off{f'&share={share}' if said else ''}"
        for rate, share in zip(rates, (3, 1), strict=True)
    ]
    p = torch.nn.Parameter(torch.randn(numel).half())
    p.grad = torch.randn(numel).half()
    start = time.perf_counter()
    with CSDAdam([p], devices=devices) as opt:
        opt.step()
        stats = opt.stats()
    assert time.perf_counter() - start >= 0.99 * size / (1e6 * sum(rates))  # the rates bound the time
    fast, slow = (d["params"] for d in stats["devices"])
    assert fast == pytest.approx(3 * slow, rel=0.1)


# ---- the store -----------------------------------------------------------------------


def names(tmp_path):
    return [f"{tmp_path}/csd{d}" for d in range(3)]


def contents(tmp_path):
    return [read_contents(tmp_path / f"csd{d}" / FILE_NAME) for d in range(3)]


def started(devices, steps, **options):
    """Returns the open optimizer, its parameters, and all parameters and states after `steps` steps."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in SHAPES]
    opt = CSDAdam(params, devices=devices, tile_size=4096, **options)
    return opt, params, further(opt, params, steps)


SHAPES = (((400, 140), torch.float32), ((9001,), torch.bfloat16), ((5,), torch.float16))


def further(opt, params, steps):
    for step in range(opt.committed_step, opt.committed_step + steps):
        generator = torch.Generator().manual_seed(step)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        opt.step()
    if idle_engine_of(opt).durable:
        opt.synchronize()
    return [t.detach().clone() for p in params for t in (p, *opt.state[p].values())]


def divided(tiles):
    """Return how many of sum(tiles) tiles each device gets by its share."""
    return np.bincount(devices_of(SHARES, sum(tiles)), minlength=len(SHARES)).tolist()


def same(images, others):
    return len(images) == len(others) and all(torch.equal(a, b) for a, b in zip(images, others, strict=True))


@pytest.fixture
def shared(tmp_path):
    """Creates three stores with unequal shares and trains two steps; the parameters and states after these."""
    devices = [f"file:{name}?share={share}" for name, share in zip(names(tmp_path), SHARES, strict=True)]
    opt, _, image = started(devices, 2)
    with opt:
        pass
    return image


def test_bits_are_those_of_memory(shared):
    assert same(shared, started("ram:", 2)[2])


def test_store_says_it(tmp_path, shared, run):
    held = contents(tmp_path)
    assert {"shares" in c.manifest["features"] for c in held} == {True}
    tiles = [c.manifest["extents"][0]["tiles"] for c in held]
    assert tiles == divided(tiles)
    assert tiles[2] > tiles[0] > tiles[1] > 0
    code, out, _ = run("inspect", names(tmp_path)[1], "--json")
    assert code == 0
    assert json.loads(out)["extents"][0]["shares"] == [*SHARES]
    code, out, _ = run("verify", *names(tmp_path))
    assert code == 0


@pytest.mark.parametrize("options", ["", "share=5"])
def test_resume_by_the_store_alone(tmp_path, shared, options):
    """Devices may come in any order and name any share; parameters that join get the store's shares too."""
    before = [(tmp_path / f"csd{d}" / FILE_NAME).stat().st_size for d in range(3)]
    order = [f"file:{name}?{options}" if options else name for name in (names(tmp_path)[d] for d in (2, 0, 1))]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in SHAPES]
    opt = CSDAdam(params, devices=order, tile_size=4096, resume=True)
    with opt:
        assert same([t.detach() for p in params for t in (p, *opt.state[p].values())], shared)
        assert same(further(opt, params, 1), started("ram:", 3)[2])
        joined = torch.nn.Parameter(torch.randn(50_000))
        joined.grad = torch.randn(50_000)
        opt.add_param_group({"params": [joined]})
        opt.step()
    held = contents(tmp_path)
    assert [c.manifest["extents"][-1]["shares"] for c in held] == [[*SHARES]] * 3
    for extents in zip(*(c.manifest["extents"] for c in held), strict=True):
        assert [e["tiles"] for e in extents] == divided([e["tiles"] for e in extents])
    assert [c.superblock.device for c in held] == [0, 1, 2]
    assert all(a <= b for a, b in zip(before, (c.end for c in held), strict=True))


def test_snapshot_export_import(tmp_path, shared, run):
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in SHAPES]
    with CSDAdam(params, devices=names(tmp_path), tile_size=4096, resume=True) as opt:
        opt.save(tmp_path / "snapshot")
    assert run("export", tmp_path / "snapshot", tmp_path / "state.pt")[0] == 0
    new = [f"file:{tmp_path}/new{d}?share={1 + d}" for d in range(2)]
    assert run("import", tmp_path / "state.pt", *new)[0] == 0
    for devices in ([f"{tmp_path}/snapshot/device-{d}" for d in range(3)], [f"{tmp_path}/new{d}" for d in range(2)]):
        params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in SHAPES]
        with CSDAdam(params, devices=devices, resume=True) as opt:
            assert same([t.detach() for p in params for t in (p, *opt.state[p].values())], shared)
    assert read_contents(tmp_path / "new0" / FILE_NAME).manifest["extents"][0]["shares"] == [1, 2]


def test_equal_shares_are_the_format_that_was(tmp_path):
    opt, _, _ = started([f"file:{name}?share=0.5" for name in names(tmp_path)], 1)
    opt.close()
    for held in contents(tmp_path):
        assert {*held.manifest["features"]} - {"codec"} == {"chunk_sums", "tile_numbers"}
        assert "shares" not in held.manifest["extents"][0]
