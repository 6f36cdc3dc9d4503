"""`gpu:` with 8-bit states, and with Top-K: the bits are those of states in host memory."""

import contextlib
import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.accelerator_training import Trained, params_on, randn, same
from support.backends import TILE
from support.inside import engine_of
from support.on_accelerator import DEVICE, DTYPES, GPU, in_small_pieces, launches_fail
from support.optimizers import ADAM, ADAMW, CODED, MIXED
from support.replacing import class_with

from csd_optim import CSDMemoryError, CSDMuon, CSDOSError, CSDTornError, CSDValueError
from csd_optim.compression import dense
from csd_optim.compression.kernel_check import topk_kernels_of
from csd_optim.compression.kernel_selection import nbytes_of_part
from csd_optim.compression.selection import TopK
from csd_optim.engine.accelerator_codes import checks_of
from csd_optim.kernels import device_check
from csd_optim.kernels.device_check import DeviceKernels

pytestmark = pytest.mark.accelerator
one_schedule = pytest.mark.one_schedule
EIGHT_BIT = {"state_dtype": "8bit"}
PAIRS = [
    *(replace(p, kwargs={**p.kwargs, **EIGHT_BIT}) for p in (ADAMW, replace(ADAMW, kwargs={"amsgrad": True}), ADAM)),
    *CODED,
]


@pytest.fixture(autouse=True)
def small_pieces():
    with in_small_pieces():
        yield


def codes_on(devices=("gpu:",), device=DEVICE, pair=ADAMW, **options):
    return Trained([*devices], device, pair, **{**EIGHT_BIT, **options} if pair is ADAMW else options)


def in_memory(pair=ADAMW, **options):
    return codes_on(["ram:"], "cpu", pair, **options)


# ---- bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "devices"),
    [
        *((pair, devices) for pair in PAIRS for devices in GPU),
        (PAIRS[0], ["gpu:?share=20", "file:"]),
        (replace(MIXED, kwargs=EIGHT_BIT), ["gpu:"]),
        (replace(MIXED, kwargs=EIGHT_BIT), ["gpu:?room=64kB", "file:"]),
    ],
    ids=str,
)
def test_bits_of_states_in_memory(pair, devices):
    here, memory = Trained(devices, pair=pair), Trained(["ram:"], "cpu", pair)
    for k in range(4):
        without = [3] if k == 2 else ()
        assert same(here.step(k, without).bits(), memory.step(k, without).bits())
    assert here.rows()[0]["params"] > 0


def test_many_parameters():
    """One launch takes as many parameters as fit into its arguments, in order."""
    params = [[randn((7 + i,), i, torch.bfloat16).to(d).requires_grad_() for i in range(70)] for d in (DEVICE, "cpu")]
    with in_small_pieces(1 << 30):
        here, memory = codes_on(params=params[0]), in_memory(params=params[1])
        for k in range(2):
            assert same(here.step(k).bits(), memory.step(k).bits())


@one_schedule
def test_bytes_per_parameter():
    """A 16-bit parameter takes 3 B, and 5/64 B for exponents and checksums; beside a drive an undo needs more."""
    n = 64 * TILE
    for devices, dtype, expected in (
        (["gpu:"], torch.bfloat16, 3 + 5 / 64),
        (["gpu:"], torch.float32, 2 + 1 / 64),
        (["gpu:?share=99", "file:"], torch.float16, 2 * (3 + 5 / 64) + 2),
    ):
        params = [randn((n,), 1, dtype).to(DEVICE).requires_grad_()]
        rows = codes_on(devices, params=params).step(0).rows()
        if len(devices) == 1:
            assert rows[0]["state_bytes"] == expected * n
    for room, there in ((3.2 * n, n), (3.05 * n, 0)):
        params = [randn((n,), 1, torch.bfloat16).to(DEVICE).requires_grad_()]
        assert codes_on([f"gpu:?room={int(room)}", "ram:"], params=params).step(0).rows()[0]["params"] == there


