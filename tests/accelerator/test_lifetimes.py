"""Who may do what when: memory that is freed or written right after a step, other streams, devices and threads, steps
that fail with copies under way.

Oracle: the same steps on the CPU, to the last bit.
"""

import gc
import threading

import pytest
import torch
from support.backends import TILE
from support.comparing import assert_same
from support.exact import Linear
from support.on_accelerator import BACKWARD, DEVICE, DTYPES, GPU, SCRATCH, keep_busy
from torch import nn

from csd_optim import CSDAdam
from csd_optim.bindings import Native
from csd_optim.engine.commit import residuals
from csd_optim.store.format import PAGE

pytestmark = pytest.mark.accelerator

N = 10 * TILE + 5
DEVICES = [f"{DEVICE}:{i}" for i in range(torch.accelerator.device_count())]


def randn(n, seed, dtype=torch.float32):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(places, n=N, **options):
    """Return a parameter on each device, and their optimizer."""
    params = [randn(n, i, DTYPES[i % 3]).to(place).requires_grad_() for i, place in enumerate(places)]
    options = {"lr": 1e-2, "devices": ["file:", "file:"], "tile_size": TILE, **options}
    return params, CSDAdam([{"params": params, **options.pop("group", {})}], **options)


def grads(params, step):
    return [randn(p.numel(), 100 * step + i, p.dtype).view(p.shape) for i, p in enumerate(params)]


def bits(params, optimizer):
    return [t.detach().cpu().clone() for p in params for t in (p, *optimizer.state[p].values())]


def on_the_cpu(n_params, steps, n=N, **options):
    if "gpu:" in options.get("devices", ()):
        options["devices"] = "ram:"
    params, optimizer = made(["cpu"] * n_params, n, **options)
    for k in range(steps) if isinstance(steps, int) else steps:
        for p, grad in zip(params, grads(params, k), strict=True):
            p.grad = grad
        optimizer.step()
    return bits(params, optimizer)


@pytest.mark.parametrize("side_stream", [False, True], ids=["default streams", "side streams"])
@pytest.mark.parametrize("current", DEVICES)
@pytest.mark.parametrize("devices", [["file:", "file:"], GPU[1]], ids=str)
def test_all_devices_and_the_host_in_one_optimizer(devices, current, side_stream):
    """Parameters on all devices and the host work in one optimizer, whichever the current device is."""
    places = [*DEVICES, "cpu", *DEVICES]
    before = torch.accelerator.current_device_index(), [torch.accelerator.current_stream(d) for d in DEVICES]
    params, optimizer = made(places, devices=devices)
    torch.accelerator.synchronize()  # they were made on the default streams
    try:
        for device in DEVICES if side_stream else ():
            torch.accelerator.set_stream(torch.Stream(device))
        torch.accelerator.set_device_index(torch.device(current).index)
        for k in range(3):
            for p, grad in zip(params, grads(params, k), strict=True):
                p.grad = grad.to(p.device)
            optimizer.step()
            assert torch.accelerator.current_device_index() == torch.device(current).index
        found = bits(params, optimizer)
    finally:
        for stream in before[1]:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(before[0])
    assert_same(found, on_the_cpu(len(places), 3))


def strided(grad):
    return torch.stack([grad, grad], 1).view(-1)[::2]


