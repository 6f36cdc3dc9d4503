"""Paced devices keep their rates, everything still overlaps, and nothing but the time changes.

The lower bound of a step's time is asserted exactly, because a busy machine can only make steps slower. The upper bound
is loose, and applies to the fastest of several steps.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from csd_optim import CSDAdam, CSDValueError
from csd_optim.cli.benchmark import scratch
from csd_optim.devices.backends import NO_CACHE
from csd_optim.devices.spec import parse_device, parse_devices
from csd_optim.rates import Rates

pytestmark = pytest.mark.serial("steps have to keep a pace")

NUMEL = 1 << 20  # parameters: states of 12.6 MB, fp16 gradients of 2.1 MB
TILE = 1 << 16  # elements: 16 tiles
STATES, GRADS = 12 * NUMEL, 2 * NUMEL  # bytes
SLACK = 3  # a busy machine may make a step this many times slower than its pace


def optimizer(devices, *, state_dtype="fp32", **options):
    """Return an optimizer whose states have the size that the rates here assume, whatever other tests use."""
    p = torch.nn.Parameter(torch.randn(NUMEL).half())
    p.grad = torch.randn(NUMEL).half()
    return CSDAdam([p], devices=devices, tile_size=TILE, state_dtype=state_dtype, **options)


def step_seconds(opt):
    """Return the seconds of one step, until the last state is written."""
    start = time.perf_counter()
    opt.step()
    opt.stats()
    return time.perf_counter() - start


def reading_all(device):
    return f"{device}{'&' if '?' in device else '?'}cache=off" if device.startswith("file:") else device


def best(devices, steps=3):
    """Return the seconds of the fastest step, except the first, which reads nothing and fills the store."""
    with optimizer([*map(reading_all, devices)]) as opt:
        step_seconds(opt)
        return min(step_seconds(opt) for _ in range(steps - 1))


def pacers():
    """Return the number of pacing threads in this process."""
    return sum(name.read_text() == "csd-pacer\n" for name in Path("/proc/self/task").glob("*/comm"))


# ---- what users write ----------------------------------------------------------------


def test_pace_is_parsed():
    spec = parse_device(
        "file:/mnt/nvme0?read=2.9GB/s&write=800MiB/s&mixed=3GB/s&latency=100us&update=240M/s&link=8GB/s"
    )
    assert spec.pace == Rates(read=2.9e9, write=800 << 20, mixed=3e9, latency=1e-4, update=240e6, link=8e9)
    assert (spec.backend, str(spec.directory), spec.durable, spec.buffers) == ("file", "/mnt/nvme0", True, 8)
    assert parse_device("ram:?update=1.5G/s").pace == Rates(update=1.5e9)
    assert parse_device("null:?link=5000 KB/s&update=2000000/s").pace == Rates(update=2e6, link=5e6)
    assert parse_device("file:?latency=1.5ms").pace == Rates(latency=1.5e-3)
    assert parse_device("file:?link=8GB/s&host=1").pace == Rates(link=8e9, on_host=True)
    assert parse_device("file:?read=3GB/s&flash_grads=1&host=0").pace == Rates(read=3e9, flash_grads=True)
    for unpaced in ("/mnt/nvme0", "file:", "ram:", "null:", "xrt:0"):
        assert parse_device(unpaced).pace == Rates()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("file:?read=fast", "'fast'"),
        ("file:?read=2.9GB", "'2.9GB'"),
        ("file:?read=2.9G/s", "'2.9G/s'"),
        ("file:?write=1.2.3GB/s", "'1.2.3GB/s'"),
        ("file:?write=0GB/s", "'0GB/s'"),
        ("file:?link=-1GB/s", "'-1GB/s'"),
        ("file:?link=", "''"),
        ("file:?update=240MB/s", "'240MB/s'"),
        ("file:?update=240M", "'240M'"),
        ("file:?latency=100", "'100'"),
        ("file:?latency=2min", "'2min'"),
        ("file:?latency=100s", "'100s'"),
        ("file:?host=2", "host is 0 or 1, got '2'"),
        ("ram:?read=1GB/s", "'read', there are update, link"),
        ("ram:?host=1", "'host', there are update, link"),
        ("null:?latency=1ms", "'latency', there are update, link"),
        ("xrt:0?read=1GB/s", "unknown option 'read'"),
        ("xrt:0?link=8GB/s", "unknown option 'link'"),
    ],
)
def test_bad_pace_is_refused_with_its_value(text, named):
    with pytest.raises(CSDValueError, match="Invalid device") as caught:
        parse_device(text)
    assert named in str(caught.value)


def test_one_link_has_one_rate():
    devices = ["file:?link=8GB/s", "ram:", "ram:?link=8000MB/s"]
    assert [s.pace.link for s in parse_devices(devices)] == [8e9, float("inf"), 8e9]
    with pytest.raises(CSDValueError, match=r"'file:\?link=8GB/s' and 'null:\?link=9GB/s' share one link"):
        optimizer([*devices, "null:?link=9GB/s"])


# ---- rates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "seconds"),
    [
        ("file:?read=60MB/s", STATES / 60e6),
        ("file:?write=60MB/s", STATES / 60e6),
        ("file:?mixed=80MB/s", 2 * STATES / 80e6),
        ("file:?mixed=80MB/s&read=200MB/s&write=200MB/s", 2 * STATES / 80e6),
        ("file:?update=5M/s", NUMEL / 5e6),
        ("file:?link=10MB/s", GRADS / 10e6),
        ("ram:?update=5M/s", NUMEL / 5e6),
        ("ram:?link=10MB/s", GRADS / 10e6),
        ("null:?update=5M/s", NUMEL / 5e6),
        ("null:?link=10MB/s", GRADS / 10e6),
        # Six groups of three tiles: each group is read, then written, before the next can be read.
        ("file:?latency=16ms&buffers=3", 6 * 2 * 0.016),
        # A plain drive: its state goes over the link, at the rate of the slower of the two.
        ("file:?link=60MB/s&host=1", STATES / 60e6),
        ("file:?link=120MB/s&host=1&read=60MB/s", STATES / 60e6),
        ("file:?link=60MB/s&host=1&read=120MB/s&write=120MB/s", STATES / 60e6),
        # Gradients on the drive are read from there, and cross the link only if the host updates.
        ("file:?read=50MB/s&flash_grads=1", (STATES + GRADS) / 50e6),
        ("file:?read=500MB/s&link=50MB/s&flash_grads=1&host=1", (STATES + GRADS) / 50e6),
        # With one buffer, nothing overlaps.
        (
            "file:?buffers=1&read=100MB/s&write=100MB/s&update=10M/s&link=20MB/s",
            2 * STATES / 100e6 + NUMEL / 10e6 + 2 * GRADS / 20e6,
        ),
        (
            "file:?buffers=1&read=100MB/s&write=200MB/s&link=150MB/s&host=1&flash_grads=1",
            (STATES + GRADS) / 100e6 + STATES / 150e6,
        ),
    ],
)
def test_rate_is_kept(device, seconds):
    with optimizer([reading_all(device)]) as opt:
        taken = [step_seconds(opt) for _ in range(3)][1:]  # the first step reads nothing
        stats = opt.stats()
    assert min(taken) >= seconds
    assert min(taken) < SLACK * seconds
    kind = next((kind for kind in ("read", "write") if f"{kind}=" in device), "update")
    if not any(option in device for option in ("latency", "mixed", "host", "flash_grads", "buffers=1")):
        assert seconds <= stats["seconds"][kind] <= taken[-1]
    assert stats["params"] == NUMEL
    assert stats["push_bytes"] == stats["pull_bytes"] == GRADS


@pytest.mark.at_hand("devices that do not reach parameters find only writes that torch counts")
@pytest.mark.parametrize(("options", "reads"), [("", 5), ("&host=1", 3)])
def test_a_csd_reads_the_parameters_among_8bit_states(options, reads):
    """A CSD cannot reach parameters in host memory, so it reads them from the tile, which the host need not do.

    In both cases, a parameter that the user has set counts.
    """
    sections = reads * NUMEL + NUMEL // TILE * 4096  # with a page of exponents in each tile
    with optimizer([f"file:?read=40MB/s&cache=off{options}"], state_dtype="8bit", lr=0.0) as opt:
        step_seconds(opt)
        assert sections / 40e6 <= min(step_seconds(opt) for _ in range(2)) < SLACK * sections / 40e6
        assert opt.stats()["flash_read_bytes"] == sections
        (p,) = opt.param_groups[0]["params"]
        p.data[-1] = 3.0
        opt.step()
        assert opt.state[p]["master"][-1] == 3


@pytest.mark.parametrize("device", ["file:", "ram:"])
def test_devices_share_the_link(device):
    """Two devices on the link take as long as one to send the same amount. A device without `link` does not use it."""
    linked = f"{device}?link=15MB/s"
    for devices, share in (([linked], 1), ([linked] * 2, 1), ([linked, device], 1 / 2)):
        seconds = share * GRADS / 15e6
        assert seconds <= best(devices, 2) < SLACK * seconds


@pytest.mark.parametrize(
    ("device", "crossing"), [("file:?link=1MB/s&host=1", 0), ("file:?link=1MB/s&flash_grads=1", 1)]
)
def test_what_does_not_cross_the_link(device, crossing):
    """If the host updates, gradients and parameters do not; gradients on the drive do not, but their parameters do."""
    rate = 1e6 * float(device.partition("link=")[2].partition("MB")[0])
    with optimizer([f"{device}&buffers=1"]) as opt:
        opt.step()
        update = opt.stats()["seconds"]["update"]
    assert crossing * GRADS / rate <= update < (crossing + 0.9) * GRADS / rate


def test_slow_device_does_not_hold_the_link():
    """A transfer that waits for a slow device's update does not delay what another device sends now."""
    with optimizer(["ram:?update=2M/s&link=40MB/s", "ram:?link=40MB/s"]) as opt:
        opt.step()
        slow, fast = (d["seconds"]["update"] for d in opt.stats()["devices"])
    assert slow >= NUMEL / 2 / 2e6  # 0.26 s; the other device takes 0.06 s
    assert fast < slow / 2


