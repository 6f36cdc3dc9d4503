"""`gpu:` with overlap: its parameters are updated on the program's streams without waits; the others arrive later.

All values that a program reads, and all states, are the same as without overlap.
"""

import itertools
import json
import random
import threading

import pytest
import torch
from support import emulated
from support.between_steps import (
    History,
    accumulates_otherwise_each_time,
    checkpoints_activations,
    clips,
    edits_states,
    freezes,
    gives_steps_up,
    looks_at_states,
    never_clears,
    ten_steps,
    writes_parameters,
)
from support.exact import Linear
from support.inside import engine_of, flight_of, images_back, state_map_of
from support.on_accelerator import BACKWARD, DEVICE, DTYPES, in_small_pieces, launches_fail
from support.replacing import class_with, failing
from support.twins import Twin, assert_twins, checksum
from support.use_check import check_uses
from torch import nn

from csd_optim import CSDAdam, CSDMemoryError, CSDOSError, CSDTornError, CSDValueError
from csd_optim.bindings import Native
from csd_optim.engine.engine import Engine

pytestmark = pytest.mark.accelerator
one_schedule = pytest.mark.one_schedule

EVERYWHERE = [*(f"{DEVICE}:{i}" for i in range(torch.accelerator.device_count())), "cpu"]
PLAIN, FREE = {}, {"free_gradients": True, "hold": "10KB"}
ALL = pytest.mark.parametrize("overlap", [PLAIN, BACKWARD, FREE], ids=["plain", "backward", "free"])
MOST = ["gpu:?share=3"]  # all layers but one
NAMED = {"named": True, "gpu": [f"gpu:?room={12 * 2 * 48 * 49}"]}  # directories have all; `gpu:` copies of two layers
SCRATCH = pytest.param({}, id="scratch", marks=pytest.mark.soak)  # a subset of what the other cases do
KEPT = pytest.mark.parametrize("options", [SCRATCH, pytest.param(NAMED, id="named")])


@pytest.fixture(autouse=True)
def small_pieces():
    """Queue updates in so small pieces that a weight takes several if there are no kernels."""
    with in_small_pieces():
        yield


def twins(directory, script, overlap, **options):
    options = {"place": [DEVICE], "gpu": ["gpu:"], "latency": "100us", "patient": overlap is BACKWARD, **options}
    return assert_twins(directory, overlap, script, **options)


def accelerator_updates_of(training):
    gpu = {id(b.param) for b in state_map_of(training.opt).by_index if b.on_accelerator or b.accelerator_copy}
    return [p for p in training.model.parameters() if id(p) in gpu]


@ALL
@pytest.mark.parametrize(
    "options",
    [
        {"latency": "2ms"},
        {"dtype": torch.bfloat16, "gpu": MOST, "devices": 2},
        {"dtype": torch.float16, "place": EVERYWHERE, "groups": True},
        {"latency": "2ms", **NAMED},
        {"dtype": torch.bfloat16, "place": EVERYWHERE, "groups": True, "devices": 2, **NAMED},
        {"dtype": torch.bfloat16, "gpu": MOST, "state_dtype": "8bit"},
        {"dtype": torch.float16, "state_dtype": "8bit", "named": True, "gpu": [f"gpu:?room={6 * 2 * 48 * 49}"]},
    ],
    ids=str,
)
def test_training(tmp_path, overlap, options):
    training = twins(tmp_path, ten_steps, overlap, **options)
    stats = training.opt.stats()
    elems = sum(p.numel() for p in training.model.parameters())
    assert (
        0
        < sum(p.numel() for p in accelerator_updates_of(training))
        == stats["devices"][0]["params"]
        < elems
        == stats["params"]
    )
    assert stats["overlap"]["early_params"] >= (overlap is not PLAIN)
    assert stats["overlap"]["redone"] == {}
    training.opt.close()


