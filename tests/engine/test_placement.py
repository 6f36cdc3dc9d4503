"""`auto` among devices: all devices finish a step at the same time, as far as each has room."""

import itertools
import json
import logging
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import engine_of
from support.training import trained

from csd_optim import CSDAdam, CSDMemoryError, CSDOSError, CSDValueError
from csd_optim.devices import machine, spec
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.placing import placing
from csd_optim.engine.placing import tuning as probe
from csd_optim.engine.placing.balance import Candidate, place, step_seconds
from csd_optim.engine.placing.tuning import Tuned
from csd_optim.rates import Rates
from csd_optim.store.format import FILE_NAME, read_contents

pytestmark = pytest.mark.fp32_states("rooms and rates are those of states of 12 bytes per parameter")

TILE = 4096
TILE_BYTES = 24 * TILE  # the two slots of a tile


# ---- how many tiles ----------------------------------------------------------------------


def divisions(n, rooms):
    """Yields every way to divide `n` tiles among devices. `rooms`: by device, for how many tiles it has room."""
    return (c for c in itertools.product(*(range(min(n, room) + 1) for room in rooms)) if sum(c) == n)


def zero_or(low, high):
    return st.just(0.0) | st.floats(low, high)


@st.composite
def candidates(draw, n):
    """Draw devices for up to `n` tiles each. The link and the cache are the same for all that have them."""
    saved, link = draw(zero_or(0.0, 1)), draw(zero_or(0.01, 0.3))
    device = st.builds(
        Candidate,
        seconds=st.floats(0.01, 1) if saved else zero_or(0.01, 1),
        host=zero_or(0.001, 0.5),
        link=st.sampled_from([0.0, link]),
        room=st.just(1 << 62) | st.integers(0, n),
        saved=st.just(saved),
    )
    return draw(st.lists(device, min_size=1, max_size=4))


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), candidates(n))))
def test_as_good_as_an_exhaustive_search(case):
    n, devices = case
    best = min((step_seconds(c, devices) for c in divisions(n, [c.room for c in devices])), default=math.inf)
    ours = place(n, devices)
    if ours is None:
        assert best == math.inf
        return
    assert sum(ours) == n
    assert all(k <= c.room for k, c in zip(ours, devices, strict=True))
    assert step_seconds(ours, devices) <= best * (1 + 1e-6) + 1e-8


# ---- what follows from it ----------------------------------------------------------------


def placed(devices, n=48 * TILE, steps=1, **options):
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.randn(n))
    return p, trained([p], steps, devices=devices, tile_size=TILE, **options)


def tiles_of(opt):
    (extent,) = engine_of(opt).tiles.extents
    return [extent.tiles_of(d) for d in range(len(engine_of(opt).devices.specs))]


PACES = {
    "two thirds fit": (["ram:?update=200M/s&room=1.6MB", "file:?mixed=300MB/s"], [16, 32]),
    "as fast as each other": (["ram:?update=12.5M/s", "file:?mixed=300MB/s"], [24, 24]),
    "three tiers": (["ram:?update=100M/s&room=1MB", "file:?mixed=600MB/s", "file:?read=100MB/s&write=80MB/s"], None),
    "a small one": (["file:?mixed=2GB/s&room=4.8MB", "file:?mixed=50MB/s"], None),
}