@pytest.mark.parametrize(
    ("devices", "kind"),
    [(d, kind) for d in SCRATCH[:3] for kind in ("dense", "Top-K", "strided")]
    + [(d, kind) for d in GPU for kind in ("dense", "strided")],
    ids=str,
)
def test_gradients_are_freed_at_once(devices, kind):
    """Gradients are freed right after the step, and their memory is reused and overwritten."""
    options = {"devices": devices, "group": {"topk": 0.1} if kind == "Top-K" else {}}
    params, optimizer = made([DEVICE] * 3, **options)
    for k in range(3):
        for p, grad in zip(params, grads(params, k), strict=True):
            there = grad.to(DEVICE)
            p.grad = strided(there) if kind == "strided" else there
        del there
        keep_busy()
        optimizer.step()
        sizes = [(p.numel() * (2 if kind == "strided" else 1), p.dtype) for p in params]
        optimizer.zero_grad(set_to_none=True)
        others = [torch.full((n,), torch.nan, dtype=dtype, device=DEVICE) for n, dtype in sizes]
    del others
    assert_same(bits(params, optimizer), on_the_cpu(3, 3, **options))


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("topk", [None, 0.1])
@pytest.mark.parametrize(("call", "left"), [("push", 30), ("push", 1), ("pull", 20), ("pull", 2), ("pull", 1)])
def test_a_step_that_fails_with_copies_under_way(topk, call, left, monkeypatch):
    """Whichever tile fails, early or late: parameters and states read like before the step, at any time."""
    options = {"devices": ["file:", "file:"], "group": {"topk": topk}}
    params, optimizer = made([DEVICE] * 3, **options)
    n_tiles = -(-3 * (N + 11) // TILE)

    def step(k):
        for p, grad in zip(params, grads(params, k), strict=True):
            p.grad = grad.to(DEVICE)
        optimizer.step()

    step(0)
    optimizer.zero_grad()
    gc.collect()  # optimizers of other tests
    held = torch.accelerator.memory_allocated()
    real, calls = getattr(Native, call), []

    def breaks(*arguments, **named):
        calls.append(arguments)
        if len(calls) > n_tiles - left:
            raise Broken
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Native, call, breaks)
        with pytest.raises(Broken):
            step(1)
    optimizer.zero_grad()
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == held
    assert_same(bits(params, optimizer), on_the_cpu(3, 1, **options))
    step(2)
    assert_same(bits(params, optimizer), on_the_cpu(3, [0, 2], **options))