@KEPT
@pytest.mark.parametrize("overlap", [PLAIN, BACKWARD], ids=["plain", "backward"])
@pytest.mark.parametrize(
    "script", [clips, looks_at_states, never_clears, writes_parameters], ids=lambda script: script.__name__
)
def test_what_a_program_may_do(tmp_path, script, overlap, options):
    twins(tmp_path, script, overlap, **options).opt.close()


@one_schedule
@KEPT
@pytest.mark.parametrize("script", [checkpoints_activations, accumulates_otherwise_each_time, edits_states])
def test_more_that_a_program_may_do(tmp_path, script, options):
    twins(tmp_path, script, BACKWARD, **options).opt.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_history(tmp_path, seed):
    choose = random.Random(seed)
    options = {"dtype": choose.choice(DTYPES), "devices": choose.choice([1, 2]), "groups": choose.random() < 0.3}
    options |= {"max_grad_norm": choose.choice([None, 0.5]), "gpu": choose.choice([["gpu:"], MOST, ["gpu:", "ram:"]])}
    if seed > 1:
        options |= NAMED
    if seed > 3:
        options |= {"state_dtype": "8bit", "gpu": choose.choice([["gpu:"], MOST])}
    overlap = PLAIN if seed % 2 or "ram:" in options["gpu"] else BACKWARD
    twins(tmp_path, History(seed), overlap, **options).opt.close()


@KEPT
def test_gradients_that_are_freed(tmp_path, options):
    twins(tmp_path, freezes, FREE, place=EVERYWHERE, groups=True, **options).opt.close()