def test_a_device_of_two_reads_half():
    seconds = STATES / 2 / 50e6
    assert seconds <= best(["file:?read=50MB/s"] * 2, 2) < SLACK * seconds


def test_everything_overlaps():
    """Reads, writes, updates, gradients and parameters take 0.2 s each, and if any two did not overlap, 0.4 s."""
    pace = f"read={STATES / 0.2e6}MB/s&write={STATES / 0.2e6}MB/s&link={GRADS / 0.2e6}MB/s&update={NUMEL / 0.2e6}M/s"
    taken = best([f"file:?{pace}&latency=100us"], 5)
    assert 0.2 * 0.999 <= taken < 0.4  # a pipeline of 16 tiles takes 0.26 s


def test_reads_go_beside_what_need_not_be_read():
    """Reading 4 of 16 tiles takes 0.2 s, writing all takes 0.2 s at the same time; in sequence it would be 0.35 s."""
    pace = f"read={STATES / 4 / 0.2e6}MB/s&write={STATES / 0.2e6}MB/s"
    with optimizer([f"file:?{pace}&buffers=4&cache={STATES // 2}B"]) as opt:
        taken = [step_seconds(opt) for _ in range(4)][1:]
        assert opt.stats()["flash_read_bytes"] == STATES // 4
    assert 0.2 * 0.999 <= min(taken) < 0.32