def test_step_in_a_hook_of_backward():
    """One optimizer per parameter steps in autograd's thread, where backward's streams are current."""

    def final(device):
        torch.manual_seed(1)
        model = nn.Sequential(Linear(40, 60), nn.ReLU(), Linear(60, 5)).to(device)
        threads = set()

        def step(p):
            threads.add(threading.get_ident())
            optimizers[p].step()
            p.grad = None

        optimizers = {p: CSDAdam([p], lr=1e-2, devices="file:", tile_size=1024) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        side = torch.Stream(device) if device == DEVICE else None
        for k in range(4):
            if side is not None:
                side.wait_stream(torch.accelerator.current_stream())
                with side:
                    model(randn(320, k).view(8, 40).to(device)).sum().backward()
                torch.accelerator.current_stream().wait_stream(side)
            else:
                model(randn(320, k).view(8, 40)).sum().backward()
        return [p.detach().cpu() for p in model.parameters()], threads

    found, threads = final(DEVICE)
    assert threads != {threading.get_ident()}
    assert_same(found, final("cpu")[0])


@pytest.mark.parametrize("devices", [["file:", "file:"], GPU[1]], ids=str)
def test_steps_in_other_threads(devices):
    """Each thread has its own current streams; the thread that continues waits for them."""
    params, optimizer = made([DEVICE] * 3, devices=devices)
    for k in range(3):
        failures = []

        def step(k=k, failures=failures):
            try:
                stream = torch.Stream(DEVICE)
                with stream:
                    for p, grad in zip(params, grads(params, k), strict=True):
                        p.grad = grad.to(DEVICE, non_blocking=True)
                    keep_busy()
                    optimizer.step()
                stream.synchronize()
            except BaseException as e:
                failures.append(e)

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert failures == []
    assert_same(bits(params, optimizer), on_the_cpu(3, 3))


@pytest.mark.parametrize(("topk", "devices"), [(None, "ram:"), (0.1, "ram:"), (None, "gpu:")])
def test_the_optimizer_is_dropped_right_after_its_step(topk, devices):
    """Its copies are still in flight when other tensors reuse its pinned memory."""
    options = {"group": {"topk": topk}, "devices": devices}
    params, optimizer = made([DEVICE] * 3, **options)
    for p, grad in zip(params, grads(params, 0), strict=True):
        p.grad = grad.to(DEVICE)
    keep_busy()
    optimizer.step()
    for p in params:
        p.grad = None
    del optimizer
    gc.collect()
    others = [torch.full((4 * TILE,), 0x7F, dtype=torch.uint8).pin_memory() for _ in range(16)]
    found = [p.detach().cpu() for p in params]
    del others
    expected, reference = made(["cpu"] * 3, **{**options, "devices": "ram:"})
    for p, grad in zip(expected, grads(expected, 0), strict=True):
        p.grad = grad
    reference.step()
    assert_same(found, [p.detach() for p in expected])


@pytest.mark.parametrize("topk", [None, 0.1])
def test_what_a_store_has_is_what_the_cpu_would_have(tmp_path, topk, monkeypatch):
    """States and residuals are stored as they were when the commit began, whatever the device does meanwhile."""
    monkeypatch.setattr(residuals, "CHUNK", 2 * PAGE)

    def script(device, directory, steps):
        options = {"devices": [str(tmp_path / directory)], "group": {"topk": topk}, "resume": steps > 3}
        params, optimizer = made([device] * 3, **options)
        for k in range(3 * (steps > 3), steps):
            for p, grad in zip(params, grads(params, k), strict=True):
                p.grad = grad.to(device)
            optimizer.step()
            if device == DEVICE:
                keep_busy()  # the next forward: the commit must neither wait for it nor store what it changes
                torch.full((N,), torch.nan, device=device)
        optimizer.synchronize()
        found = bits(params, optimizer)
        optimizer.close()
        read = CSDAdam.load(str(tmp_path / directory))["state"]
        return found, [t.clone() for k in sorted(read) for t in read[k].values()]

    for steps in (3, 5):
        (here, stored), expected = script(DEVICE, "there", steps), script("cpu", "here", steps)
        assert_same(here, expected[0])
        assert_same(stored, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bit_states(dtype):
    """8-bit states are computed from the parameter, which travels with the gradient."""

    def final(device):
        params = [randn(n, n, dtype).to(device).requires_grad_() for n in (17, 5 * TILE + 3)]
        with CSDAdam(params, lr=1e-2, devices="file:", tile_size=2 * TILE, state_dtype="8bit") as optimizer:
            for k in range(4):
                for p, grad in zip(params, grads(params, k), strict=True):
                    p.grad = grad.to(device)
                optimizer.step()
                with torch.no_grad():
                    params[1][:5] = k  # the program sets it
            return bits(params, optimizer)

    assert_same(final(DEVICE), final("cpu"))


@pytest.mark.parametrize("mode", [{}, BACKWARD], ids=["plain", "backward"])
def test_overlap(mode):
    """It hides nothing of a step on an accelerator yet, and changes nothing."""

    class Scaled(nn.Module):
        def __init__(self, device):
            super().__init__()
            self.weights = nn.ParameterList(randn(n, n).to(device) for n in (17, 5 * TILE + 3))

        def forward(self, by):
            return sum((w * x).sum() for w, x in zip(self.weights, by, strict=True))

    def final(device, overlaps):
        model = Scaled(device)
        optimizer = CSDAdam(model.parameters(), lr=1e-2, devices="file:", tile_size=TILE)
        if overlaps:
            optimizer.overlap(model, **mode)
        seen = []
        for k in range(4):
            optimizer.zero_grad()
            model([randn(n, 100 * k + n).to(device) for n in (17, 5 * TILE + 3)]).backward()
            keep_busy()
            optimizer.step()
            seen += [w.detach().clone() for w in model.weights]
        optimizer.wait()
        return [t.cpu() for t in seen] + bits([*model.parameters()], optimizer)

    assert_same(final(DEVICE, True), final("cpu", False))