class Towers(nn.Module):
    """Layers on streams of their own. Tensors that cross streams are kept, because no record_stream() is called."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Linear(48, 48) for _ in range(4))
        self.streams = [torch.Stream(DEVICE) for _ in self.layers]
        self.kept = []

    def forward(self, x):
        if x.is_cpu:
            return sum(layer(x) for layer in self.layers)
        main, outs = torch.accelerator.current_stream(), []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            stream.wait_stream(main)
            with stream:
                outs.append(layer(x))
            main.wait_stream(stream)
        self.kept += [*outs, sum(outs)]
        for out in self.kept[-5:]:
            out.retain_grad()
        return self.kept[-1]


@one_schedule
def test_backward_on_several_streams(emulated_only):
    """Gradients are computed on several streams, in turn or concurrently, and updates share scratch memory."""

    def run(device, devices, overlap=None):
        torch.manual_seed(0)
        model, kept = Towers().to(device), []
        opt = CSDAdam(model.parameters(), lr=1e-2, devices=devices, tile_size=1024)
        if overlap:
            opt.overlap(model, **overlap)
        for k in range(3):
            x = torch.randn(3, 48, generator=torch.Generator().manual_seed(k)).to(device)
            kept += [x, model(x).square().sum()]
            torch.accelerator.synchronize()
            kept[-1].backward()
            opt.step()
            torch.accelerator.synchronize()
            opt.zero_grad()
        return [t.detach().cpu() for p in model.parameters() for t in (p, *opt.state[p].values())]

    expected = run("cpu", "file:")
    for seed in range(5):
        with emulated.schedule(f"random={seed}"):
            assert all(map(torch.equal, run(DEVICE, ["gpu:?share=3", "file:"], FREE), expected)), seed


def strided(training):
    weight = training.model[1].inner.weight
    for k in range(4):
        if k == 2:
            weight.data = weight.data.t().contiguous().t()
        training.step()


@pytest.mark.parametrize("options", [{"gpu": MOST}, NAMED], ids=["scratch", "named"])
@pytest.mark.parametrize("overlap", [PLAIN, BACKWARD], ids=["plain", "backward"])
def test_layouts(tmp_path, overlap, options):
    twins(tmp_path, strided, overlap, **options).opt.close()


# Without a drive, with a drive that has none of the states, and with one that has all.
@pytest.mark.parametrize(("gpu", "named"), [("gpu:", False), ("gpu:?room=1GB", False), ("gpu:?room=1GB", True)])
@ALL
def test_all_states_are_there(tmp_path, overlap, gpu, named):
    options = {"gpu": [gpu], "devices": int("room" in gpu), "named": named}
    if overlap is FREE and not options["devices"]:
        with pytest.raises(CSDValueError, match="takes a second copy of the states: ram:, null: and gpu: alone"):
            Twin(tmp_path, overlap, place=[DEVICE], **options)
        return
    training = twins(tmp_path, ten_steps, overlap, **options)
    assert len(accelerator_updates_of(training)) == len([*training.model.parameters()])
    assert training.opt.stats()["overlap"]["redone"] == {}
    training.opt.close()


@one_schedule
def test_what_waits_passes_the_check(tmp_path, monkeypatch):
    check_uses(monkeypatch)
    twins(tmp_path, ten_steps, PLAIN).opt.close()


@KEPT
def test_nobody_waits_for_it(tmp_path, monkeypatch, options):
    """While drives have delivered nothing yet, its parameters already read as updated, and gradients may be reused."""
    trainings = []
    for name, overlap in ("with", PLAIN), ("without", None):
        (tmp_path / name).mkdir()
        trainings.append(Twin(tmp_path / name, overlap, place=[DEVICE], **{"gpu": ["gpu:"], **options}))
        trainings[-1].step()
        trainings[-1].opt.wait()
    one, other = trainings
    gpu, expected = ([p for p in accelerator_updates_of(t) if p.dim() == 2] for t in trainings)
    assert gpu
    other.step()
    real, goes_on = Native.pull, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Native, "pull", lambda engine: goes_on.wait() and real(engine))
        try:
            one.backward()
            one.opt.step()
            for p in gpu:
                p.grad.fill_(torch.nan)
            there = next(layer.inner.weight for layer in one.model if any(layer.inner.weight is p for p in gpu))
            assert [checksum(p) for p in gpu] == [checksum(p) for p in expected]
            assert checksum(there) == checksum(gpu[[p is there for p in gpu].index(True)])
            assert not images_back(flight_of(one.opt))
        finally:
            goes_on.set()
    one.opt.wait()
    assert one.parameters() == other.parameters()
    one.opt.close()
    other.opt.close()


@one_schedule
@KEPT
@ALL
def test_timeline(tmp_path, overlap, monkeypatch, options):
    """Each step's updates on `gpu:` are in its tracks of the trace; with free_gradients=True, each parameter's."""
    monkeypatch.setenv("CSD_OPTIM_TRACE", str(tmp_path / "trace.json"))
    training = Twin(tmp_path, overlap, place=[DEVICE], latency="100us", **{"gpu": ["gpu:"], **options})
    for _ in range(3):
        training.step()
    gpu = len(accelerator_updates_of(training))
    training.opt.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    tracks = {e["tid"] for e in events if "gpu:" in e.get("args", {}).get("name", "")}
    names = [e["name"] for e in events if e["ph"] == "X" and e["tid"] in tracks]
    assert names == (["1 parameters"] * 3 * gpu if overlap is FREE else [f"{gpu} parameters"] * 3)


# ---- what does not go well -------------------------------------------------------------------


def one_step(training):
    """Make a step, and wait for all of it."""
    training.step()
    training.opt.wait()


@ALL
@pytest.mark.parametrize(
    ("call", "number", "options"),
    [
        *((*call, {"gpu": MOST}) for call in [("pull", 3), ("finish", 1), ("push", 2)]),
        # Of ten tiles, the last five contain elements that `gpu:` has.
        *((*call, NAMED) for call in [("pull", 3), ("finish", 1), ("push", 6)]),
    ],
    ids=str,
)
def test_a_device_that_fails(tmp_path, overlap, call, number, options):
    """The step is undone, also on the accelerator, its error is raised once, and the next step is right."""

    def script(training):
        training.step()
        training.step()
        training.opt.wait()
        while not engine_of(training.opt).idle:
            pass
        log, losses, steps = len(training.log), len(training.losses), training.steps
        before = training.seen()[2:]
        if training.overlap is not None:
            training.patient = False
            side = torch.Stream(DEVICE)
            with failing(class_with(call), call, number, "broken"), pytest.raises(CSDOSError, match="broken"):
                one_step(training)
            with side:  # a stream that has waited for nothing
                seen = [p.detach().clone() for p in training.model.parameters()]
            side.synchronize()
            assert [checksum(p) for p in seen] == before[0]
            training.opt.zero_grad()
            assert training.seen()[2:] == before
        del training.log[log:], training.losses[losses:]
        training.steps = steps
        training.step()
        training.step()

    twins(tmp_path, script, overlap, **options).opt.close()


@KEPT
@pytest.mark.parametrize("overlap", [PLAIN, FREE], ids=["plain", "free"])
def test_an_update_that_fails(tmp_path, overlap, options):
    """An update on the accelerator fails half-way."""
    training = Twin(tmp_path, overlap, place=[DEVICE], latency="100us", **{"gpu": ["gpu:"], **options})
    training.step()
    training.opt.wait()
    before = training.seen()[2:]
    with launches_fail(2, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        training.step()
    training.opt.zero_grad()
    assert training.seen()[2:] == before
    training.step()
    assert training.seen()[2:] != before
    training.opt.close()


@one_schedule
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("overlap", [PLAIN, FREE], ids=["plain", "free"])
def test_an_accelerator_that_fails_when_a_step_is_undone(tmp_path, overlap, monkeypatch):
    """Nothing waits for ever, and the accelerator's states are not taken for those of any step."""

    def gone(*_):
        raise RuntimeError("the accelerator is gone")

    training = Twin(tmp_path, overlap, place=[DEVICE], gpu=["gpu:"], latency="100us")
    one_step(training)
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", gone)
        with failing(Engine, "finish", 1, "broken"), pytest.raises(RuntimeError, match="the accelerator is gone"):
            one_step(training)
    training.opt.zero_grad()
    with pytest.raises(CSDTornError, match="an earlier step was cut short"):
        one_step(training)
    training.opt.close()