@one_schedule
def test_states_are_decoded_on_the_host():
    """They are tensors on the CPU, decoded when they are read; old ones keep the old values."""
    here, memory = codes_on().step(0), in_memory().step(0)
    p = here.params[4]
    old = here.opt.state[p]["exp_avg"]
    assert old.is_cpu
    assert old is here.opt.state[p]["exp_avg"]
    kept = old.clone()
    here.step(1)
    memory.step(1)
    assert torch.equal(old, kept)
    assert not torch.equal(old, here.opt.state[p]["exp_avg"])
    old.fill_(9)  # of a step that is over
    assert same(here.step(2).bits(), memory.step(2).bits())


# ---- writes ------------------------------------------------------------------------------------


@one_schedule
@pytest.mark.parametrize("devices", GPU, ids=str)
def test_what_is_written_counts(devices):
    """Writes to parameters, also past torch, and to states take effect with the next step."""

    def run(devices, device):
        it, seen = codes_on(devices, device), []
        params, opt = it.params, it.opt
        for k in range(6):
            it.step(k, without=[5] if k == 3 else ())
            with torch.no_grad():
                params[3][0] = k
                params[4].mul_(2)
                params[4].data[5 * k : 5 * k + 70] = 0.5
                opt.state[params[1]]["exp_avg"].add_(1e-3)
                opt.state[params[4]]["exp_avg_sq"] = torch.ones_like(params[4], dtype=torch.float32)
                opt.state[params[6]]["master"].mul_(1.5)
                if k == 2:
                    opt.state[params[4]]["master"][::3] += 1
            if k == 4:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            seen += it.step(10 + k).bits()
        return seen

    assert same(run(devices, DEVICE), run(["ram:"] if "file:" not in devices else ["file:"], "cpu"))


@one_schedule
def test_an_edit_waits_for_a_gradient():
    """What is written to the states of a parameter without a gradient is there until a step updates it."""
    here, memory = codes_on().step(0), in_memory().step(0)
    for it in (here, memory):
        it.opt.state[it.params[4]]["exp_avg"].fill_(2)
        it.opt.state[it.params[3]]["exp_avg_sq"].fill_(3)
        it.step(1, without=[4])
    assert here.opt.state[here.params[4]]["exp_avg"].eq(2).all()
    assert same(here.step(2).bits(), memory.step(2).bits())


@one_schedule
def test_a_loaded_master_of_another_parameter():
    """Where a master is not the parameter's, the parameter counts; a model that is loaded later keeps its masters."""

    def run(devices, device):
        source, it = in_memory().step(0), codes_on(devices, device)
        it.opt.load_state_dict(copy.deepcopy(source.opt.state_dict()))
        with torch.no_grad():
            for a, b in zip(it.params[:4], source.params, strict=False):
                a.copy_(b)
        return it.bits()[1:] + it.step(1).bits()

    assert same(run(["gpu:"], DEVICE), run(["ram:"], "cpu"))


# ---- state dicts and moves -----------------------------------------------------------------------


@one_schedule
def test_state_dicts():
    """Parameters and states move from memory to the accelerator and back, and to a drive, without losing a bit."""
    places = [(["ram:"], "cpu"), (["gpu:"], DEVICE), (["file:"], "cpu"), (["gpu:?share=20", "file:"], DEVICE)]
    it, memory, k = in_memory().step(0), in_memory().step(0), 0
    for devices, device in [*places[1:], *places]:
        params = [p.detach().to(device, copy=True).requires_grad_() for p in it.params]
        moved = codes_on(devices, params=params)
        moved.opt.load_state_dict(it.opt.state_dict())
        assert same(moved.bits(), memory.bits())
        for _ in range(2):
            k += 1
            assert same(moved.step(k).bits(), memory.step(k).bits())
        it = moved
    again = copy.deepcopy(it.opt)
    assert same([*again.state_dict()["state"][3].values()][1:], [*it.opt.state_dict()["state"][3].values()][1:])


