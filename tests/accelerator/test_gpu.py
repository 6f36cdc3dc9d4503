"""`gpu:`: states in the memory of the accelerator, updated there, with the bits of states in host memory."""

import contextlib
import copy
import io
import json

import pytest
import torch
from support import emulated
from support.backends import TILE
from support.on_accelerator import DEVICE, DTYPES, GPU, keep_busy, launches_fail
from support.optimizers import ADAMW, FULL, MIXED
from support.replacing import class_with
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from csd_optim import CSDSGD, CSDAdam, CSDMemoryError, CSDOSError, CSDRuntimeError, CSDTornError, CSDValueError
from csd_optim.devices.spec import parse_devices
from csd_optim.engine.engine import Engine
from csd_optim.engine.placing import on_accelerator
from csd_optim.step import accelerator_updates

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("small_pieces")]
one_schedule = pytest.mark.one_schedule

SHAPES = [(), (5, 7), (0,), (2, TILE), (3 * TILE + 5,), (40, 60)]


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(device, shapes=SHAPES, dtypes=DTYPES):
    params = [randn(shape, i).to(device, dtypes[i % len(dtypes)]) for i, shape in enumerate(shapes)]
    params[-1] = params[-1].t()  # strided, so that a contiguous copy is updated
    return [p.requires_grad_() for p in params]


def set_grads(params, k):
    for i, p in enumerate(params):
        p.grad = randn(p.shape, 100 * k + i).to(p.device, p.dtype)


def step(optimizer, k):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    set_grads(params, k)
    keep_busy()
    optimizer.step()
    for p in params:
        p.grad.fill_(torch.nan)  # from here on the program may overwrite it


def bits(optimizer):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t.detach().cpu().clone() for p in params for _, t in [("", p), *sorted(optimizer.state[p].items())]]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def on_the_cpu(steps, pair=ADAMW, lr=1e-2):
    params = made("cpu")
    optimizer = pair.ours(params, devices="ram:", tile_size=TILE, lr=lr, **pair.kwargs)
    for k in steps:
        step(optimizer, k)
    return bits(optimizer)


@pytest.mark.parametrize(
    ("pair", "devices"),
    # With share=20 more is on the accelerator than is queued while tiles of the file travel. The share is one of each
    # group; so groups of one parameter have none, and room is given instead.
    [
        *((pair, devices) for pair in (ADAMW, *FULL) for devices in GPU),
        (ADAMW, ["gpu:?share=20", "file:"]),
        *((MIXED, devices) for devices in (["gpu:"], ["gpu:?room=64kB", "file:"])),
    ],
    ids=str,
)
def test_bits_of_states_in_memory(pair, devices):
    params = made(DEVICE)
    optimizer = pair.ours(params, devices=devices, tile_size=TILE, lr=1e-2, **pair.kwargs)
    for k in range(3):
        step(optimizer, k)
    assert same(bits(optimizer), on_the_cpu(range(3), pair))
    where = {t.device.type for p in params for name, t in optimizer.state[p].items() if name != "step"}
    assert where == ({DEVICE} if len(devices) == 1 else {DEVICE, "cpu"})


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("call", ["begin", "pull", "finish", "launch"])
@pytest.mark.parametrize("k", [0, 1])
def test_a_step_that_fails(call, k, monkeypatch):
    """Parameters and states are those before the step, wherever they are, even if it would have been the first step."""
    params = made(DEVICE)
    optimizer = CSDAdam(params, devices=GPU[1], tile_size=TILE, lr=1e-2)
    for earlier in range(k):
        step(optimizer, earlier)
    before = [p.detach().cpu() for p in params]

    def breaks(*arguments, **named):
        raise Broken

    real = Engine.finish
    calls = []

    def fails_once(engine, keep=True, **ending):
        calls.append(keep)
        if len(calls) == 1:
            raise Broken
        return real(engine, keep, **ending)

    with monkeypatch.context() as patch:
        if call == "launch":
            failing = launches_fail(1, breaks)
        else:
            patch.setattr(class_with(call), call, fails_once if call == "finish" else breaks)
            failing = contextlib.nullcontext()
        with failing, pytest.raises(Broken):
            step(optimizer, 7)
    assert same([p.detach().cpu() for p in params], before)
    if k:
        assert same(bits(optimizer), on_the_cpu([0]))
    step(optimizer, 2)
    assert same(bits(optimizer), on_the_cpu([*range(k), 2]))


