"""The bytes read and written according to opt.stats(), compared with the kernel's counts in /proc/self/io."""

from pathlib import Path

import pytest
import torch

from csd_optim import CSDAdam

pytestmark = pytest.mark.serial("short of memory, the kernel reads pages of libraries again, and counts them")

TILE = 32768  # elements: 46 tiles
COUNTERS = Path("/proc/self/io")


def counted():
    lines = (line.split(": ") for line in COUNTERS.read_text().splitlines())
    values = {name: int(value) for name, value in lines}
    return values["read_bytes"], values["write_bytes"]


@pytest.mark.skipif(not COUNTERS.exists(), reason="this kernel does not count a process's I/O")
@pytest.mark.parametrize("cache", ["off", "0", "6MB"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("topk", [None, 0.01])
@pytest.mark.parametrize("devices", ["file:", "file:csd0 file:csd1"], ids=["scratch", "durable"])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_flash_bytes_are_those_of_the_kernel(devices, topk, amsgrad, cache):
    p = torch.nn.Parameter(torch.randn(1500, 1000))
    devices = [f"{device}?cache={cache}" for device in devices.split()]
    with CSDAdam([p], devices=devices, topk=topk, amsgrad=amsgrad, tile_size=TILE) as opt:

        def step():
            p.grad = torch.randn_like(p)
            opt.step()
            opt.synchronize()
            return opt.stats()  # waits for the last states

        if not step()["devices"][0]["direct_io"]:
            pytest.skip("no direct I/O here: the page cache is between")
        before = counted()
        steps = [step() for _ in range(4)]
        read, written = (b - a for a, b in zip(before, counted(), strict=True))
    tile_bytes = 4 * TILE * (4 if amsgrad else 3)
    tiles = -(-p.numel() // TILE)
    in_buffers = {"off": 0, "0": 8, "6MB": 8 + int(6e6) // tile_bytes}[cache] * len(devices)
    assert sum(s["flash_read_bytes"] for s in steps) == pytest.approx(read, rel=0.02)
    assert sum(s["flash_write_bytes"] for s in steps) == pytest.approx(written, rel=0.02)
    least = 4 * tile_bytes * (tiles - in_buffers)
    # Tiles may overtake each other, so that the buffers do not hold exactly the first tiles of the next step.
    assert 0.98 * least <= read <= 1.02 * least + (cache != "off") * 2 * tile_bytes * in_buffers
    assert written == pytest.approx(4 * tile_bytes * tiles, rel=0.02) or topk