@one_schedule
def test_what_loads_takes_no_memory():
    """States that are loaded with their parameters are encoded at once."""
    source = in_memory().step(0)
    here = codes_on(params=[p.detach().to(DEVICE, copy=True).requires_grad_() for p in source.params])
    here.opt.load_state_dict(source.opt.state_dict())
    assert engine_of(here.opt).states.accelerator_codes.in_memory == set()
    assert same(here.bits(), source.bits())


@one_schedule
def test_what_leaves_frees_its_memory():
    here = codes_on().step(0)
    codes = engine_of(here.opt).states.accelerator_codes
    before = len(codes.by_param)
    entry, p = here.opt.state[here.params[4]], here.params.pop(4)
    kept = entry["exp_avg"].clone()
    here.opt.param_groups[0]["params"].pop(4)
    del here.opt.state[p]
    here.step(1)
    assert len(codes.by_param) == before - 1
    assert torch.equal(entry["exp_avg"], kept)


# ---- failures ------------------------------------------------------------------------------------


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("call", ["begin", "pull", "finish", "launch"])
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("options", [{}, {"topk": 0.1}], ids=str)
def test_a_step_that_fails(call, k, options, monkeypatch):
    """Parameters, states, residuals and edits are those before the step, wherever they are."""
    devices = ["gpu:?share=3", "file:"]
    here = codes_on(devices, params=params_on(DEVICE) + params_on(DEVICE, seed=50), **options)
    # Without Top-K as on the CPU; with it the same devices, as others would cut parameters into other parts.
    there, device = (devices, DEVICE) if options else (["file:"], "cpu")
    memory = codes_on(there, params=params_on(device) + params_on(device, seed=50), **options)
    for it in (here, memory):
        if k:
            it.step(0)
            for p in it.params[3:5]:
                it.opt.state[p]["exp_avg"].mul_(0.5)
                it.opt.state[p]["master"].mul_(1.25)
    before = [p.detach().cpu() for p in here.params]
    residuals = [t.clone() for p in here.params if (t := here.opt.state.get(p, {}).get("residual")) is not None]

    def breaks(*arguments, **named):
        raise Broken

    real, calls = class_with("finish").finish, []

    def fails_once(engine, keep=True, **ending):
        calls.append(keep)
        return real(engine, keep, **ending) if len(calls) > 1 else breaks()

    with monkeypatch.context() as patch:
        if call != "launch":
            patch.setattr(class_with(call), call, fails_once if call == "finish" else breaks)
        with launches_fail(2, breaks) if call == "launch" else contextlib.nullcontext(), pytest.raises(Broken):
            here.step(7)
    assert same([p.detach().cpu() for p in here.params], before)
    now = [t for p in here.params if (t := here.opt.state.get(p, {}).get("residual")) is not None]
    assert not k or same(now, residuals)
    for later in (2, 3):
        assert same(here.step(later).bits(), memory.step(later).bits())
    assert here.rows()[0]["params"] > 0


