"""CSD_OPTIM_TRACE writes a timeline that viewers of the Trace Event Format accept."""

import contextlib
import copy
import itertools
import json

import pytest
import torch
from support import far
from support.training import trained
from support.twins import Twin

from csd_optim import CSDAdam, CSDError, CSDOSError
from csd_optim.bindings import Native

STEPS = 3


def train_once(devices):
    trained([torch.nn.Parameter(torch.randn(8 * 4096))], STEPS, devices=devices, tile_size=4096).close()


@pytest.fixture
def traced(tmp_path, monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_TRACE", str(tmp_path / "step.json"))
    return tmp_path / "step.json"


def test_a_timeline(traced, backend, devices):
    train_once(devices)
    events = json.loads(traced.read_text())
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert [e["name"] for e in spans if names[e["tid"]] == "step"] == [f"step {i + 1}" for i in range(STEPS)]
    in_place = backend == "ram" and not far.assumed()
    for kind in ("read", "update", "write"):
        tiles = sorted(e["name"] for e in spans if f": {kind}" in names[e["tid"]])
        moves = kind == "update" or not in_place  # `ram:` alone neither reads nor writes
        often = STEPS
        if "xrt" not in backend and not in_place:  # the first step writes masters too; no step has to read
            often += {"read": -STEPS, "update": 0, "write": 1}[kind]
        expected = [f"tile {t}" for t in range(8) for _ in range(often) if moves]
        # `ram:` copies between slots if it is beside other devices or far away.
        if kind == "read" and (backend == "mixed" or (backend == "ram" and not in_place)):
            in_memory = {e["name"] for e in spans if "(ram:" in names[e["tid"]]}
            assert in_memory
            expected += [tile for tile in in_memory for _ in range(STEPS - 1)]
        assert tiles == sorted(expected)
    for tid in names:  # events on one track do not overlap
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        assert all(a[1] <= b[0] + 0.01 for a, b in itertools.pairwise(times))
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if names[e["tid"]] == "step")
    updates = [e for e in spans if ": update" in names[e["tid"]]]
    assert all(any(a - 1 <= e["ts"] and e["ts"] + e["dur"] <= b + 1 for a, b in steps) for e in updates)


def test_nothing_is_overwritten(traced):
    traced.write_text("mine")
    train_once("ram:")
    train_once("ram:")
    assert traced.read_text() == "mine"
    others = [p for p in traced.parent.iterdir() if p.name.startswith("step.json.")]
    assert len(others) == 2
    assert all(json.loads(p.read_text()) for p in others)


def test_what_a_killed_process_leaves(traced):
    p = torch.nn.Parameter(torch.randn(8192))
    opt = CSDAdam([p], devices="ram:", tile_size=1024)
    for _ in range(2):
        p.grad = torch.randn_like(p)
        opt.step()
    left = traced.read_text()  # a step is written when the next one begins
    assert [e["name"] for e in json.loads(left.rstrip(",\n") + "]")].count("step 1") == 1
    opt.close()


def test_a_file_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("CSD_OPTIM_TRACE", str(tmp_path / "nowhere" / "step.json"))
    with pytest.raises(CSDOSError, match="CSD_OPTIM_TRACE: cannot make"):
        train_once("ram:")


def test_a_step_that_failed_at_its_end(traced, tmp_path, monkeypatch):
    """finish() has undone it, and the timeline says so."""
    p = torch.nn.Parameter(torch.randn(8192))
    with CSDAdam([p], devices=f"file:{tmp_path}/csd0", tile_size=4096) as opt:
        for fails in False, True, False:
            p.grad = torch.randn_like(p)
            with monkeypatch.context() as patch:
                if fails:
                    patch.setattr(Native, "push", lambda *_, **__: None)
                with pytest.raises(CSDError, match=r"(never|not) pushed") if fails else contextlib.nullcontext():
                    opt.step()
    events = json.loads(traced.read_text())
    [track] = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == "step"]
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == track] == ["step 1", "undone", "step 2"]


def test_forward_and_backward_beside_the_devices(traced, tmp_path):
    """With overlap(): two backward passes per step; in one step, the guess about the gradients fails."""
    training = Twin(tmp_path, {"backward": True}, latency="500us", patient=True)
    for step in range(STEPS + 3):
        training.backward()
        copy.deepcopy(training.model)
        training.backward()
        with torch.no_grad():
            training.model(torch.ones(2, training.width))  # must not be traced: without gradients
        if step == STEPS:
            for p in training.model.parameters():
                p.grad.mul_(0.5)
        training.opt.step()
        training.opt.zero_grad()
    redone = training.opt.stats()["overlap"]["redone"]
    training.opt.overlap(None)
    training.step()
    training.opt.close()

    events = json.loads(traced.read_text())
    track = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps, model = (
        [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and track[e["tid"]] == name]
        for name in ("step", "model")
    )
    assert redone == {"gradients": 1}
    done = [name for name, *_ in steps if name != "undone"]
    assert done == [f"step {i + 1}" for i in range(STEPS + 4)]
    assert len(steps) == len(done) + 1
    assert [name for name, *_ in model] == ["forward", "backward"] * 2 * (STEPS + 3)
    assert all(a[2] <= b[1] + 0.01 for a, b in itertools.pairwise(model))
    backward = [span for span in model if span[0] == "backward"][2 * STEPS - 1]  # the last backward before a step
    _, begin, _ = next(step for step in steps if step[0] == f"step {STEPS}")
    assert backward[1] <= begin <= backward[2]