@pytest.mark.parametrize("case", PACES)
def test_paced_devices_within_5_percent_of_the_best(case):
    """The best of all divisions of the tiles, with times computed from bytes and rates alone."""
    devices, expected = PACES[case]
    specs = parse_devices(["auto", *devices])
    each = [TILE / s.pace.params_per_second for s in specs]
    rooms = [1 << 20 if s.room_bytes is None else s.room_bytes // TILE_BYTES for s in specs]

    def takes(tiles):
        return max(n * seconds for n, seconds in zip(tiles, each, strict=True))

    best = min(map(takes, divisions(48, rooms)))
    p, opt = placed(["auto", *devices])
    with opt:
        chosen, said = tiles_of(opt), opt.stats()["placement"]
        assert takes(chosen) <= 1.05 * best
        assert all(n <= room for n, room in zip(chosen, rooms, strict=True))
        assert expected in (None, chosen)
        assert said["seconds"] == pytest.approx(takes(chosen))
        assert [d["params"] for d in said["devices"]] == [n * TILE for n in chosen]
        assert [d["params"] for d in opt.stats()["devices"]] == [n * TILE for n in chosen]
        full = [n == room for n, room in zip(chosen, rooms, strict=True)]
        assert [d["limited_by"] == "room" for d in said["devices"]] == full
    assert torch.equal(p, placed("ram:")[0])  # the same bits wherever the states are


@pytest.fixture
def rates(monkeypatch):
    """Fakes the measured rates: drives of 1 GB/s, or 2 GB/s with a 1 in the name; the host by (codec, in memory)."""
    host = {("fp32", False): 1e9, ("fp32", True): 250e6, ("8bit", False): 400e6, ("8bit", True): 100e6}
    fake = [Tuned(1 << 20, 8, 1e9), Tuned(1 << 20, 8, 2e9)]
    monkeypatch.setattr(probe, "tune", lambda found: [fake["1" in d.name] for d in found])
    monkeypatch.setattr(placing, "engine_rate", lambda _, codec, *, in_memory: host[codec, in_memory])
    return host


def test_measured_drives_and_memory(tmp_path, rates, caplog):
    """Drives of 2 and 1 GB/s take 83 and 42 M parameters/s; in its remaining time the host takes 250 M/s in memory."""
    drives = [f"file:{tmp_path / name}?scratch=1" for name in ("csd0", "csd1")]
    for name in ("csd0", "csd1"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.INFO, "csd_optim"), placed(["auto", "ram:", *drives], 1000 * TILE)[1] as opt:
        said, tiles = opt.stats()["placement"], tiles_of(opt)
    # In units of 1e9: per second the drives take 1/24 + 2/24 parameters, and the host updates 1 of the drives'
    # parameters. So it has 1 - (1/24 + 2/24) of its time left for those in memory.
    drive = (1e9 + 2e9) / 24
    memory = (1 - drive / 1e9) * 250e6
    assert said["seconds"] == pytest.approx(1000 * TILE / (drive + memory), rel=0.01)
    assert tiles == pytest.approx([1000 * r / (drive + memory) for r in (memory, 1e9 / 24, 2e9 / 24)], abs=2)
    assert [d["limited_by"] for d in said["devices"]] == ["host", "speed", "speed"]
    log = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto:")]
    assert len(log) == 4
    assert "auto: ram: has 2." in log[0]
    assert "limited by host (as fast as the CPU)" in log[0]
    assert "limited by speed (83 M parameters/s)" in log[2]


def test_room_is_for_all_that_joins(tmp_path, rates):
    """8-bit states, fp32 states and parameters that join later are separate extents, which share the room of memory."""
    room = 20 * TILE_BYTES
    params = [torch.nn.Parameter(torch.ones(n * TILE, dtype=torch.bfloat16)) for n in (16, 32, 40)]
    groups = [{"params": params[:1]}, {"params": params[1:2], "state_dtype": "8bit"}]
    with CSDAdam(groups, devices=["auto", f"ram:?room={room}", "file:"], tile_size=TILE) as opt:
        rates.update(dict.fromkeys(rates, 1e12))  # so fast that memory gets as much as it has room for
        for p in params[:2]:
            p.grad = torch.ones_like(p)
        opt.step()
        opt.add_param_group({"params": params[2:]})
        params[2].grad = torch.ones_like(params[2])
        opt.step()
        taken = [e.device_bytes(0) for e in engine_of(opt).tiles.extents]
        assert len(taken) == 3
        assert taken[0] == 16 * TILE_BYTES
        assert room - TILE_BYTES < sum(taken) <= room
        assert sum(d["params"] for d in opt.stats()["placement"]["devices"]) == 88 * TILE


@pytest.mark.here("the owner chooses where its states are")
def test_where_directories_keep_it_memory_is_cache_and_resume_keeps_the_layout(tmp_path, rates, caplog):
    drives = [str(tmp_path / "csd0"), str(tmp_path / "csd1")]
    devices = ["auto", "ram:?room=3MB", *drives]
    with caplog.at_level(logging.INFO, "csd_optim"):
        p, opt = placed(devices, steps=3)
    with opt:
        said = opt.stats()["placement"]
        assert [d["device"] for d in said["devices"]] == drives
        assert tiles_of(opt) == [16, 32]
        assert said["cache_bytes"] == 48 * 12 * TILE  # all states; more would be useless
        assert sum(s.cache_bytes for s in engine_of(opt).devices.specs) == pytest.approx(3e6, abs=3)
        assert [s.cache_bytes for s in engine_of(opt).devices.specs] == pytest.approx([1e6, 2e6], rel=1e-3)
        assert opt.stats()["flash_read_bytes"] == 0  # all states fit into caches and buffers
        assert said["seconds"] == pytest.approx(48 * 12 * TILE / 3e9, rel=0.01)  # only writes remain
        assert "auto: 0.002 GB of memory cache states, which drives then need not read" in caplog.text
        value = p.detach().clone()
    kept = [read_contents(tmp_path / f"csd{d}" / FILE_NAME).manifest["extents"][0]["tile_numbers"] for d in range(2)]
    # Resumed on drives that are equally fast now, the layout stays.
    q = torch.nn.Parameter(torch.zeros(48 * TILE))
    again = [f"file:{d}?mixed=1GB/s" for d in drives]
    with CSDAdam([q], devices=["auto", "ram:?room=3MB", *again], tile_size=TILE, resume=True) as opt:
        assert torch.equal(q, value)
        assert tiles_of(opt) == [16, 32]
        assert [s.cache_bytes for s in engine_of(opt).devices.specs] == pytest.approx([1e6, 2e6], abs=3)
        q.grad = torch.ones_like(q)
        opt.step()
        assert "placement" not in opt.stats()  # the store determines it
    now = [read_contents(tmp_path / f"csd{d}" / FILE_NAME).manifest["extents"][0]["tile_numbers"] for d in range(2)]
    assert now == kept


@pytest.mark.here("the owner chooses where its states are")
def test_a_small_extent_that_is_first_does_not_take_the_cache(tmp_path, rates):
    """The first extent's only tile is on one drive. What joins later is on both drives, and so both get a cache."""
    drives = [str(tmp_path / "csd0"), str(tmp_path / "csd1")]
    p, q = (torch.nn.Parameter(torch.ones(n)) for n in (16, 48 * TILE))
    with CSDAdam([p], devices=["auto", "ram:?room=3MB", *drives], tile_size=TILE) as opt:
        p.grad = torch.ones_like(p)
        opt.step()
        opt.add_param_group({"params": [q]})
        for _ in range(3):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            opt.step()
        assert [s.cache_bytes for s in engine_of(opt).devices.specs] == pytest.approx([1e6, 2e6], rel=1e-3)
        assert opt.stats()["flash_read_bytes"] == 0  # on either drive
    p, q = (torch.nn.Parameter(torch.zeros_like(x)) for x in (p, q))
    groups = [{"params": [p]}, {"params": [q]}]
    with CSDAdam(groups, devices=["auto", "ram:?room=3MB", *drives], tile_size=TILE, resume=True) as opt:
        assert [s.cache_bytes for s in engine_of(opt).devices.specs] == pytest.approx([1e6, 2e6], rel=0.05)


@pytest.mark.here("the owner chooses where its states are")
@pytest.mark.parametrize("devices", [["ram:?room=1MB", "file:"], ["ram:?room=1MB", "durable"]])
def test_empty_parameters_are_nowhere(tmp_path, monkeypatch, rates, devices):
    monkeypatch.chdir(tmp_path)
    with placed(["auto", *devices], n=0)[1] as opt:
        assert "placement" not in opt.stats()
        opt.add_param_group({"params": [q := torch.nn.Parameter(torch.ones(48 * TILE))]})
        q.grad = torch.ones_like(q)
        opt.step()
        placement = opt.stats()["placement"]
        assert sum(d["params"] for d in placement["devices"]) == 48 * TILE
        assert placement["cache_bytes"] == (1_000_000 if "durable" in devices else 0)


@pytest.mark.here("the owner chooses where its states are")
def test_a_drive_without_room_has_nothing_and_is_resumed(tmp_path, rates):
    drives = [f"file:{tmp_path / 'csd0'}?room=4kB", str(tmp_path / "csd1")]
    p, opt = placed(["auto", *drives], steps=2)
    with opt:
        assert tiles_of(opt) == [0, 48]
        assert opt.stats()["placement"]["devices"][0]["limited_by"] == "room"
    q = torch.nn.Parameter(torch.zeros_like(p))
    with CSDAdam([q], devices=["auto", *drives], tile_size=TILE, resume=True) as opt:
        assert torch.equal(p, q)
        assert tiles_of(opt) == [0, 48]


@pytest.mark.parametrize("ranks", [None, 1, 4])
def test_auto_alone(rates, monkeypatch, ranks):
    """It takes half of the available memory, divided among the machine's ranks, and the current directory."""
    monkeypatch.setattr(spec, "available_memory", lambda: 2 * 10 * TILE_BYTES * (ranks or 1))
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with placed("auto", steps=2)[1] as opt:
        assert [d["device"] for d in opt.stats()["placement"]["devices"]] == ["ram:", "file:"]
        assert tiles_of(opt) == [10, 38]


# ---- errors raised before anything is touched ----------------------------------------------


def test_no_room(tmp_path, rates):
    (tmp_path / "csd1").mkdir()
    p = torch.nn.Parameter(torch.ones(48 * TILE))
    opt = CSDAdam([p], devices=["auto", f"file:{tmp_path / 'csd1'}?room=4MB"], tile_size=TILE)
    p.grad = torch.ones_like(p)
    with (
        opt,
        pytest.raises(CSDOSError, match=r"take 0.005 GB, and there is room for 0.004 GB \(file:.*name more devices"),
    ):
        opt.step()
    assert torch.equal(p, torch.ones_like(p))
    assert not engine_of(opt).tiles.extents
    assert not [f for f in (tmp_path / "csd1").iterdir() if f.stat().st_size]


def test_more_memory_than_there_is(rates, monkeypatch):
    monkeypatch.setattr(placing, "available_memory", lambda: 1_000_000)
    p, opt = placed(["auto", "ram:?room=100GB", "file:"], steps=0)
    p.grad = torch.ones_like(p)
    with (
        opt,
        pytest.raises(CSDMemoryError, match=r"would be in memory, of which 0.001 GB are available: name a smaller"),
    ):
        opt.step()


def test_a_cache_that_is_more_memory_than_there_is(tmp_path, rates, monkeypatch):
    """A cache of 48 tiles takes 2.4 MB, for parameters of the first step, for those that join, and at a resume."""
    monkeypatch.setattr(placing, "available_memory", lambda: 1_000_000)
    devices = ["auto", "ram:?room=100GB", str(tmp_path / "csd1")]
    refused = pytest.raises(CSDMemoryError, match=r"0.002 GB of states would be in memory, .* a smaller room")
    p, opt = placed(devices, steps=0)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with opt, refused:
        opt.step()
    assert torch.equal(p, before)
    p, opt = placed(devices, n=TILE, steps=1)
    with opt:
        opt.add_param_group({"params": [q := torch.nn.Parameter(torch.ones(48 * TILE))]})
        q.grad = torch.ones_like(q)
        with refused:
            opt.step()
        monkeypatch.setattr(placing, "available_memory", lambda: 10_000_000)
        opt.step()
    monkeypatch.setattr(placing, "available_memory", lambda: 1_000_000)
    with refused:
        CSDAdam([{"params": [p]}, {"params": [q]}], devices=devices, tile_size=TILE, resume=True)
    devices[1] = "ram:?room=1MB"
    CSDAdam([{"params": [p]}, {"params": [q]}], devices=devices, tile_size=TILE, resume=True).close()


CONTAINERS = {
    "version 2": ("0::/a/b", "/sys/fs/cgroup/a/memory.max", "/sys/fs/cgroup/a/memory.current"),
    "version 2, from within": ("0::/", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    "version 1, from within": (
        "4:cpu:/x\n3:memory:/docker/1f\n0::/",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_memory_of_a_container(monkeypatch, container):
    """The machine may have more memory: what counts is the unused and the droppable part of the container's limit."""
    groups, limit, used = CONTAINERS[container]
    files = {
        "/proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable:   32000000 kB",
        "/proc/self/cgroup": groups,
        limit: "4000000000",
        used: "3000000000",
        limit.rpartition("/")[0] + "/memory.stat": "anon 1\ninactive_file 500000000\nactive_file 100000000",
    }
    monkeypatch.setattr(machine, "text_of", lambda path: files.get(str(path), ""))
    assert machine.available_memory() == 1_600_000_000
    files[limit] = "max"
    assert machine.available_memory() == 32_000_000 << 10


def test_probes_are_forbidden(monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_PROBE", "0")
    with placed(["auto", "ram:?update=100M/s", "file:?mixed=1GB/s"])[1]:
        pass  # the rates of these devices are known
    p, opt = placed(["auto", "ram:?update=100M/s", "file:"], steps=0)
    p.grad = torch.ones_like(p)
    with (
        opt,
        pytest.raises(CSDValueError, match="'auto' among devices measures drives, and CSD_OPTIM_PROBE=0 says not"),
    ):
        opt.step()


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["auto", "xrt:0"], "'auto' places states in directories and in ram:, not on 'xrt:0'"),
        (["auto", "null:"], "'auto' places states in directories and in ram:, not on 'null:'"),
        (["auto", "ram:?share=2"], "'auto' chooses share and cache, and 'ram:.share=2' sets one of them"),
        (["auto", "file:?cache=1GB"], "'auto' chooses share and cache"),
        (["auto", "file:?link=1GB/s"], "'auto' cannot tell from its pace how fast"),
        (["ram:?room=1GB"], "'ram:.room=1GB'; room is for devices beside 'auto'"),
        (["auto", "ram:?room=much"], "room is a number of bytes such as 20GB"),
        (["auto", "auto", "/none/a", "/none/a"], "is named twice"),
        (["auto", "ram:?room=1GB"], "'auto' needs a drive beside memory; for memory alone write 'ram:'"),
    ],
)
def test_what_auto_cannot_be_beside(devices, message):
    with pytest.raises(CSDValueError, match=message):
        parse_devices(devices)


def test_as_it_may_be_written(monkeypatch):
    expected = parse_devices("auto")
    assert [str(s) for s in expected] == ["ram:", "file:"]
    for devices in ("Auto", [" auto "], ["auto", "AUTO"], ("auto", "ram:", "file:"), iter(["auto"])):
        assert [str(s) for s in parse_devices(devices)] == ["ram:", "file:"]
    monkeypatch.setenv("CSD_OPTIM_DEVICES", "auto, ram:?room=20GB, /none/a")
    (spec,) = parse_devices(None)
    assert (str(spec), spec.cache_bytes, spec.is_placed) == ("/none/a", 20_000_000_000, True)


def test_a_directory_of_that_name():
    assert parse_devices("./auto")[0].directory is not None
    assert Rates().params_per_second == math.inf


# ---- the command ---------------------------------------------------------------------------


def test_plan_place(run, tmp_path, rates, monkeypatch):
    devices = ["ram:?update=200M/s&room=1.6GB", f"file:{tmp_path}?scratch=1&mixed=3GB/s"]
    code, out, _ = run("plan", "--place", "--params=100M", *devices)
    assert code == 0
    assert all(
        text in " ".join(out.split()) for text in ("limited by", "61.5%", "1.6 GB", "a step 0.31 s", "2.59 times")
    )
    code, out, _ = run("plan", "--place", "--params=100M", "--json", *devices)
    found = json.loads(out)
    assert found["schema"] == "csd_optim.placement/1"
    assert found["seconds"] == pytest.approx(100e6 / (125e6 + 200e6), rel=0.01)
    assert found["drives_alone"] == pytest.approx(100e6 / 125e6, rel=0.01)
    monkeypatch.setenv("CSD_OPTIM_DEVICES", ",".join(["auto", *devices]))
    for names in ((), ("auto", *devices)):
        code, out, _ = run("plan", "--place", "--params=100M", *names)
        assert code == 0
        assert "61.5%" in out
    code, out, err = run("plan", "--place", "--params=100M", f"{tmp_path}/none/at/all")
    assert code == 1
    assert "no such directory" in err
    assert run("plan", "--place", "--params=1M", "--devices=2")[0] == 2
    devices.insert(0, "gpu:?room=480MB&update=1G/s&link=1GB/s")
    code, out, _ = run("plan", "--place", "--params=100M", *devices)
    assert code == 0
    assert all(text in " ".join(out.split()) for text in ("480.0 MB", "20.0%", "link busy for 0.16 s of it"))
    code, out, _ = run("plan", "--place", "--params=100M", "--json", *devices)
    found = json.loads(out)
    assert [d["limited_by"] for d in found["devices"]] == ["room", "speed", "speed"]
    assert found["devices"][0]["params"] == pytest.approx(20e6, rel=0.01)
    assert sum(d["params"] for d in found["devices"]) == 100e6
    assert found["link_seconds"] == pytest.approx(80e6 * 2 / 1e9, rel=0.01)
    assert found["seconds"] == pytest.approx(max(80e6 / (125e6 + 200e6), 0.16), rel=0.01)
    # The accelerator has room for 30 M parameters, which the directory only writes; the other 70 M it reads and writes.
    (tmp_path / "named").mkdir()
    kept = ["gpu:?room=360MB&update=1G/s&link=1GB/s", f"file:{tmp_path}/named?mixed=3GB/s"]
    code, out, _ = run("plan", "--place", "--params=100M", "--json", *kept)
    found = json.loads(out)
    assert [d["limited_by"] for d in found["devices"]] == ["room", "speed"]
    assert [d["params"] for d in found["devices"]] == pytest.approx([30e6, 70e6], rel=0.01)
    assert found["seconds"] == pytest.approx((30e6 * 12 + 70e6 * 24) / 3e9, rel=0.02)
    assert found["link_seconds"] == pytest.approx((30e6 * 12 + 70e6 * 2) / 1e9, rel=0.02)
    assert found["drives_alone"] == pytest.approx(100e6 * 24 / 3e9, rel=0.01)
    code, out, _ = run("plan", "--place", "--params=100M", "--state-dtype=8bit", "--json", *devices)
    found = json.loads(out)
    # It would have room for 78 M parameters of 3.08 B in two copies, and updates as fast as the others together.
    assert found["devices"][0]["limited_by"] == "speed"
    assert found["devices"][0]["params"] == pytest.approx(70e6, rel=0.1)
    assert sum(d["params"] for d in found["devices"]) == 100e6
    assert found["link_seconds"] == pytest.approx((100e6 - found["devices"][0]["params"]) * 2 / 1e9, rel=0.01)
    code, out, err = run("plan", "--place", "--params=100M", "gpu:?room=1GB", *devices[1:])
    assert code == 1
    assert "there is no accelerator here to be measured" in err
    code, out, err = run("bench", "auto")
    assert code == 1
    assert "'auto' is for training" in err
    code, out, err = run("bench", "gpu:?room=1GB", "ram:")
    assert (code, out) == (1, "")
    assert "gpu:?room=1GB keeps states of parameters on an accelerator" in err