@one_schedule
def test_a_step_in_place_that_fails_says_so():
    here = codes_on().step(0)
    with launches_fail(3, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        here.step(1)
    with pytest.raises(CSDTornError, match=r"an earlier step was cut short\. .* gpu: without a drive"):
        here.step(2)


@one_schedule
def test_a_value_that_was_set_survives_a_step_that_fails(monkeypatch):
    """What the program had set before a step that fails still counts as set by the program after it."""
    here, memory = codes_on(["gpu:?share=20", "file:"]).step(0), codes_on(["file:"], "cpu").step(0)
    for it in (here, memory):
        with torch.no_grad():
            it.params[4][:] = 0.25
    with launches_fail(1, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        here.step(7)
    assert same(here.step(1).bits(), memory.step(1).bits())


# ---- where there are no kernels --------------------------------------------------------------------


@one_schedule
def test_without_kernels(monkeypatch):
    """Alone, `gpu:` says why it cannot have the states; beside other devices, these have them."""
    with monkeypatch.context() as patch:
        patch.setattr(device_check, "kernels_of", lambda _: DeviceKernels(None, (), "there are none"))
        with pytest.raises(
            CSDValueError,
            match=r"gpu: cannot keep the states of 0\.0: \w+:0 has no kernels, because there are none",
        ):
            codes_on().step(0)
        beside, memory = codes_on(["gpu:?share=9", "ram:"]), in_memory()
        assert same(beside.step(0).bits(), memory.step(0).bits())
        assert beside.rows()[0]["params"] == 0
    with pytest.raises(CSDValueError, match="gpu: cannot take the two passes of muon"):
        CSDMuon([torch.ones(8, 8, device=DEVICE).requires_grad_()], devices="gpu:", state_dtype="8bit")


# ---- Top-K -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [["gpu:"], ["gpu:?share=2", "file:"], ["gpu:?room=200kB", "ram:"]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "8bit"},
        {"error_feedback": False},
        {"grad_dtype": torch.bfloat16},
        {"state_dtype": "8bit", "topk_warmup": 2, "maximize": True},
    ],
    ids=str,
)
def test_topk(devices, options):
    """The selection, residuals and bits are those of states elsewhere, also while the share of gradients changes."""

    def run(devices, device):
        shapes = [(), (40, 100), (2, TILE), (5 * TILE + 3,), (64, 65), (TILE - 1,), (17,)]
        params = [randn(s, i, DTYPES[i % 3]).to(device).requires_grad_() for i, s in enumerate(shapes)]
        it = Trained(devices, params=[{"params": params, "topk": 0.05}], **options)
        it.params = params
        seen = []
        for k in range(5):
            it.opt.grad_scale = torch.tensor([1.0, 1024.0, 0.37, 8.0, 1.0][k])
            it.opt.param_groups[0]["topk"] = [0.05, 0.05, 0.3, None, 0.01][k]
            seen += it.step(k).bits()
        return seen, it

    (here, it), (expected, _) = run(devices, DEVICE), run(["ram:"], "cpu")
    assert it.rows()[0]["params"] > 0
    if devices == ["gpu:"]:  # elsewhere parameters lie in other tiles, and so are cut into other parts
        assert same(here, expected)
    else:
        assert len(here) == len(expected)


def train_dense(device, devices, shape):
    params = [randn(shape, i, DTYPES[i]).to(device).requires_grad_() for i in range(3)]
    it = Trained(devices, params=[{"params": params, "topk": 0.05}], tile_size=TILE)
    it.params = params
    return [bits for k in range(3) for bits in it.step(k).bits()]


def test_topk_that_the_host_selects(monkeypatch):
    """Where the kernels of Top-K cannot be used, and those of the rules can."""
    monkeypatch.setattr(dense, "topk_kernels_of", lambda device: None)
    shape = 3, 2 * TILE + 1
    assert same(train_dense(DEVICE, ["gpu:"], shape), train_dense("cpu", ["ram:"], shape))


def test_parts_that_are_not_selected_at_once(monkeypatch):
    """If there are more than fit into memory. Each selection takes five launches, and two for what becomes of it."""
    shape, parts = (6, TILE), 6
    expected, library = train_dense("cpu", ["ram:"], shape), topk_kernels_of(torch.device(DEVICE, 0))
    launches = []
    for at_once in (parts, 2, 1):
        nbytes = at_once * nbytes_of_part(TopK(0.05, torch.bfloat16, None, 1.0, 1), TILE)
        monkeypatch.setattr(dense, "BATCH_BYTES", nbytes)
        before = library.launches
        assert same(train_dense(DEVICE, ["gpu:"], shape), expected)
        launches.append(library.launches - before)
    updates = 3 * 3  # steps and parameters
    assert [n - launches[0] for n in launches] == [0, updates * 7 * 2, updates * 7 * 5]