@pytest.mark.parametrize(
    "options", [{}, {"gpu": ["gpu:?room=1GB"]}, NAMED, {"gpu": ["gpu:?room=1GB"], "named": True}], ids=str
)
def test_a_backward_that_is_undone(tmp_path, options):
    twins(tmp_path, gives_steps_up, FREE, **options).opt.close()


@one_schedule
def test_gradients_are_free_in_backward(tmp_path):
    """So are those of `gpu:`'s parameters, each of which needs a copy of its states until the step is complete."""
    training = Twin(tmp_path, FREE, place=[DEVICE], gpu=["gpu:?room=1GB"], depth=12, dtype=torch.bfloat16)
    training.step()
    training.losses.clear()
    training.log.clear()
    allocated, weight = [], training.model[0].inner.weight
    for layer in training.model:
        layer.inner.weight.register_hook(lambda _: allocated.append(torch.accelerator.memory_allocated()))
    training.backward()
    grown = [after - before for before, after in itertools.pairwise(allocated[1:])]
    of_copies = 12 * (weight.numel() + training.width)
    assert max(grown) < of_copies + weight.nbytes
    training.opt.step()
    training.losses.clear()
    assert torch.accelerator.memory_allocated() < allocated[0]
    training.opt.close()


@one_schedule
@pytest.mark.parametrize("overlap", [PLAIN, FREE], ids=["plain", "free"])
def test_no_memory_for_it(tmp_path, overlap, monkeypatch):
    training = Twin(tmp_path, overlap, place=[DEVICE], gpu=["gpu:"], latency="100us")
    training.step()
    training.opt.wait()
    before = training.seen()[2:]

    def full(*_, **__):
        raise torch.OutOfMemoryError("out of it")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(CSDMemoryError, match="no memory for a step on the accelerator"):
            training.step()
    training.opt.zero_grad()
    assert training.seen()[2:] == before
    training.step()
    training.opt.close()