@one_schedule
def test_a_step_in_place_that_fails_says_so():
    optimizer = CSDAdam(made(DEVICE), devices="gpu:", lr=1e-2)
    step(optimizer, 0)
    with launches_fail(3, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        step(optimizer, 1)
    with pytest.raises(CSDTornError, match=r"an earlier step was cut short\. .* gpu: without a drive"):
        step(optimizer, 2)


@one_schedule
@pytest.mark.parametrize("devices", GPU, ids=str)
def test_what_is_written_counts(devices):
    """Writes to parameters and states take effect, and reads of them see the current values."""

    def run(device, devices):
        params = made(device)
        optimizer = CSDAdam(params, devices=devices, tile_size=TILE, lr=1e-2)
        for k in range(4):
            step(optimizer, k)
            with torch.no_grad():
                params[3][0] = k
                params[4].mul_(2)
                optimizer.state[params[1]]["exp_avg"].add_(1)
                optimizer.state[params[4]]["exp_avg_sq"] = torch.ones_like(params[4], dtype=torch.float32)
        params[0].data = params[0].data.bfloat16()  # was fp32, and possibly its own master
        step(optimizer, 4)
        return bits(optimizer)

    assert same(run(DEVICE, devices), run("cpu", "ram:"))


@one_schedule
@pytest.mark.parametrize("devices", GPU, ids=str)
def test_state_dicts(devices):
    """State dicts load from memory to the accelerator and back, through torch.save; and the optimizer can be copied."""

    def go_on(device, devices, saved, params_before):
        params = made(device)
        with torch.no_grad():
            for p, q in zip(params, params_before, strict=True):
                p.copy_(q)
        optimizer = CSDAdam(params, devices=devices, tile_size=TILE, lr=1e-2)
        optimizer.load_state_dict(saved)
        step(optimizer, 5)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        return params, optimizer, torch.load(buffer, map_location="cpu")

    start = CSDAdam(made("cpu"), devices="ram:", tile_size=TILE, lr=1e-2)
    step(start, 0)
    saved, params = start.state_dict(), [p for g in start.param_groups for p in g["params"]]
    expected = go_on("cpu", "ram:", saved, params)
    there = go_on(DEVICE, devices, saved, params)
    assert same(bits(there[1]), bits(expected[1]))
    twin = copy.deepcopy(there[1])
    step(twin, 6)
    back = go_on("cpu", "ram:", there[2], there[0])
    assert same(bits(back[1]), bits(go_on("cpu", "ram:", expected[2], expected[0])[1]))
    step(expected[1], 6)
    assert same(bits(twin), bits(expected[1]))


@one_schedule
def test_a_state_that_is_needed_later_has_room_of_its_own():
    """When a momentum is loaded later, states move to another place, and their old memory is freed."""

    def run(device, devices):
        params = made(device, dtypes=DTYPES[1:])
        optimizer = CSDSGD(params, devices=devices, tile_size=TILE, lr=1e-2)
        step(optimizer, 0)
        saved = optimizer.state_dict()
        for i, entry in saved["state"].items():
            entry["momentum_buffer"] = randn(params[i].shape, i).to(device)
        saved["param_groups"][0]["momentum"] = 0.9
        optimizer.load_state_dict(saved)
        step(optimizer, 1)
        return optimizer

    gpu = run(DEVICE, "gpu:")
    assert same(bits(gpu), bits(run("cpu", "ram:")))
    elems = sum(p.numel() for p in gpu.param_groups[0]["params"])
    assert gpu.stats()["devices"][0]["state_bytes"] == 8 * elems
    assert gpu.stats()["params"] == elems


@one_schedule
def test_room_is_what_is_there():
    """`state_bytes` is what states occupy: with parameters as their own masters, afterwards, and with more states."""
    params = made(DEVICE, dtypes=DTYPES[:1])
    elems = sum(p.numel() for p in params)
    optimizer = CSDSGD(params, devices="gpu:", lr=1e-2)

    def state_bytes():
        states = [(p, t) for p in params for name, t in optimizer.state[p].items() if name != "step"]
        there = sum(t.nbytes for p, t in states if t.data_ptr() != p.data_ptr())
        assert optimizer.stats()["devices"][0]["state_bytes"] == there
        return there

    step(optimizer, 0)
    assert state_bytes() == 4 * params[-1].numel()  # the strided parameter has a separate master
    for p in params:
        p.grad, p.data = None, p.data.bfloat16()
    step(optimizer, 1)
    assert state_bytes() == 4 * elems
    saved = optimizer.state_dict()
    for p, entry in zip(params, saved["state"].values(), strict=True):
        entry["momentum_buffer"] = torch.zeros_like(p)
    saved["param_groups"][0]["momentum"] = 0.9
    optimizer.load_state_dict(saved)
    step(optimizer, 2)
    assert state_bytes() == 8 * elems


@one_schedule
@pytest.mark.parametrize("devices", GPU, ids=str)
def test_stats_and_timeline(devices, tmp_path, monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_TRACE", str(tmp_path / "trace.json"))
    params = made(DEVICE)
    elems = sum(p.numel() for p in params)
    with CSDAdam(params, devices=devices, tile_size=TILE) as optimizer:
        assert f"on [{', '.join(devices)}]" in repr(optimizer)
        for k in range(2):
            set_grads(params, k)
            params[4].grad[:3] = torch.inf
            optimizer.step()
        stats = optimizer.stats()
        assert [d["device"] for d in stats["devices"]] == devices
        gpu = stats["devices"][0]
        assert stats["params"] == elems
        assert gpu["params"] == (elems if len(devices) == 1 else elems - stats["devices"][1]["params"])
        assert 0.4 * elems < gpu["params"]
        assert stats["nonfinite_grads"] == 3
        assert gpu["push_bytes"] == gpu["pull_bytes"] == 0
        sent = sum(p.numel() * p.element_size() for p in params if optimizer.state[p]["master"].is_cpu)
        assert stats["push_bytes"] == stats["pull_bytes"] == sent
    events = json.loads((tmp_path / "trace.json").read_text())
    (track,) = (e["tid"] for e in events if "gpu:" in e.get("args", {}).get("name", ""))
    gpu = [e for e in events if e["ph"] == "X" and e["tid"] == track]
    steps = [e for e in events if e["ph"] == "X" and e["name"].startswith("step ")]
    assert len(gpu) == len(steps) == 2  # one in each step
    assert all(e["name"].endswith(" parameters") for e in gpu)
    for of_accelerator, of_step in zip(gpu, steps, strict=True):
        assert of_step["ts"] <= of_accelerator["ts"]
        assert of_accelerator["ts"] + of_accelerator["dur"] <= of_step["ts"] + of_step["dur"] + 1


@one_schedule
def test_the_host_waits_for_nothing(emulated_only):
    """A step with all states on the accelerator only queues work, like torch's optimizers."""
    optimizer = CSDAdam(made(DEVICE), devices="gpu:")
    step(optimizer, 0)
    set_grads(optimizer.param_groups[0]["params"], 1)
    _, waited = emulated.counts()
    optimizer.step()
    assert emulated.counts()[1] == waited


# ---- who is there ----------------------------------------------------------------------------


@one_schedule
def test_what_fits_is_there_the_largest_first():
    """Beside a file, whose steps can be undone, an element takes 24 B; else 12 B, or 8 B if it is its own master."""
    params = [torch.randn(n, device=DEVICE).requires_grad_() for n in (1000, 3000, 2000, 500)]
    for devices, expected in (
        ([f"gpu:?room={24 * 3500}", "file:"], {3000, 500}),
        ([f"gpu:?room={8 * 3500}", "ram:"], {3000, 500}),
        (["gpu:", "file:"], {3000}),
        (["gpu:?share=3", "file:"], {3000, 1000, 500}),
        (["gpu:?share=9&room=24kB", "file:"], {1000}),
        ([f"gpu:?room={8 * 6500}"], {1000, 3000, 2000, 500}),
    ):
        optimizer = CSDAdam(params, devices=devices)
        set_grads(params, 0)
        optimizer.step()
        assert {p.numel() for p in params if not optimizer.state[p]["exp_avg"].is_cpu} == expected, devices
        assert optimizer.stats()["devices"][0]["params"] == sum(expected)


@one_schedule
def test_no_room(emulated_only):
    params = [torch.randn(n, device=DEVICE).requires_grad_() for n in (1000, 3000)]
    before = [p.detach().clone() for p in params]
    optimizer = CSDAdam(params, devices="gpu:?room=8kB")
    set_grads(params, 0)
    with pytest.raises(CSDMemoryError, match=r"0.000 GB of states would be on the accelerator, and gpu:.room=8kB has"):
        optimizer.step()
    assert same(before, [p.detach() for p in params])
    assert not optimizer.state


@one_schedule
def test_memory_that_is_not_there(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("out of it")

    params = made(DEVICE)
    optimizer = CSDAdam(params, devices=GPU[1])
    set_grads(params, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", full)
        with pytest.raises(CSDMemoryError, match="no memory for states on the accelerator"):
            optimizer.step()
    step(optimizer, 0)
    before = bits(optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(CSDMemoryError, match="no memory for a step on the accelerator"):
            step(optimizer, 1)
    assert same(bits(optimizer), before)
    step(optimizer, 2)
    assert same(bits(optimizer), on_the_cpu([0, 2], lr=1e-3))


class Full(TorchDispatchMode):
    """A context in which there is no memory for any more tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        had = {t.untyped_storage().data_ptr() for t in tree_leaves([args, kwargs]) if isinstance(t, torch.Tensor)}
        if any(t.untyped_storage().data_ptr() not in had for t in tree_leaves(made) if isinstance(t, torch.Tensor)):
            raise torch.OutOfMemoryError(func)
        return made


@one_schedule
@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16])
def test_all_memory_is_taken_before_the_step(grad_dtype, monkeypatch):
    real = accelerator_updates.AcceleratorUpdates.begin

    def begin(updates, **options):
        real(updates, **options)
        with Full():
            updates.queue_all()

    monkeypatch.setattr(accelerator_updates.AcceleratorUpdates, "begin", begin)
    params, reference = made(DEVICE), made("cpu")
    gpu = CSDAdam(params, devices="gpu:", grad_dtype=grad_dtype)
    step(gpu, 0)
    host = CSDAdam(reference, devices="ram:", grad_dtype=grad_dtype)
    step(host, 0)
    assert same(bits(gpu), bits(host))


# ---- auto ------------------------------------------------------------------------------------


def placed(*devices, n=48, **options):
    """Train `n` parameters of a tile each. Returns them on the CPU, and the statistics."""
    params = [randn((TILE,), i).to(DEVICE, torch.bfloat16).requires_grad_() for i in range(n)]
    with CSDAdam(params, devices=["auto", *devices], tile_size=TILE, **options) as optimizer:
        for k in range(2):
            set_grads(params, k)
            optimizer.step()
        stats = optimizer.stats()
        assert [d["params"] for d in stats["placement"]["devices"]] == [d["params"] for d in stats["devices"]]
        assert [d["device"] for d in stats["placement"]["devices"]] == [d["device"] for d in stats["devices"]]
        return [p.detach().cpu() for p in params], stats


@one_schedule
@pytest.mark.parametrize(
    ("gpu", "file", "there", "seconds", "limits"),
    [
        # Of 48 tiles, it gets a third, because it updates 1 M/s beside 2 M/s; or as much as it has room for; or so
        # much that the link, 3 MB/s each way, is as busy with the others' tiles as it is with its own.
        ("update=1M/s&room=1GB", "mixed=48MB/s", 16, 16 * TILE / 1e6, ["speed", "speed"]),
        (f"update=9M/s&room={24 * 10 * TILE}", "mixed=48MB/s", 10, 38 * TILE / 2e6, ["room", "speed"]),
        ("update=0.5M/s&link=3MB/s&room=1GB", "mixed=240MB/s", 12, 36 * TILE * 2 / 3e6, ["speed", "link"]),
    ],
)
def test_auto(gpu, file, there, seconds, limits):
    link = "" if "link" in gpu else "&link=1GB/s"
    params, stats = placed(f"gpu:?{gpu}{link}", f"file:?{file}")
    assert stats["devices"][0]["params"] == pytest.approx(there * TILE, abs=TILE)
    assert stats["placement"]["seconds"] == pytest.approx(seconds, rel=0.1)
    assert [d["limited_by"] for d in stats["placement"]["devices"]] == limits
    assert same(params, placed("ram:?update=1G/s", "file:?mixed=10GB/s")[0])


@one_schedule
def test_auto_without_kernels(caplog, no_kernels):
    """Nothing is placed on the accelerator, and the statistics say why."""
    with caplog.at_level("INFO", "csd_optim"):
        _, stats = placed("gpu:?room=1GB&update=1M/s&link=1GB/s", "file:?mixed=1GB/s", n=8)
    assert [d["limited_by"] for d in stats["placement"]["devices"]] == ["no parameters", "speed"]
    assert "auto: gpu:?room=1GB&update=1M/s&link=1GB/s has nothing: no parameter is on an accelerator" in caplog.text


@one_schedule
def test_auto_with_parameters_on_the_cpu(no_kernels):
    """An accelerator that no parameter is on is not measured: it may have no kernels to be measured."""
    params = [torch.ones(TILE).requires_grad_() for _ in range(4)]
    optimizer = CSDAdam(params, devices=["auto", "gpu:?room=1GB", "file:?mixed=1GB/s"])
    set_grads(params, 0)
    optimizer.step()
    placement = optimizer.stats()["placement"]["devices"]
    assert [(d["params"], d["limited_by"]) for d in placement] == [(0, "no parameters"), (4 * TILE, "speed")]


@one_schedule
@pytest.mark.parametrize(
    ("gpu", "there"),
    [
        ("update=1M/s&room=1GB", 16),  # a third, as the drive reads and writes 2 M/s with 8.67 B each
        # 3 B and 5/64 B in two copies, and 2 B of the parameter in one.
        (f"update=9M/s&room={int(8.2 * 10 * TILE)}", 10),
    ],
)
def test_auto_places_codes(gpu, there):
    params, stats = placed(f"gpu:?{gpu}&link=1GB/s", "file:?mixed=17.33MB/s", state_dtype="8bit")
    assert stats["devices"][0]["params"] == pytest.approx(there * TILE, abs=TILE)
    assert stats["placement"]["devices"][1]["limited_by"] == "speed"
    assert same(params, placed("ram:?update=1G/s", "file:?mixed=10GB/s", state_dtype="8bit")[0])


@one_schedule
def test_rates_are_measured_once(monkeypatch):
    monkeypatch.setattr(on_accelerator, "TIMED_ELEMS", TILE)
    monkeypatch.setattr(on_accelerator, "LINK_BYTES", 1 << 16)
    measures = on_accelerator._update_rate, on_accelerator._link_rate
    for measure in measures:
        measure.cache_clear()
    for _ in range(2):
        _, stats = placed("gpu:?room=1GB", "file:?mixed=1GB/s", n=8)
        assert sum(d["params"] for d in stats["placement"]["devices"]) == 8 * TILE
        assert 0 < stats["placement"]["devices"][0]["params_per_second"] < 1e12
    assert [measure.cache_info().misses for measure in measures] == [1, 1]
    for measure in measures:
        measure.cache_clear()


@one_schedule
def test_auto_without_room():
    params = [torch.ones(TILE, device=DEVICE).requires_grad_() for _ in range(8)]
    optimizer = CSDAdam(params, devices=["auto", "gpu:?room=1kB&update=1G/s&link=1GB/s", "file:?mixed=1GB/s&room=50kB"])
    set_grads(params, 0)
    with pytest.raises(CSDOSError, match=r"there is room for 0.000 GB \(gpu:.* 0.000 GB, file:.* 0.000 GB\)"):
        optimizer.step()
    assert not optimizer.state


# ---- what is refused -----------------------------------------------------------------------------


@one_schedule
@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["gpu:", "gpu:"], "gpu: is named twice"),
        (["gpu:", "/tmp", "null:"], "'gpu:' with named directories and 'null:', which takes no states"),
        (["gpu:", "/tmp", "xrt:0?scratch=1"], r"directories and 'xrt:0\?scratch=1', which takes no states"),
        (["gpu:", "xrt:0"], r"'gpu:' beside 'xrt:0', whose states only its kernels write\. Take scratch"),
        (["auto", "gpu:", "file:"], r"'auto' and 'gpu:' without room; .* gpu:\?room=4GB"),
        (["auto", "gpu:?room=1GB", "ram:"], r"needs a drive beside memory; .* write \['gpu:.room=4GB', 'ram:'\]"),
        (["auto", "gpu:?room=1GB&share=2", "file:"], "'auto' chooses share"),
        (["gpu:0"], "takes neither path nor index"),
    ],
)
def test_devices_that_are_refused(devices, message):
    with pytest.raises(CSDValueError, match=message):
        parse_devices(devices)


@one_schedule
def test_one_without_gradient_may_be_elsewhere():
    params = made(DEVICE)
    optimizer = CSDAdam(params, devices="gpu:")
    step(optimizer, 0)
    set_grads(params, 1)
    before = bits(optimizer)
    params[1].grad, params[1].data = None, params[1].data.cpu()
    optimizer.step()
    assert same([t.cpu() for _, t in sorted(optimizer.state[params[1]].items())], before[6:10])
    params[1].data = params[1].data.to(DEVICE)
    step(optimizer, 2)
    assert optimizer.state[params[1]]["step"] == 2


@one_schedule
def test_what_is_refused():
    params = made("cpu")
    optimizer = CSDAdam(params, devices="gpu:")
    set_grads(params, 0)
    with pytest.raises(CSDRuntimeError, match=r"parameter 0\.0 is on the CPU, and gpu: keeps states where"):
        optimizer.step()
    with pytest.raises(CSDRuntimeError, match="gpu: keeps its state for this process only"):
        optimizer.save("there")
    model = torch.nn.Linear(3, 5).to(DEVICE)
    optimizer = CSDAdam(model.parameters(), devices="gpu:")
    for k in range(2):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if k == 0:
            optimizer.step()
            model.cpu()
    for _ in range(2):
        with pytest.raises(CSDRuntimeError, match=r"is on cpu now, and its states are on .*, where gpu: keeps them"):
            optimizer.step()
    model.to(DEVICE)
    optimizer.step()