# ---- nothing else changes --------------------------------------------------------------


def three_steps(devices, directory):
    """Return parameters and states after three steps, the second over fewer parameters."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(1)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in (((300, 70), torch.float32), ((4097,), torch.bfloat16), ((9,), torch.float16))
    ]
    with CSDAdam(params, lr=0.1, devices=[d.format(directory) for d in devices], tile_size=1024) as opt:
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = None if step == 1 == i else torch.randn(p.shape, generator=generator).to(p.dtype)
            opt.step()
        return [t.detach().clone() for p in params for t in (p, *opt.state[p].values())]


@pytest.mark.parametrize("devices", [["file:{}"], ["file:{}/a", "ram:", "file:{}/b"], ["ram:", "ram:"]])
def test_bits_are_those_of_unpaced_devices(devices, tmp_path):
    rates = "link=20MB/s&update=5M/s"
    expected = three_steps(devices, tmp_path / "unpaced")
    for i, serial in enumerate(("&mixed=30MB/s", "&buffers=1&host=1&flash_grads=1")):
        drive = f"{rates}&read=20MB/s&write=20MB/s&latency=1ms{serial}"
        paced = [f"{d}?{rates}" if d == "ram:" else f"{d}?{drive}" for d in devices]
        got = three_steps(paced, tmp_path / f"paced{i}")
        assert len(expected) == len(got) == 3 * 5
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)


def test_close_waits_for_states_on_their_way(tmp_path):
    """step() returns when the parameters are ready, close() when all states are written and the thread has ended."""
    device = f"file:{tmp_path}/csd?buffers=16&write=40MB/s"  # a buffer for each tile
    opt = optimizer([device])
    step_seconds(opt)
    steps, start, returned = 1, 0.0, 0.0
    while steps == 1 or (steps < 20 and returned - start >= STATES / 40e6):  # until the machine is idle
        opt.stats()
        start = time.perf_counter()
        opt.step()
        returned, steps = time.perf_counter(), steps + 1
    assert pacers() == 1
    p = opt.param_groups[0]["params"][0]
    opt.close()
    assert returned - start < STATES / 40e6 <= time.perf_counter() - start
    assert pacers() == 0
    q = torch.nn.Parameter(torch.zeros(NUMEL).half())
    with CSDAdam([q], devices=[device], tile_size=TILE, resume=True, state_dtype="fp32") as again:
        assert again.committed_step == steps
    assert torch.equal(p, q)


def test_repr_names_the_pace():
    with optimizer(["ram:?update=4M/s"]) as opt:
        assert repr(opt).endswith("on [ram:?update=4M/s]")


@pytest.mark.parametrize(
    "device", ["/mnt/nvme0", "file:/mnt/nvme0", "File:/mnt/nvme0?buffers=4&read=1GB/s&scratch=0", "ram:"]
)
def test_bench_keeps_the_options(device):
    """The bench measures the device with all its options, but on scratch space."""
    named = parse_device(device)
    measured = parse_device(scratch(named))
    cache = NO_CACHE if named.directory else 0
    assert measured == replace(named, text=measured.text, durable=False, cache_bytes=cache)
    assert parse_device(scratch(parse_device("file:/mnt/nvme0?cache=1GB"))).cache_bytes == 10**9