@one_schedule
def test_no_memory_for_a_selection(monkeypatch):
    """This is found before the step changes anything."""
    p = randn((4, TILE), 0, torch.bfloat16).to(DEVICE).requires_grad_()
    it = Trained(["gpu:"], params=[p], topk=0.05).step(0)
    before = it.bits()

    def empty(*size, real=torch.empty, **options):
        if options.get("dtype") is torch.uint8 and torch.device(options.get("device", "cpu")).type == DEVICE:
            raise torch.OutOfMemoryError("out of it")
        return real(*size, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        with pytest.raises(CSDMemoryError, match="no memory for a step on the accelerator"):
            it.step(1)
    assert same(it.bits(), before)


@one_schedule
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_residual_moves(state_dtype):
    """A parameter that is moved between devices keeps its bits, and what its gradients still owe."""
    options = {"topk": 0.05, "tile_size": 4 * TILE, "state_dtype": state_dtype}

    def params_of(device):
        return [randn((2, 2 * TILE), i, torch.bfloat16).to(device).requires_grad_() for i in range(3)]

    it, memory = (Trained(["ram:"], params=params_of("cpu"), **options).step(0) for _ in range(2))
    k = 0
    for devices, device in ((["gpu:"], DEVICE), (["file:"], "cpu"), (["gpu:"], DEVICE)):
        params = [p.detach().to(device, copy=True).requires_grad_() for p in it.params]
        moved = Trained(devices, params=params, **options)
        moved.opt.load_state_dict(it.opt.state_dict())
        for _ in range(2):
            k += 1
            assert same(moved.step(k).bits(), memory.step(k).bits())
        assert moved.opt.state[params[0]]["residual"].device == params[0].device
        it = moved


@one_schedule
def test_what_is_owed_is_sent_with_the_next_dense_gradient():
    owing = Trained(["ram:"], "cpu", topk=0.1).step(0)
    expected = Trained(["ram:"], params=[p.detach().clone().requires_grad_() for p in owing.params])
    here = Trained(["gpu:"], params=[p.detach().to(DEVICE, copy=True).requires_grad_() for p in owing.params])
    for it in (here, expected):
        it.opt.load_state_dict(copy.deepcopy(owing.opt.state_dict()))
        it.step(1)
        assert not any("residual" in it.opt.state[p] for p in it.params)
    assert same(here.bits(), expected.bits())


@one_schedule
def test_what_is_owed_can_be_dropped():
    owing = Trained(["ram:"], "cpu", topk=0.1).step(0)
    here = Trained(["gpu:"], params=[p.detach().to(DEVICE, copy=True).requires_grad_() for p in owing.params])
    here.opt.load_state_dict(owing.opt.state_dict())
    assert any("residual" in here.opt.state[p] for p in here.params)
    here.opt.error_feedback = False
    here.step(1)
    assert not any("residual" in here.opt.state[p] for p in here.params)


@one_schedule
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_infinite_gradients_are_counted(state_dtype):
    """They are the largest, so Top-K sends them first, and those that it does not send are not counted."""
    counts = []
    for devices, device in ((["gpu:"], DEVICE), (["ram:"], "cpu")):
        p = randn((2, 2 * TILE), 1, torch.bfloat16).to(device).requires_grad_()
        it = Trained(devices, params=[p], topk=0.01, state_dtype=state_dtype)
        p.grad = torch.ones_like(p)
        p.grad[:, :50] = torch.inf
        it.opt.step()
        counts.append(it.opt.stats()["nonfinite_grads"])
    assert counts[0] == counts[1] > 0


@one_schedule
def test_checksums():
    """Any element of a group changes its checksum, and so does the exchange of two in different pairs."""
    params = torch.arange(1, 129, dtype=torch.int16).view(torch.bfloat16)
    sums = checks_of(params)
    for i in range(64):
        other = params.clone()
        other.view(torch.int16)[i] += 1
        assert checks_of(other)[0] != sums[0]
        assert checks_of(other)[1] == sums[1]
    other = params.clone()
    other.view(torch.int16)[[0, 2]] = params.view(torch.int16)[[2, 0]]
    assert checks_of(other)[0] != sums[0]
    assert sums.dtype == np.uint32


# ---- histories -----------------------------------------------------------------------------------

SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(8, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_histories(seed, monkeypatch):
    """Whatever happens between and in steps, the bits are those of devices in host memory."""
    choose = random.Random(seed)
    shapes = [
        choose.choice([(), (0, 2), (7, 9), (TILE,), (3 * TILE + 5,), (700,)]) for _ in range(choose.randint(2, 7))
    ]
    dtypes = [choose.choice([*DTYPES, torch.complex64]) for _ in shapes]
    options = {"state_dtype": choose.choice(["8bit", "8bit", "fp32"]), "amsgrad": choose.random() < 0.3}
    topk = choose.choice([None, 0.1])

    def opened(devices, device):
        values = [randn(shape, i, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]
        return Trained(devices, params=[v.to(device).requires_grad_() for v in values], topk=topk, **options)

    is_alone = topk is not None or choose.random() < 0.5  # beside others, tiles and so the parts of Top-K differ
    beside = choose.choice([["gpu:?share=2", "ram:"], ["gpu:?share=2", "file:"]])
    here = opened(["gpu:"] if is_alone else beside, DEVICE)
    memory = opened(["ram:"] if is_alone or "ram:" in beside else ["file:"], "cpu")
    for k in range(1, choose.randint(5, 12)):
        without = {i for i in range(len(shapes)) if choose.random() < 0.2}
        happens = choose.choice(["", "write", "past", "edit", "master", "load", "fails"])
        if happens in ("past", "master") and options["state_dtype"] == "fp32":
            happens = "write"  # the others differ for parameters that are their own masters, and those that are not
        which, value = choose.randrange(len(shapes)), choose.random()
        without.discard(which)  # until a step updates it, `state` shows different masters of what was set
        known = [i for i, p in enumerate(memory.params) if memory.opt.state.get(p) and p.numel()]
        for it in (here, memory):
            p = it.params[which]
            if happens == "write":
                with torch.no_grad():
                    p.mul_(value)
            elif happens == "past":  # whole groups: a file compares elements, and memory groups
                p.data.mul_(value)
            elif happens in ("edit", "master") and which in known:
                it.opt.state[p]["exp_avg_sq" if happens == "edit" else "master"].mul_(1 + value)
            elif happens == "load" and known:
                it.opt.load_state_dict(copy.deepcopy(it.opt.state_dict()))
            elif happens == "fails" and it is here and not is_alone and "file:" in beside:
                with monkeypatch.context() as patch:
                    patch.setattr(class_with("pull"), "pull", lambda *_: fail())
                    with contextlib.suppress(CSDOSError):
                        before = [p.detach().clone() for p in it.params]
                        it.step(1000 + k, without)
                        memory.step(1000 + k, without)  # there was nothing to pull
                        before = [p.detach().clone() for p in it.params]
                assert same([p.detach() for p in it.params], before)
        assert same(here.step(k, without).bits(), memory.step(k, without).bits()), (k, happens)


def fail():
    raise CSDOSError(5, "once")


@one_schedule
def test_in_groups():
    """Groups with fp32 and 8-bit states beside each other."""

    def run(devices, device):
        params = params_on(device)
        groups = [{"params": params[:3], "state_dtype": "fp32"}, {"params": params[3:], "state_dtype": "8bit"}]
        it = Trained(devices, params=groups)
        it.params = params
        return it.step(0).bits() + it.step(1).bits()

    assert same(run(["gpu:"], DEVICE), run(["ram:"], "cpu"))
